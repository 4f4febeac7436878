"""Every example of data/doctor/config_examples.jsonl, written in its tool's format, imports as it reads."""

import pytest

from benchmarks.doctor import import_faults, load, score_claims
from benchmarks.foreign_examples import Example, load_examples, render
from planner.importers import import_config
from planner.importers.names import resolve_name
from planner.recipe import Checkpointing, Optimizer, Recipe

EXAMPLES = load_examples()
TOOLS = {"LLaMA-Factory": "llamafactory"}
OPTIMIZERS = {
    "adamw_bnb_8bit": Optimizer.ADAMW_8BIT,
    "adamw_8bit": Optimizer.ADAMW_8BIT,
    "paged_adamw_8bit": Optimizer.PAGED_ADAMW_8BIT,
    "paged_adamw_32bit": Optimizer.PAGED_ADAMW,
}
TORCHTUNE_MODELS = {
    "llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "lora_llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "qlora_llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "lora_llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B",
    "lora_llama2_7b": "meta-llama/Llama-2-7b-hf",
}


def imported(example: Example) -> tuple[str, str, Recipe]:
    found = import_config(render(example)[1])
    return found.tool, found.run.model, found.run.recipe


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.id}-{example.tool}")
def test_example(example: Example) -> None:
    tool, model, recipe = imported(example)
    settings = example.settings
    assert tool == TOOLS.get(example.tool, example.tool)
    assert import_faults(example, import_config(render(example)[1])) == []
    if " " not in example.model:
        assert model == TORCHTUNE_MODELS.get(example.model, example.model)
    name = settings.get("optimizer") or settings.get("optim")
    if isinstance(name, str):
        assert recipe.optimizer is OPTIMIZERS[name]
    checkpointing = settings.get(
        "gradient_checkpointing", settings.get("enable_activation_checkpointing")
    )
    if checkpointing is not None:
        wanted = str(checkpointing).lower() == "true"
        assert (recipe.checkpointing is not Checkpointing.NONE) == wanted
    if settings.get("use_gradient_checkpointing") == "unsloth":
        assert recipe.checkpointing is Checkpointing.OFFLOAD


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
