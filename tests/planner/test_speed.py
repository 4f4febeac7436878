"""Time and money: counts worked out by hand, laws of the roofline, prices, and what `plan` prints."""

import json
from statistics import median

import pytest
from typer.testing import CliRunner

from app.cli import app
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Layout, Row
from planner.accuracy.speed_calibrate import RatioRow, held_out
from planner.accuracy.speed_decode import card_of, release_of
from planner.accuracy.speed_fit import BEFORE, least
from planner.accuracy.speed_score import DECODING, read, sample_of
from planner.answers.amount import longest_of
from planner.datafiles import data_dir
from planner.errors import UsageError
from planner.machines.machine import find_gpu, gpu_catalogue, make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.recipe import Recipe
from planner.speed.cards import card_speed
from planner.speed.cost import Amount, cost_of, listed_prices, parse_price
from planner.speed.engine import Engine, engine, engine_work
from planner.speed.parameters import document, parameters
from planner.speed.roofline import LAUNCHES, LINK_SHARE, SHEET_SHARE, rates, seconds
from planner.speed.time import completion_lengths, deviation, rollout
from planner.speed.traffic import traffic
from planner.speed.work import Pass, attention_flops, layer_products, training_work

LLAMA = "llama-3.1-8b"


def made(gpu="a100-80gb", gpus=1, **recipe):
    values = {"task": "sft", "context": 4096, "framework": "hf-trainer", **recipe}
    return plan(catalogue_model(LLAMA), Recipe(**values), make_machine(gpu, gpus=gpus))


def passes(**recipe):
    found = made(**recipe)
    return {each.name: each for each in training_work(found.spec, found.resolved).passes}


def test_products_of_a_layer_by_hand():
    layer = catalogue_model(LLAMA).layers[0]
    # q, o: 4096 x 4096; k, v: 1024 x 4096; gate, up, down: 14336 x 4096
    weights = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    assert sum(each.flops for each in layer_products(layer, 100)) == 2 * 100 * weights
    # causal: 32 heads of 128, scores and values, half of 4,096 keys
    assert attention_flops(layer, 100, 4096) == 2 * 100 * 2048 * 32 * (128 + 128)


def test_experts_compute_what_is_chosen_and_read_what_is_touched():
    model = catalogue_model("qwen3-30b-a3b")
    layer = model.layers[0]
    routed = [each for each in layer_products(layer, 1) if each.into == 768 or each.out == 1536]
    each_token = sum(each.flops for each in routed) / 2
    assert each_token == pytest.approx(8 * 3 * 2048 * 768)  # 8 of 128 experts
    few, many = (
        sum(each.matrices for each in layer_products(layer, tokens) if each.matrices > 1)
        for tokens in (1, 10_000)
    )
    assert few == pytest.approx(2 * 8)
    assert many == pytest.approx(2 * 128)


def test_checkpointing_computes_the_forward_again():
    kept, again = (
        passes(method="full", checkpointing="none"),
        passes(method="full", checkpointing="full"),
    )
    assert again["backward"].flops == kept["backward"].flops + kept["forward"].flops
    assert kept["backward"].flops == 2 * kept["forward"].flops  # of inputs, and of weights
    lora = passes(method="lora", checkpointing="none")
    assert lora["backward"].flops < 1.2 * kept["forward"].flops


def test_packed_weights_are_unpacked_in_every_pass():
    found = passes(method="qlora", checkpointing="full")
    assert found["backward"].packed == 2 * found["forward"].packed > 0
    assert passes(method="lora")["forward"].packed == 0
    # 4 bits and constants read, 16 bits written
    extra = (
        found["forward"].moved_bytes
        - passes(method="lora", checkpointing="full")["forward"].moved_bytes
    )
    assert extra > 2.5 * found["forward"].packed


def test_few_rows_are_bound_by_launches_and_never_reach_the_peak():
    card, p = card_speed("a100-sxm4-80gb"), parameters()
    speed = rates(card, "bf16", p)
    assert seconds(Pass("forward", flops=1e9, launches=1000), speed, p).bound_by == LAUNCHES
    model = catalogue_model(LLAMA)
    shares = []
    for tokens in (64, 1024, 16384):
        each = layer_products(model.layers[0], tokens)
        work = Pass(
            "forward",
            flops=sum(x.flops for x in each),
            product_bytes=sum(x.bytes(2, 2) for x in each),
        )
        shares.append(work.flops / seconds(work, speed, p).seconds / card.fastest("bf16"))
    assert shares == sorted(shares)
    assert shares[-1] < 1


