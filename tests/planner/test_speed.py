"""Time and money: counts worked out by hand, laws of the roofline, prices, and what `plan` prints."""

import json
from statistics import median

import pytest
from typer.testing import CliRunner

from app.cli import app
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Layout, Row
from planner.accuracy.speed_fit import least
from planner.accuracy.speed_score import read, sample_of
from planner.answers.amount import longest_of
from planner.datafiles import data_dir
from planner.errors import UsageError
from planner.machines.machine import find_gpu, gpu_catalogue, make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.recipe import Recipe
from planner.speed.cards import card_speed
from planner.speed.cost import Amount, cost_of, listed_prices, parse_price
from planner.speed.engine import engine
from planner.speed.parameters import document, parameters
from planner.speed.roofline import LAUNCHES, SHEET_SHARE, rates, seconds
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
    computing = 2 * (8_030_261_248 - 128_256 * 4096) / made_engine.products()
    assert two - one == pytest.approx(sequence + computing, rel=1e-6)
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


def test_bitsandbytes_is_unpacked_for_several_rows_only():
    found = plan(
        catalogue_model(LLAMA),
        Recipe(task="serve", framework="vllm", quantization="nf4", context=4096),
        make_machine("rtx-4090"),
    )
    p = parameters()
    made_engine = engine(found.spec, found.resolved, card_speed("rtx-4090"), p)
    gained = made_engine.decode(2, 100).seconds - made_engine.decode(1, 100).seconds
    assert gained > made_engine.work.unpacked / (82.6e12 * p.unpack) > 0


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


def test_rows_with_estimated_lengths_decide_no_parameter():
    rows = {row.id: row for row in read(data_dir() / "speed" / "throughput.csv")}
    assert sample_of(rows["T0156"]).decides
    assert not sample_of(rows["T0244"]).decides


def test_what_a_step_computes_beside_the_model_is_said_to_be_left_out():
    ppo = made(gpu="h100", task="ppo", framework="trl", context=1024)
    assert any("the value model's own passes" in note for note in ppo.time.notes)
    assert not made().time.notes
