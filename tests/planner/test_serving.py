"""A server's view: requests at once, the longest, adapters, shared prefixes, and what makes it start."""

import json
import shlex
from typing import Any

import pytest

from app.cli import main
from planner.answers.serving import ServingView, longest_length, serving_view, with_length
from planner.answers.serving_changes import changed
from planner.exporters import export_run
from planner.importers import import_config
from planner.machines.machine import Machine, make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import Plan, plan
from planner.report.serving import serving_text
from planner.run.recipe import Recipe, RunFile
from planner.run.runfile import make_recipe
from planner.units import GiB

TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Keys and values of Llama-3.1-8B: 32 layers, 8 heads of 128, 16 bit."""


def served(name: str, gpu: str = "rtx-4090", **fields: Any) -> tuple[ServingView, Plan]:
    """Return the view of a server and its plan."""
    machine: Machine = fields.pop("machine", make_machine(gpu))
    recipe = make_recipe(task="serve", framework="vllm", **fields)
    model = catalogue_model(name)
    base = plan(model, recipe, machine)
    view = serving_view(model, recipe, machine, base)
    assert view is not None
    return view, base


def answer(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    """Return the JSON document of a `vramwise` line."""
    assert main([*shlex.split(line), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_requests_of_every_length_by_hand() -> None:
    # 8 GiB of pool are 65,536 tokens of 131,072 B, in blocks of 16
    engine = {"kv_bytes": 8 * GiB, "max_num_seqs": 24}
    view, _ = served("llama-3.1-8b", context=12_000, prompt_length=2_990, completion_length=10, engine=engine)  # fmt: skip
    assert TOKEN_BYTES == view.bytes_per_token == 131_072
    assert {row.tokens: (row.at_once, row.by) for row in view.requests} == {
        1024: (24, "max_num_seqs"),  # 64 blocks each: 4,096 / 64 = 64
        2048: (24, "max_num_seqs"),
        3000: (21, "cache"),  # 188 blocks
        4096: (16, "cache"),
        8192: (8, "cache"),
    }
    assert [row.tokens for row in view.requests if row.given] == [3000]
    assert all(row.low == row.at_once for row in view.requests)  # stated bytes: nothing to guess


def test_engines_side_by_side_serve_as_many_more() -> None:
    one, _ = served("llama-3.1-8b", context=4096)
    two, _ = served("llama-3.1-8b", context=4096, machine=make_machine("rtx-4090", gpus=2), engine={"data_parallel": 2})  # fmt: skip
    assert [row.at_once for row in two.requests] == [2 * row.at_once for row in one.requests]
    assert one.figures.kv_tokens == two.figures.kv_tokens


def test_a_shared_prefix_is_held_once_by_hand() -> None:
    # 4,096 blocks; 2,000 shared tokens are 125 of them; a request of 4,096 has 256 and then 131 of its own
    model, machine = catalogue_model("llama-3.1-8b"), make_machine("rtx-4090")
    recipe = make_recipe(task="serve", framework="vllm", context=4096, engine={"kv_bytes": 8 * GiB})
    view = serving_view(model, recipe, machine, plan(model, recipe, machine), shared_prefix=2000)
    assert view is not None
    assert view.prefix is not None
    assert (view.prefix.tokens, view.prefix.alone) == (2000, 16)
    assert view.prefix.at_once == (4096 - 125) // (256 - 125) == 30
    off = changed(recipe, {"engine.prefix_caching": False})
    without = serving_view(model, off, machine, plan(model, off, machine), shared_prefix=2000)
    assert without is not None
    assert without.prefix is not None
    assert (without.prefix.enabled, without.prefix.at_once) == (False, 16)


def test_without_prefixes_a_recurrent_layer_holds_one_state() -> None:
    on, _ = served("qwen3.5-9b", context=8192)
    off, _ = served("qwen3.5-9b", context=8192, engine={"prefix_caching": False})
    assert off.requests[-1].at_once > on.requests[-1].at_once
    old = make_recipe(task="serve", framework="vllm==0.7.3", context=4096)
    assert not plan(catalogue_model("llama-3.1-8b"), old, make_machine("rtx-4090")).resolved.prefix_caching  # fmt: skip


@pytest.mark.parametrize(("name", "gpu"), [("llama-3.1-8b", "rtx-4090"), ("gemma-2-9b", "l4")])
def test_the_longest_request_starts_and_one_token_more_does_not(name: str, gpu: str) -> None:
    model, machine = catalogue_model(name), make_machine(gpu)
    recipe = make_recipe(task="serve", framework="vllm", context=2048)
    tokens = longest_length(model, recipe, machine)
    assert plan(model, with_length(recipe, tokens), machine).fits
    assert not plan(model, with_length(recipe, tokens + 1), machine).fits


def test_adapter_slots_take_what_the_weights_grow_by() -> None:
    view, base = served("llama-3.1-8b", context=4096)
    assert view.slots is not None
    assert base.serving is not None
    one, more = (
        served("llama-3.1-8b", context=4096, engine={"max_loras": n, "max_lora_rank": 16})[1]
        for n in (1, 2)
    )
    assert one.serving is not None
    assert more.serving is not None
    assert view.slots.slot_bytes == more.serving.weights_bytes - one.serving.weights_bytes
    most = {"max_loras": view.slots.most, "max_lora_rank": 16}
    assert served("llama-3.1-8b", context=4096, engine=most)[0].starts
    over = {"max_loras": view.slots.most + 1, "max_lora_rank": 16}
    assert not served("llama-3.1-8b", context=4096, engine=over)[0].starts


REFUSED = [
    ("qwen3-8b", "rtx-4090", 40_960, {}),  # a single setting is enough
    ("llama-3.1-8b", "rtx-4090", 131_072, {}),  # two settings, two GPUs, or a shorter request
    ("qwen3-32b", "rtx-4090", 8_192, {}),  # 4 bit and fewer sequences, or four GPUs
    ("gemma-2-9b", "l4", 8_192, {}),
    ("llama-3.1-70b", "h100-sxm", 8_192, {}),
    ("llama-3.1-8b", "rtx-4060-ti-16gb", 4_096, {"max_loras": 8, "max_lora_rank": 256}),
    ("qwen3-8b", "rtx-3060", 8_192, {"cuda_graphs": False}),
    ("llama-3.1-405b", "rtx-3060", 4_096, {}),  # nothing helps
]


@pytest.mark.parametrize(("name", "gpu", "tokens", "engine"), REFUSED)
def test_what_is_offered_starts_as_it_is_typed(
    name: str, gpu: str, tokens: int, engine: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    view, base = served(name, gpu, context=tokens, engine=engine)
    assert not view.starts
    assert not base.fits
    assert view.why
    flags = {"max_loras": "--max-loras", "max_lora_rank": "--max-lora-rank"}
    words = [f"{flags[key]} {value}" for key, value in engine.items() if key in flags]
    words += ["--no-cuda-graphs"] if "cuda_graphs" in engine else []
    for change in view.changes:
        given = {word for word in change.flags.split() if word.startswith("--")}
        kept = [word for word in words if word.split()[0] not in given]
        length = "" if "--max-model-len" in given else f"--max-model-len {tokens}"
        line = f"plan {name} --task serve --gpu {gpu} {length} {' '.join(kept)} {change.flags}"
        found = answer(capsys, line)
        assert found["fits"], line
        assert found["serving"]["starts"], line
        assert found["serving"]["kv_tokens"] == change.kv_tokens, line
    said = serving_text(view)
    assert "Does not start" in said
    assert bool(view.changes) == ("What makes it start" in said)
    assert bool(view.changes) == (name != "llama-3.1-405b")


def test_gpus_that_are_there_are_offered_first() -> None:
    view, _ = served("llama-3.1-70b", context=8192, machine=make_machine("h100-sxm", gpus=8))
    assert view.changes[0].words == "--tensor-parallel-size 2"
    assert view.changes[0].gpus <= 8


def test_more_room_is_more_room() -> None:
    view, _ = served("llama-3.1-8b", context=4096)
    assert view.starts
    assert view.changes
    assert all(change.kv_tokens > view.figures.kv_tokens for change in view.changes)
    assert "What gives more room" in serving_text(view)


def test_json_has_the_whole_view(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "plan llama-3.1-8b --task serve --gpu h100 --gpus 2 --tensor-parallel 2 --max-model-len 32K"
    )
    found = answer(
        capsys, f"{line} --prompt-length 3000 --completion-length 1000 --shared-prefix 500"
    )
    serving = found["serving"]
    assert serving["max_model_len"] == 32_768
    assert serving["longest_max_model_len"] == serving["model_max_position"] == 131_072
    assert serving["kv_tokens"] > 800_000
    assert [row["tokens"] for row in serving["requests"] if row["given"]] == [4000]
    assert serving["lora"]["most_slots"] > 100
    assert serving["prefix_cache"]["shared_tokens"] == 496  # whole blocks of 16
    assert found["resolved"]["engine"]["tensor_parallel"] == 2
    assert found["framework"]["name"] == "vllm"
    again = Recipe.model_validate(found["recipe"])
    assert plan(catalogue_model("llama-3.1-8b"), again, make_machine("h100", gpus=2)).serving is not None  # fmt: skip
    assert (again.prompt_length, again.completion_length, again.context) == (3000, 1000, 32_768)


def test_max_model_len_in_vllms_words(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan llama-3.1-8b --task serve --gpu rtx-4090 --max-model-len"
    lengths = [answer(capsys, f"{line} {text}")["serving"]["max_model_len"] for text in ("8k", "8K", "8192")]  # fmt: skip
    assert lengths == [8000, 8192, 8192]
    auto = answer(capsys, f"{line} auto")["serving"]
    assert auto["starts"]
    assert auto["max_model_len"] == auto["longest_max_model_len"] > 8192


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-model-len much", "max-model-len: cannot read 'much'"),
        ("--max-model-len 0", "max-model-len: cannot read '0'"),
        ("--max-model-len 4096 --context 2048", "max-model-len: 4096 beside context 2048"),
        ("--max-model-len 4096 --task sft", "max-model-len: 4096 has no meaning without --task serve"),
        ("--max-model-len 4096 --prompt-length 4000 --completion-length 200", "context: 4096 is not"),
        ("--tensor-parallel 3 --gpus 4", "tensor_parallel: 3"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = "" if "--task" in flags else "--task serve"
    assert main(["plan", "llama-3.1-8b", "--gpu", "rtx-4090", *shlex.split(f"{task} {flags}")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
def test_vllms_prefix_flag_goes_there_and_back(flag: str) -> None:
    run = import_config(f"vllm serve Qwen/Qwen3-8B --max-model-len 8192 {flag}\n").run
    assert run.recipe.engine.prefix_caching is flag.startswith("--enable")
    assert flag in export_run(RunFile(model=run.model, recipe=run.recipe), "vllm").text.split()