def test_decoding_reads_weights_once_and_every_sequence_its_cache():
    found = plan(
        catalogue_model(LLAMA),
        Recipe(task="serve", framework="vllm==0.11", context=4096, micro_batch_size=8),
        make_machine("h100"),
    )
    p = parameters()
    made_engine = engine(found.spec, found.resolved, card_speed("h100-sxm"), p)
    one, two = (made_engine.decode(batch, 2000).seconds for batch in (1, 2))
    reached = 3350e9 * p.decode_bandwidth
    sequence = 2000 * 131_072 / reached + p.sequence_s  # 32 layers x 2 x 8 heads x 128 x 2 B
    computing = (
        2
        * (8_030_261_248 - 128_256 * 4096)
        / (card_speed("h100-sxm").ceiling("bf16")[0] * p.product)
    )
    # of a layer: 4 norms' and sums' widths of 4,096 read and written; rotary on 32 + 8 heads; SwiGLU of 14,336;
    # products: q, k, v in and out, o, gate and up, down
    moved = 8 * 4096 + 2 * 40 * 128 + 3 * 14336
    moved += (3 * 4096 + 4096 + 2 * 1024) + 2 * 4096 + 2 * (4096 + 14336) + (14336 + 4096)
    assert made_engine.work.moved == 32 * 2 * moved
    assert two - one == pytest.approx(sequence + computing + 64 * moved / reached, rel=1e-6)
    assert one > (8_030_261_248 - 128_256 * 4096) * 2 / 3350e9
    newest = plan(found.spec, found.asked.model_copy(update={"framework": "vllm"}), found.machine)
    ahead = engine(newest.spec, newest.resolved, card_speed("h100-sxm"), p).decode(1, 2000).seconds
    assert one - ahead == pytest.approx(
        p.engine_step_s + p.sequence_s
    )  # hidden behind the device's


def test_a_batch_shrinks_as_its_sequences_end():
    found = plan(
        catalogue_model(LLAMA),
        Recipe(task="serve", framework="vllm", context=4096, micro_batch_size=8),
        make_machine("h100"),
    )
    made_engine = engine(found.spec, found.resolved, card_speed("h100-sxm"), parameters())
    _, even = made_engine.generate(8, 100.0, (1000.0,), prompts=8, at_once=8)
    _, spread = made_engine.generate(8, 100.0, (250.0, 500.0, 750.0, 1000.0), prompts=8, at_once=8)
    _, waves = made_engine.generate(16, 100.0, (1000.0,), prompts=16, at_once=8)
    assert spread.seconds < even.seconds
    assert waves.seconds == pytest.approx(2 * even.seconds, rel=0.05)


def test_every_card_price_and_matmul_joins_through_the_resolver():
    catalogue = gpu_catalogue()
    for folder, name in (
        ("speed", "cards"),
        ("speed", "matmul"),
        ("speed", "links"),
        ("prices", "cloud"),
    ):
        text = (data_dir() / folder / f"{name}.csv").read_text(encoding="utf-8")
        ids = {line.split(",", 1)[0] for line in text.splitlines()[1:]}
        assert ids <= set(catalogue), name
        assert all(find_gpu(each).id == each for each in ids)
    for price in listed_prices().values():
        assert 0 < price.low <= price.high
        assert "read 20" in price.source


def test_no_measured_matmul_is_far_above_its_sheet():
    for gpu in gpu_catalogue().values():
        card = card_speed(gpu.id)
        for dtype, measured in (card.measured if card else {}).items():
            if card.peaks.get(dtype):
                assert measured <= 1.25 * card.peaks[dtype], (gpu.id, dtype)


def test_at_most_fifteen_parameters_each_with_its_meaning():
    found = document()["parameters"]
    assert len(found) <= 15
    assert all(each["what"] and each["rows"] for each in found.values())
    assert all(each["value"] > 0 for each in found.values())


def test_a_row_above_the_peak_is_refused_with_the_arithmetic():
    rows = read(data_dir() / "speed" / "throughput.csv")
    row = next(row for row in rows if row.id == "T0156")
    assert sample_of(row).measured == pytest.approx(4 * 4096 / 3896.426, rel=0.01)
    with pytest.raises(
        NotCovered, match=r"impossible: .* FLOPs in .* s are .* TFLOPS; a100-sxm4-80gb does"
    ):
        sample_of(row.changed(value="38964", notes=""))


def test_samples_without_lengths_are_refused_in_one_line():
    row = Row(
        Layout.THROUGHPUT, {"id": "x", "confidence": "0.9", "seq_len": "variable, cut at 512"}
    )
    with pytest.raises(NotCovered, match="samples without lengths"):
        sample_of(row)


