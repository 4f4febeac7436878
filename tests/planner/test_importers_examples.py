"""Every example of data/doctor/config_examples.jsonl, written in its tool's format, imports as it reads."""

import pytest

from benchmarks.doctor import load, score_claims
from benchmarks.foreign_examples import Example, load_examples, render
from benchmarks.import_checks import import_faults
from planner.importers import import_config
from planner.importers.names import resolve_name
from planner.run.recipe import Recipe

EXAMPLES = load_examples()
TOOLS = {"LLaMA-Factory": "llamafactory"}


def imported(example: Example) -> tuple[str, str, Recipe]:
    found = import_config(render(example)[1])
    return found.tool, found.run.model, found.run.recipe


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.id}-{example.tool}")
def test_example(example: Example) -> None:
    found = import_config(render(example)[1])
    assert found.tool == TOOLS.get(example.tool, example.tool)
    assert import_faults(example, found) == []


def test_the_checks_see_a_wrong_import() -> None:
    """Reading one example against another's settings must not pass."""
    first, second = (
        next(row for row in EXAMPLES if row.id == name) for name in ("cfg-01", "cfg-18")
    )
    assert len(import_faults(first, import_config(render(second)[1]))) >= 4


def by_id(name: str) -> Recipe:
    return imported(next(example for example in EXAMPLES if example.id == name))[2]


def test_engines() -> None:
    swift, verl, unsloth, trl = (
        by_id(name).engine for name in ("cfg-28", "cfg-29", "cfg-37", "cfg-39")
    )
    assert (swift.kind, swift.gpu_memory_utilization, swift.sleep_level, swift.tensor_parallel) == (
        "vllm-push",
        0.55,
        1,
        4,
    )
    assert (verl.kind, verl.gpu_memory_utilization, verl.tensor_parallel, verl.sleep_level) == (
        "vllm-push",
        0.6,
        2,
        2,
    )
    assert (unsloth.kind, unsloth.gpu_memory_utilization) == ("vllm-shared", 0.9)
    assert trl.kind == "transformers"
    serve = by_id("cfg-45").engine
    assert (
        serve.gpu_memory_utilization,
        serve.max_num_seqs,
        serve.kv_dtype,
        serve.max_num_batched_tokens,
    ) == (0.95, 4, "fp8", 8192)


def test_precision_means_another_thing_in_every_tool() -> None:
    """bf16 full fine-tuning: 16 bit in axolotl and ms-swift, fp32 in verl, pure in galore's file."""
    axolotl, swift, verl, pure = (by_id(name) for name in ("cfg-05", "cfg-22", "cfg-29", "cfg-10"))
    assert (axolotl.dtype, axolotl.mixed_precision) == ("bf16", "bf16")
    assert (swift.dtype, swift.mixed_precision) == ("bf16", "bf16")
    assert (verl.dtype, verl.mixed_precision) == ("fp32", "bf16")
    assert (pure.dtype, pure.mixed_precision) == ("bf16", "none")


def test_deepspeed_adds_an_fp32_master_to_full_fine_tuning() -> None:
    assert by_id("cfg-23").master_weights is True
    assert by_id("cfg-25").master_weights is None  # LoRA


def test_claims() -> None:
    figures = score_claims()
    assert figures["claims_median_error"] <= 0.15
    assert figures["false_does_not_fit"] == []
    assert figures["false_claims_believed"] == []
    assert figures["claims_skipped"] == []
    assert figures["numeric_claims"] == sum(
        claim["kind"] == "numeric" for claim in load("config_claims.jsonl")
    )


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "Qwen/Qwen3-14B"),
        ("/models/Qwen2.5-72B-Instruct-AWQ/", "Qwen/Qwen2.5-72B"),
        ("Mistral-7B", "mistralai/Mistral-7B-v0.1"),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "Qwen/Qwen3.5-35B-A3B"),
        ("LLaMA-7B", "meta-llama/Llama-2-7b-hf"),
        ("nobody/a-model-9B", None),
    ],
)
def test_names(name: str, hub_id: str | None) -> None:
    assert resolve_name(name) == hub_id
