"""Which tool a config belongs to, by its content."""

import re
from collections.abc import Callable
from typing import Any

from planner.errors import UnsupportedError
from planner.importers.inherited import inherits

TOOLS = (
    "axolotl",
    "llamafactory",
    "trl",
    "alignment-handbook",
    "open-r1",
    "torchtune",
    "torchtitan",
    "ms-swift",
    "verl",
    "unsloth",
    "vllm",
    "vllm-recipe",
    "hf-trainer",
    "openrlhf",
    "sglang",
    "skyrl",
    "nemo-rl",
    "areal",
    "roll",
    "slime",
    "megatron",
    "prime-rl",
    "litgpt",
    "llm-foundry",
    "xtuner",
    "accelerate",
    "deepspeed",
)
_LLAMAFACTORY = {
    "stage",
    "finetuning_type",
    "cutoff_len",
    "do_train",
    "template",
    "lora_target",
    "quantization_bit",
    "flash_attn",
    "pure_bf16",
    "dataset_dir",
}
_OPEN_R1 = {"dataset_mixture", "reward_funcs", "reward_weights", "benchmarks", "system_prompt"}
_HANDBOOK = {"dataset_mixer", "dataset_configs"}
_WRITTEN = re.compile(r"^# (?:TRL|axolotl|LLaMA-Factory) (\d[\w.]*), written by vramwise")
_SWIFT = {
    "tuner_type",
    "train_type",
    "sft_type",
    "rlhf_type",
    "ENV",
    "target_modules",
    "torch_dtype",
}
_SERVE = {
    "max-model-len",
    "max_model_len",
    "gpu-memory-utilization",
    "gpu_memory_utilization",
    "tensor-parallel-size",
    "tensor_parallel_size",
    "kv-cache-dtype",
    "served-model-name",
    "max-num-seqs",
}


def tool_of_mapping(document: dict[str, Any], flat: dict[str, Any], text: str) -> str | None:
    """Return the tool of a YAML or JSON mapping, or None."""
    keys = set(map(str, document))
    if other := not_read(document, flat):
        raise other
    if (found := other_tool(document, keys, flat)) is not None:
        return found
    if "base_model" in keys:
        return "axolotl"
    if any(key.endswith("_component_") for key in flat):
        return "torchtune"
    if "actor_rollout_ref" in keys or any(
        str(key).startswith("actor_rollout_ref.") for key in keys
    ):
        return "verl"
    if "zero_optimization" in keys or "train_micro_batch_size_per_gpu" in keys:
        return "deepspeed"
    if "distributed_type" in keys or "compute_environment" in keys:
        return "accelerate"
    if "variants" in keys and ("model" in keys or "meta" in keys):
        return "vllm-recipe"
    if "model_name_or_path" in keys:
        return _with_model_name(keys, text)
    if "model" in keys:
        if (
            keys & {"peft_config", "dist_config", "quant_config", "init_config"}
            or {"micro_batch_size", "cutoff_len"} <= keys
        ):
            return "llamafactory"
        if keys & _SERVE:
            return "vllm"
        if keys & _SWIFT:
            return "ms-swift"
    return None


_UNREAD = (
    ("AutoTrain", {"base_model", "project_name", "params"}),
    ("Ludwig", {"input_features", "output_features"}),
    ("SageMaker", {"TrainingJobName", "AlgorithmSpecification"}),
    ("Helm values", {"servingEngineSpec"}),
    ("MLflow", {"entry_points", "conda_env"}),
)
"""Tools whose files are told apart and not read."""


def not_read(document: dict[str, Any], flat: dict[str, Any]) -> UnsupportedError | None:
    """Return the error for a file of a tool that is known and cannot be read, else None."""
    keys = set(map(str, document))
    for name, marks in _UNREAD:
        if marks <= keys:
            return UnsupportedError(
                f"config: this is a file of {name}, which is not read",
                hint=f"these can be read: {', '.join(TOOLS)}; or state the run by flags: vramwise plan MODEL",
            )
    return None


def other_tool(document: dict[str, Any], keys: set[str], flat: dict[str, Any]) -> str | None:
    """Return the tool of a document by the sections that only it has, else None."""
    return next((name for name, test in _SECTIONS if test(document, keys, flat)), None)


def _has(*names: str) -> Callable[[dict[str, Any], set[str], dict[str, Any]], bool]:
    """Return a test for names that are all there, at the top or dotted."""
    return lambda document, keys, flat: all(name in keys or name in flat for name in names)


_SECTIONS: tuple[tuple[str, Callable[[dict[str, Any], set[str], dict[str, Any]], bool]], ...] = (
    ("skyrl", lambda d, keys, flat: "trainer.policy.model.path" in flat),
    ("nemo-rl", _has("policy.model_name", "policy.train_micro_batch_size")),
    ("nemo-rl", lambda d, keys, flat: inherits(d)),
    (
        "roll",
        lambda d, keys, flat: (
            "actor_train" in keys and bool({"actor_infer", "pretrain", "reference"} & keys)
        ),
    ),
    (
        "areal",
        lambda d, keys, flat: (
            "actor.path" in flat and bool({"gconfig", "allocation_mode", "rollout"} & keys)
        ),
    ),
    (
        "litgpt",
        lambda d, keys, flat: (
            "checkpoint_dir" in keys and bool({"train", "lora_r", "devices"} & keys)
        ),
    ),
    (
        "llm-foundry",
        lambda d, keys, flat: (
            {"train_loader", "model"} <= keys or {"device_train_microbatch_size", "model"} <= keys
        ),
    ),
)


def _with_model_name(keys: set[str], text: str) -> str:
    if len(keys & _LLAMAFACTORY) >= 2 or "finetuning_type" in keys:
        return "llamafactory"
    if _WRITTEN.search(text):
        return "trl"
    return trl_flavour(keys, text)


def trl_flavour(keys: set[str], text: str, *, flags: bool = False) -> str:
    """Return whose TRL recipes use such keys: open-r1's, alignment-handbook's, or TRL's own.

    `flags`: they are of a command line, where an old name alone makes nobody's recipe.
    """
    old = bool(keys & {"torch_dtype", "max_seq_length", "max_prompt_length"})
    if old and ("open-r1" in text or "open_r1" in text or (keys & _OPEN_R1 and not flags)):
        return "open-r1"
    if keys & _HANDBOOK or (old and (not flags or "handbook" in text)):
        return "alignment-handbook"
    return "trl"


def written_version(text: str) -> str | None:
    """Return the version that one of our own exports names in its first line, or None."""
    match = _WRITTEN.search(text)
    return match.group(1) if match else None