def test_the_search_finds_a_minimum():
    found = least(lambda x: [x[0] - 3, 2 * (x[1] + 1), x[0] * x[1] + 3], [0.0, 0.0])
    assert found == pytest.approx([3, -1], abs=1e-3)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("2.4", 2.4, 2.4), ("$2.40/h", 2.4, 2.4), ("2.4-3.1", 2.4, 3.1), ("2 usd/hour", 2, 2)],
)
def test_prices(text, low, high):
    price = parse_price(text)
    assert (price.low, price.high) == (low, high)


@pytest.mark.parametrize("text", ["2.4 EUR", "3 $/day", "cheap", "-1", "3-2", "1e9"])
def test_a_price_with_a_wrong_unit_is_one_clear_line(text):
    with pytest.raises(UsageError, match="price: "):
        parse_price(text)


def test_cost_is_a_range_and_scales_with_steps_and_gpus():
    found = made()
    once = cost_of(found.time, found.machine, Amount(total_steps=100), "2")
    twice = cost_of(found.time, found.machine, Amount(total_steps=200), "2")
    assert once.usd[0] < once.hours[1] * 2 < once.usd[1]
    assert twice.usd[1] == pytest.approx(2 * once.usd[1])
    listed = cost_of(found.time, found.machine, Amount(samples=10, epochs=2), None)
    assert listed.steps == -(-20 // found.resolved.batch)
    assert listed.price.low < listed.price.high
    assert listed.kilowatt_hours[1] == pytest.approx(listed.hours[2] * 0.4)  # 400 W


def test_the_longest_of_several_draws():
    assert longest_of([100, 200], 1) == pytest.approx(150)
    assert longest_of([100, 200], 2) == pytest.approx(175)


def run(*args: str):
    result = CliRunner().invoke(app, ["plan", LLAMA, "--framework", "hf-trainer", *args])
    assert result.exception is None or isinstance(result.exception, SystemExit | UsageError), (
        result.exception
    )
    return result


def test_plan_prints_time_and_money(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("512 50\n1024 50\n")
    shown = run(
        "--gpu", "h100", "--context", "2048", "--samples", "7473", "--epochs", "2", "--price", "2.4"
    )
    assert "bound by " in shown.output
    assert "tokens/s" in shown.output
    assert "$" in shown.output
    assert "kWh" in shown.output
    assert "every sample is 2,048 tokens long" in shown.output
    document = json.loads(
        run("--gpu", "h100", "--context", "2048", "--lengths", str(lengths), "--json").stdout
    )
    time, cost = document["time"], document["cost"]
    assert any("tokens on average" in note for note in time["assumptions"])
    assert {each["bound_by"] for each in time["phases"]} <= {
        "compute", "bandwidth", "link", "launches", "host",
    }  # fmt: skip
    assert time["step_seconds"] == pytest.approx(
        sum(each["seconds"] for each in time["phases"]), rel=1e-4
    )
    assert time["low_seconds"] < time["step_seconds"] < time["high_seconds"]
    assert time["run_hours"] == pytest.approx(time["steps"] * time["step_seconds"] / 3600, rel=1e-3)
    assert cost["usd_per_hour"]["low"] < cost["usd_per_hour"]["high"]
    assert cost["usd_per_run"]["low"] < cost["usd_per_run"]["high"]
    assert "2026" in cost["price_source"]


def test_a_card_without_known_speed_is_planned_in_memory_only():
    shown = run("--vram", "80GiB")
    assert "memory only" in shown.output
    document = json.loads(run("--vram", "80GiB", "--json").stdout)
    assert document["time"] is None
    assert "memory only" in document["time_unknown"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--price", "2.4 EUR"), "price: cannot read '2.4 EUR'"),
        (("--epochs", "3"), "epochs: of how many samples is not said"),
        (("--samples", "0"), "samples: 0 is not allowed"),
    ],
)
def test_bad_input_is_one_line(flags, says):
    result = run("--gpu", "h100", *flags)
    assert isinstance(result.exception, UsageError)
    assert says in result.exception.message


def test_a_mean_completion_ends_the_rollout_earlier():
    flags = ("--gpu", "h100", "--task", "grpo", "--context", "2048", "--generations", "4")
    flags = (*flags, "--framework", "vramwise")
    whole = json.loads(run(*flags, "--json").stdout)
    short = json.loads(run(*flags, "--mean-completion", "400", "--json").stdout)
    assert short["time"]["step_seconds"] < whole["time"]["step_seconds"]
    assert short["peak_bytes"] == whole["peak_bytes"]  # memory is the longest's
    assert any("400 tokens on average" in note for note in short["time"]["assumptions"])
    refused = run(*flags, "--mean-completion", "9000")
    assert "mean-completion: 9,000 is not allowed" in refused.exception.message


def test_rows_of_speed_are_scored_like_any_file(tmp_path):
    text = (data_dir() / "speed" / "throughput.csv").read_text(encoding="utf-8").splitlines()
    file = tmp_path / "rows.csv"
    kept = [line for line in text if line.startswith(("T0156,", "T0599,"))]
    file.write_text("\n".join([text[0], *kept]) + "\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["accuracy", "--csv", str(file), "--json", "--rows"])
    rows = {each["id"]: each for each in json.loads(result.stdout)["predictions"]}
    assert set(rows) == {"T0156", "T0599"}
    assert {each["quantity"] for each in rows.values()} == {"step_seconds"}
    assert abs(rows["T0156"]["error"]) < 0.35


def test_the_sheets_share_is_that_of_the_measured_cards():
    found = []
    for gpu in gpu_catalogue().values():
        card, dtype = card_speed(gpu.id), "bf16" if gpu.bf16_native else "fp16"
        if card and dtype in card.measured and card.peaks.get(dtype):
            found.append(card.measured[dtype] / card.peaks[dtype])
    assert len(found) > 20
    assert median(found) == pytest.approx(SHEET_SHARE, abs=0.05)


def test_transformers_go_over_the_cache_as_often_as_they_copy_it():
    recipe = {"task": "serve", "context": 4096, "framework": "hf-trainer"}
    found = plan(
        catalogue_model(LLAMA),
        Recipe(**recipe, engine={"kind": "transformers"}),
        make_machine("h100"),
    )
    work = engine(found.spec, found.resolved, card_speed("h100-sxm"), parameters()).work
    # joined (2), 4 copies for 8 key heads (1 + 4), read by 32 blocks of about 100 multiprocessors
    assert work.passes(1) == pytest.approx(2 + 5 + 4 * 100 / 32)
    assert work.passes(64) == pytest.approx(2 + 5 + 4)
    vllm = made_vllm()
    assert (
        engine(vllm.spec, vllm.resolved, card_speed("h100-sxm"), parameters()).work.passes(1) == 1
    )


def test_bitsandbytes_looks_up_every_element_while_it_reads_or_before_it_multiplies():
    found = plan(
        catalogue_model(LLAMA),
        Recipe(task="serve", framework="vllm", quantization="nf4", context=4096),
        make_machine("t4"),
    )
    p = parameters()
    made_engine = engine(found.spec, found.resolved, card_speed("t4"), p)
    unpacking = made_engine.work.unpacked / (8.1e12 * p.unpack)
    one, two = (made_engine.decode(batch, 100).seconds for batch in (1, 2))
    reading = made_engine.work.always_bytes / (320e9 * p.decode_bandwidth)
    assert unpacking > reading
    # the rest are 100 tokens' cache and products, in fp16: bf16's would take 15 ms
    assert unpacking < one < unpacking + 0.008
    # two rows: 16-bit weights are written and read; one more row's cache, products and time of a sequence
    wide = made_engine.work.unpacked * (2 + 2) / (320e9 * p.decode_bandwidth)
    assert made_engine.work.unpacked == 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    assert two - one == pytest.approx(reading + wide, abs=0.003)
    short, none = (made_engine.prefill(1, tokens).seconds for tokens in (1, 0))
    assert none == 0
    assert short > reading + unpacking + wide  # a prompt's rows are several


def rollout_of(model=LLAMA, gpu="h100", **recipe):
    values = {"task": "grpo", "context": 1024, "num_generations": 4, "micro_batch_size": 4}
    found = plan(catalogue_model(model), Recipe(**{**values, **recipe}), make_machine(gpu))
    notes = []
    made_engine = engine(found.spec, found.resolved, card_speed("h100-sxm"), parameters())
    return made_engine, rollout(found, made_engine, notes, 0)


def test_adapters_stay_beside_the_weights_while_transformers_generate():
    def launches(method, framework="trl"):
        recipe = {"dtype": "bf16", "mixed_precision": "none", "engine": {"kind": "transformers"}}
        made_engine, _ = rollout_of(method=method, framework=framework, **recipe)
        return made_engine.work.launches

    # 7 matrices a layer, each: input cast, A, B, scaled, cast, added
    assert launches("lora") - launches("full") == 32 * 7 * 6
    # Unsloth's kernels are its training's: norms, rotary and SwiGLU run operation by operation, 34 a layer
    assert launches("full", "unsloth") == 32 * 34 + 12


def test_unsloths_gpt_oss_generates_with_every_expert():
    made_engine, _ = rollout_of(
        "gpt-oss-20b",
        method="qlora",
        framework="unsloth==2025.11.3",
        engine={"kind": "transformers"},
    )
    work = made_engine.work
    assert work.top_k == work.experts == 32
    # 24 layers x 32 experts: gate and up 5,760 x 2,880, down 2,880 x 2,880; biases stay in 16 bits
    assert work.unpacked_experts == pytest.approx(24 * 32 * 3 * 2880**2, rel=0.002)
    assert work.always_bytes > 2 * 201_088 * 2880  # the head stays in 16 bits
    other, _ = rollout_of(
        "qwen3-30b-a3b", method="qlora", framework="unsloth", engine={"kind": "transformers"}
    )
    assert other.work.top_k == 8


def test_of_packed_experts_those_that_a_token_chose_are_made_and_read():
    _, made_engine = served("qwen3-30b-a3b", framework="vllm==0.7", quantization="nf4")
    work, reached = made_engine.work, 3350e9 * parameters().decode_bandwidth
    touched = (1 - (1 - 8 / 128) ** 64) - (1 - (1 - 8 / 128) ** 2)
    bytes_each, elements = work.expert_bytes * touched, work.unpacked_experts * touched
    made_in = elements / (67e12 * parameters().unpack)
    rest = 62 * (parameters().sequence_s + made_engine.computing() + work.moved / reached)
    step = made_engine.decode(64, 1).seconds - made_engine.decode(2, 1).seconds
    assert step == pytest.approx((bytes_each + 4 * elements) / reached + made_in + rest, rel=0.01)


def test_routed_experts_multiply_at_a_share_of_their_own():
    _, made_engine = served("qwen3-30b-a3b")
    p, work = parameters(), made_engine.work
    # 48 layers x 8 of 128 experts x three matrices of 2,048 x 768
    assert work.active_experts == pytest.approx(48 * 8 * 3 * 2048 * 768)
    dense = work.active - work.active_experts
    best = card_speed("h100-sxm").ceiling("bf16")[0]
    assert made_engine.computing() == pytest.approx(
        2 * (dense / p.product + work.active_experts / p.engine_product) / best
    )


def test_a_graph_replays_the_kernels_of_every_layer():
    _, dense = served()
    _, mixture = served("qwen3-30b-a3b")
    assert dense.work.kernels == 32 * 10
    assert mixture.work.kernels == 48 * 14  # router, choice, order and sum
    _, eager = served(engine={"cuda_graphs": False})
    assert eager.work.kernels == 0
    p = parameters()
    fewer = dense._replace(work=dense.work._replace(kernels=0))
    assert dense.decode(1, 100).seconds - fewer.decode(1, 100).seconds == pytest.approx(
        320 * p.kernel_s
    )


def test_sums_over_pcie_go_from_rank_to_rank():
    p = parameters()
    _, board = served(gpus=4, engine={"tensor_parallel": 4})
    _, cards = served(gpu="l40s", gpus=4, engine={"tensor_parallel": 4})
    moved = 2 * 3 / 4 * 4096 * 2  # of one token, in 16 bits
    assert board.summing(1) == pytest.approx(64 * (p.reduce_s + moved / (450e9 * LINK_SHARE)))
    assert cards.summing(1) == pytest.approx(64 * (3 * p.reduce_s + moved / (31.5e9 * LINK_SHARE)))


def test_a_steps_completions_run_together_where_the_framework_sends_them_together():
    accumulated = {"gradient_accumulation": 4, "method": "lora"}
    shared = {**accumulated, "engine": {"kind": "vllm-shared"}}
    alone, _ = rollout_of(framework="unsloth==2025.5.4", **shared)
    seconds_of = {}
    for version in ("2025.5.4", "2025.9.6"):
        _, (_, decode) = rollout_of(framework=f"unsloth=={version}", **shared)
        seconds_of[version] = decode.seconds
    # TRL before 0.18, which spring's Unsloth has, generates for every micro-batch: four times as many steps
    step = alone.decode(4, 768).seconds / alone.decode(16, 768).seconds
    assert seconds_of["2025.5.4"] / seconds_of["2025.9.6"] == pytest.approx(4 * step, rel=0.03)
    # unsloth_zoo's load_vllm runs one sequence at a time of a model with a tower
    model = "qwen2.5-vl-7b"
    one, (_, decode) = rollout_of(model, framework="unsloth==2025.9.6", **shared)
    tokens = one.r.completion_tokens
    step = one.decode(1, one.r.prompt_tokens + tokens / 2).seconds
    assert decode.seconds == pytest.approx(16 * tokens * step, rel=0.01)


def test_completions_are_spread_like_logs_of_runs():
    lengths = completion_lengths(400, 1000, 2)
    assert sum(lengths) == pytest.approx(800)
    # twelve logs: of two completions the longer is 1.03 to 1.19 of the mean, of eight the longest 1.6
    assert 0.15 < deviation() < 0.3
    assert lengths[1] / 400 == pytest.approx(1 + 0.589 * deviation(), abs=0.02)
    assert max(completion_lengths(400, 600, 64)) == 600


def made_vllm():
    recipe = Recipe(task="serve", framework="vllm", context=4096, micro_batch_size=8)
    return plan(catalogue_model(LLAMA), recipe, make_machine("h100"))


def test_gathered_units_are_waited_for_and_other_traffic_is_hidden():
    alone, several = (
        made(gpu="h100", gpus=gpus, framework="torchtitan", method="full", sharding=shard)
        for gpus, shard in ((1, "none"), (8, "fsdp2"))
    )
    names = {each.name: each for each in several.time.phases}
    assert "communication" not in {each.name for each in alone.time.phases}
    # a unit a layer, forward and backward; 16 GB over NVLink are behind two seconds of products
    assert names["communication"].seconds == pytest.approx(2 * 32 * parameters().unit_s)
    assert names["communication"].bound_by == "link"


def test_states_in_host_memory_are_waited_for_while_the_gpu_steps():
    recipe = {"gpu": "a100-80gb", "framework": "vramwise", "method": "full"}
    here, away = (made(**recipe, optimizer_offload=away) for away in (False, True))
    states = (
        8_030_261_248 * 8
    )  # AdamW's two in fp32, beside bf16 weights that are rounded at random
    moved = {each.name: each.seconds for each in away.time.phases}
    # they come over PCIe 4 and go back, both ways at once, and nothing else runs
    assert moved["communication"] == pytest.approx(states / (31.5e9 * LINK_SHARE), rel=0.001)
    assert away.time.step_seconds > here.time.step_seconds + 0.9 * moved["communication"]


def test_deepspeeds_offloaded_step_is_the_hosts():
    recipe = {"gpu": "a100-80gb", "gpus": 8, "method": "full", "sharding": "zero2"}
    run = made(**recipe, optimizer_offload=True, gradient_accumulation=4)
    sent = traffic(*run.whole, 8) if run.whole else traffic(run.spec, run.resolved, 8)
    shard = 8_030_261_248 // 8
    # fp32: 3 sums of read, read and written; norm and clip; gradient, master and two states
    assert sent.host_steps == 8 * shard * 4 * (3 * 3 + 3 + 1 + 2 * 3)
    assert sent.stepping == shard * 2
    assert sent.host == shard * 2 * (4 + 1)  # a gradient in every micro-batch, weights once
    phases = {each.name: each for each in run.time.phases}
    # two sockets of eight channels of DDR4-3200, of which STREAM reaches 0.72
    assert phases["host step"].seconds == pytest.approx(sent.host_steps / (0.72 * 16 * 25.6e9))
    assert phases["host step"].bound_by == "host"
    assert "host step" not in {each.name for each in made(**recipe).time.phases}


def test_a_host_that_nobody_names_is_a_range():
    recipe = {"method": "full", "sharding": "zero2", "optimizer_offload": True}
    known, wide = (made(gpu=gpu, gpus=2, **recipe) for gpu in ("h100", "l40s"))
    ends = []
    for run in (known, wide):
        step = next(each for each in run.time.phases if each.name == "host step")
        ends.append(step.high / step.low)
    assert ends[1] / ends[0] == pytest.approx(409.6 / 51.2)  # 2 channels or 16
    assert any("a host that nobody names moves, 51 to 410" in note for note in wide.time.notes)
    assert any("442 GB/s, 72% of what the memory of 2 x Xeon 8480C" in n for n in known.time.notes)


def test_a_disk_that_holds_states_is_said_to_be_left_out():
    recipe = {"gpus": 8, "method": "full", "sharding": "zero3", "optimizer_offload": True}
    run = made(**recipe, offload={"device": "nvme"})
    assert any("the disk's reads and writes" in note for note in run.time.notes)


def test_a_bridge_joins_two_cards():
    bridged, board = card_speed("rtx-3090"), card_speed("a100-sxm4-80gb")
    assert bridged.link(2) == 56.25e9
    # no GeForce card reads another's memory: what goes by PCIe goes through the host's
    assert bridged.link(4) == pytest.approx(31.5e9 * 11.28 / 27.12)
    patched = {row.id: row for row in read(data_dir() / "speed" / "decode.csv")}["D03352"]
    assert card_of(patched, bridged).link(4) == pytest.approx(16 * 0.985e9)
    assert (board.link(2), board.link(8)) == (300e9, 300e9)
    assert card_speed("rtx-6000-ada").link(2) == card_speed("rtx-6000-ada").pcie > 0


def served(model=LLAMA, gpu="h100", gpus=1, framework="vllm==0.11", **fields):
    values = {"task": "serve", "context": 4096, "micro_batch_size": 64, **fields}
    found = plan(
        catalogue_model(model), Recipe(framework=framework, **values), make_machine(gpu, gpus=gpus)
    )
    return found, engine(found.spec, found.resolved, card_speed(found.machine.gpu.id), parameters())


def test_stages_of_a_pipeline_work_on_parts_of_a_batch():
    _, whole = served()
    _, halves = served(gpus=2, engine={"pipeline_parallel": 2})
    assert (whole.work.stages, halves.work.stages) == (1, 2)
    p, reached = parameters(), 3350e9 * parameters().decode_bandwidth
    cache = 64 * 2000 * 131_072 / reached
    computing = 64 * (whole.computing() + whole.work.moved / reached)
    gained = whole.decode(64, 2000).seconds - halves.decode(64, 2000).seconds
    # both stages read and compute at once; the weights are read for each half, by the stage that has them
    assert gained == pytest.approx((cache + computing) / 2, rel=0.02)
    alone = whole.decode(1, 2000).seconds - halves.decode(1, 2000).seconds
    assert alone == pytest.approx(0, abs=0.02 * p.engine_step_s)


def test_a_releases_own_time_for_a_step():
    found, _ = served()
    card, p = card_speed("h100-sxm"), parameters()

    def step(*release):
        work = engine_work(found.spec, found.resolved, card, release)
        return Engine(found.spec, found.resolved, card, p, work, {}).decode(1, 2000).seconds

    assert step(0, 13) - step(0, 14) == pytest.approx(p.engine_step_s + p.sequence_s)


def test_graphs_of_old_releases_cover_8192_tokens():
    found, _ = served("qwen2.5-0.5b", context=32768)
    card, p = card_speed("h100-sxm"), parameters()

    def grows(*release):
        work = engine_work(found.spec, found.resolved, card, release)
        made_engine = Engine(found.spec, found.resolved, card, p, work, {})
        return made_engine.decode(1, 8193).seconds - made_engine.decode(1, 8192).seconds

    assert grows(0, 11) < 1e-6  # a token's cache
    # every kernel is launched, and the device's half millisecond is hidden behind that
    launches = engine_work(found.spec, found.resolved, card, (0, 5)).beyond
    assert launches > 24 * 8
    assert grows(0, 5) == pytest.approx(launches * p.generate_launch_s, rel=0.2)


def test_experts_bytes_are_counted_in_their_own_scheme():
    _, made_engine = served("gpt-oss-20b")
    # 24 layers x 32 experts x 3 matrices of 2880 x 2880, both padded to what the kernel's tiles need,
    # 17 bytes for 32 elements
    exact = 24 * 32 * 3 * 2880**2 * 17 / 32
    assert exact < made_engine.work.expert_bytes < 1.1 * exact
    assert 0 < made_engine.work.always_bytes < 3 * 2**30  # attention, router and head in 16 bits


def decoding(name):
    rows = {row.id: row for row in read(data_dir() / "speed" / "decode.csv")}
    return rows[name]


def test_rows_of_a_checkpoint_published_in_its_scheme_are_planned_in_it():
    native = sample_of(decoding("D00102"))  # gpt-oss-120b, mxfp4
    assert native.run.plan.resolved.quantization == "mxfp4"
    assert native.work.expert_bytes < 70e9  # 117 B parameters in 4.25 bits


def test_a_rows_command_link_and_power_limit_are_read():
    flagged = sample_of(decoding("D00143"))  # --async-scheduling --max-num-batched-tokens 16384
    assert flagged.run.plan.resolved.max_num_batched_tokens == 16384
    assert flagged.work.ahead
    rig = sample_of(decoding("D03357"))  # PCIe 3.0 x16, 220 W of 350
    assert rig.card.nvlink == 0
    assert rig.card.pcie == pytest.approx(15.76e9)
    clock = rig.card.measured["bf16"] / card_speed("rtx-3090").measured["bf16"]
    assert clock**3 == pytest.approx(220 / 350)
    assert rig.card.bandwidth == card_speed("rtx-3090").bandwidth


def training(name):
    rows = {row.id: row for row in read(data_dir() / "speed" / "throughput.csv")}
    return sample_of(rows[name])


def test_compiled_and_recomputing_runs_are_planned_so():
    assert [training(name).run.plan.resolved.compile for name in ("T0467", "T0468")] == [
        False,
        True,
    ]
    recomputes = training("T0364").run.plan.resolved  # prime-rl's "Recompute"
    assert recomputes.checkpointing == "full"
    assert recomputes.compile
    assert training("T0553").run.plan.resolved.checkpointing == "selective-op"


def test_sequence_parallel_rows_are_divided():
    whole, halves, quarters = (training(name) for name in ("T0694", "T0693", "T0692"))
    assert [each.run.tokens for each in (whole, halves, quarters)] == [288_000, 144_000, 72_000]
    layout = quarters.run.plan.resolved.layout
    assert (layout.context, layout.context_kind, layout.data) == (4, "ulysses", 2)
    # adapters of the Trainer's are fp32, which ms-swift's are not
    assert 1.5 < whole.predicted(parameters()) / halves.predicted(parameters()) < 2.1


def test_packed_experts_of_their_own_run_one_after_another():
    def launches(quantization):
        run = plan(
            catalogue_model("gpt-oss-20b"),
            Recipe(
                task="grpo", framework="unsloth", quantization=quantization, context=1024,
                method="qlora" if quantization else "lora", engine={"kind": "transformers"},
            ),
            make_machine("h100"),
        )  # fmt: skip
        work = engine(run.spec, run.resolved, card_speed("h100-sxm"), parameters()).work
        return work.launches

    # 24 layers x 32 experts, each two dequantised products and what lies between them
    assert launches("nf4") > 24 * 32 * 6
    assert launches(None) < 24 * 32 * 6


def test_exllama_launches_what_16_bit_weights_do():
    def launches(quantization):
        recipe = {"task": "serve", "context": 4096, "framework": "hf-trainer"}
        found = plan(
            catalogue_model(LLAMA),
            Recipe(**recipe, quantization=quantization, engine={"kind": "transformers"}),
            make_machine("a100-80gb"),
        )
        card = card_speed("a100-sxm4-80gb")
        return engine(found.spec, found.resolved, card, parameters()).work.launches

    assert launches("gptq-4bit") == launches("none")
    assert launches("gptq-8bit") == launches("none") + 32 * 7  # dequantised, then multiplied


def test_a_parameter_without_rows_stays_what_one_would_say_before_any():
    rows = [decoding(name) for name in ("D00525", "D00589")]  # transformers alone
    found = DECODING.run([sample_of(row) for row in rows])
    assert found.reduce_s == pytest.approx(BEFORE.reduce_s, rel=0.02)
    assert parameters().reduce_s != pytest.approx(BEFORE.reduce_s, rel=0.2)


def test_intervals_are_judged_by_factors_of_other_sources():
    near = [RatioRow(f"a{k}", "a", "train", str(1 + k / 100), "1") for k in range(-15, 15)]
    far = [RatioRow(f"b{k}", "b", "train", str(3 + k / 100), "1") for k in range(-15, 15)]
    assert held_out("train", [*near, *far]) == (0, 60)
    assert held_out("train", near) == (0, 0)  # nobody else measured
    both = [*near, *(row._replace(source="b") for row in near)]
    inside, judged = held_out("train", both)
    assert judged == 60
    assert inside / judged == pytest.approx(0.9, abs=0.05)


def test_a_small_board_is_as_fast_as_it_stays():
    # 42.7 for thirty products, 25 under load: 70 W
    assert card_speed("t4").ceiling("fp16") == (25e12, True)


def test_zero_3_fetches_every_layer_on_one_gpu_too():
    recipe = {"method": "full", "framework": "hf-trainer", "context": 256}
    plain, hooked = (made(sharding=kind, **recipe) for kind in ("none", "zero3"))
    units = [
        sum(each.units for each in training_work(x.spec, x.resolved).passes)
        for x in (plain, hooked)
    ]
    assert units == [0, 2 * 32]
    p, speed = parameters(), rates(card_speed("a100-sxm4-80gb"), "bf16", parameters())
    work = {each.name: each for each in training_work(hooked.spec, hooked.resolved).passes}[
        "forward"
    ]
    # 256 rows compute in less than the host takes
    waited = work.launches * p.launch_s + 32 * p.unit_s
    assert seconds(work, speed, p).seconds == pytest.approx(waited)


def test_a_row_that_names_a_month_has_the_release_of_that_month():
    rows = {row.id: row for row in read(data_dir() / "speed" / "decode.csv")}
    assert release_of(rows["D03232"].changed(version="latest image 2025-10")) == (0, 11)
    assert release_of(rows["D03232"].changed(version="2025-02..04")) == (0, 7)
    assert release_of(rows["D03232"].changed(version="v0.13.0")) == (0, 13)
    assert release_of(rows["D03232"].changed(version="latest")) == ()


def test_rows_with_estimated_lengths_decide_no_parameter():
    rows = {row.id: row for row in read(data_dir() / "speed" / "throughput.csv")}
    assert sample_of(rows["T0156"]).decides
    assert not sample_of(rows["T0244"]).decides


def test_what_a_step_computes_beside_the_model_is_said_to_be_left_out():
    ppo = made(gpu="h100", task="ppo", framework="trl", context=1024)
    assert any("the value model's own passes" in note for note in ppo.time.notes)
    assert not made().time.notes
