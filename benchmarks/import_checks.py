"""What an import must agree with: the example's own key settings, read apart from the importers."""

import re
from typing import Any

from benchmarks.foreign_examples import Example
from planner.importers import Imported

TORCHTUNE_MODELS = {
    "llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B",
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16"}
VERL = "actor_rollout_ref."


def first(settings: dict[str, Any], *keys: str) -> Any:
    """Return the first setting that is there, as text where it is a number."""
    return next((settings[key] for key in keys if settings.get(key) is not None), None)


def import_faults(example: Example, found: Imported) -> list[str]:
    """Return what of an import disagrees with the example, in words."""
    recipe, settings = found.run.recipe, example.settings
    task, _, method = example.method.partition("-")
    checks: list[tuple[str, Any, Any]] = [
        ("task", recipe.task.value, task),
        ("model", found.run.model, _model(example)),
    ]
    engine = recipe.engine
    if task == "serve":
        for key, got in (
            ("gpu-memory-utilization", engine.gpu_memory_utilization),
            ("max-num-seqs", engine.max_num_seqs),
            ("tensor-parallel-size", engine.tensor_parallel),
            ("max-model-len", recipe.context),
        ):
            match = re.search(rf"--{key} ([\d.]+)", settings["command"])
            checks.append((key, got, match.group(1) if match else None))
        return _faults(checks)
    checks += [
        ("method", recipe.method.value, method),
        ("batch", recipe.micro_batch_size, _batch(example)),
        (
            "length",
            recipe.context,
            first(settings, "sequence_len", "cutoff_len", "max_seq_length", "max_length")
            if task != "grpo"
            else None,
        ),
        (
            "completion",
            recipe.completion_length,
            _number(first(settings, "max_completion_length", "data.max_response_length")),
        ),
        (
            "generations",
            recipe.num_generations,
            first(settings, "num_generations", f"{VERL}rollout.n"),
        ),
        (
            "utilization",
            engine.gpu_memory_utilization,
            first(
                settings,
                "gpu_memory_utilization",
                "vllm_gpu_memory_utilization",
                f"{VERL}rollout.gpu_memory_utilization",
            ),
        ),
        ("dtype", recipe.dtype, _dtype(example)),
        ("checkpointing", recipe.checkpointing != "none", _checkpointing(settings)),
        ("8-bit optimizer", "8bit" in str(recipe.optimizer), _eight_bit(settings)),
    ]
    if method != "full":
        nested = settings["model"] if isinstance(settings.get("model"), dict) else {}
        rank = first({**nested, **settings}, "lora_r", "lora_rank", "r", f"{VERL}model.lora_rank")
        checks.append(
            ("rank", recipe.lora.rank, _number(rank) or _number(settings.get("lora_rank")))
        )
    if method == "qlora":
        checks.append(("4-bit base", recipe.quantization in ("nf4", "mxfp4"), True))
    return _faults(checks)


def _faults(checks: list[tuple[str, Any, Any]]) -> list[str]:
    return [
        f"{what}: {got} instead of {wanted}"
        for what, got, wanted in checks
        if wanted is not None and str(got) != str(wanted)
    ]


def _number(value: Any) -> str | None:
    return str(value) if str(value).isdigit() else None


def _model(example: Example) -> str | None:
    if example.tool == "torchtune":
        return TORCHTUNE_MODELS[example.model.removeprefix("qlora_").removeprefix("lora_")]
    return None if " " in example.model else example.model


def _batch(example: Example) -> Any:
    settings = example.settings
    if example.tool == "unsloth" and example.method.startswith("grpo"):
        return settings["num_generations"]  # Unsloth raises the batch to it
    if example.tool == "verl":  # dynamic batches: as many full sequences as the token budget holds
        row = int(settings["data.max_prompt_length"]) + int(settings["data.max_response_length"])
        return int(settings[f"{VERL}actor.ppo_max_token_len_per_gpu"]) // row
    return first(settings, "micro_batch_size", "per_device_train_batch_size", "batch_size")


def _dtype(example: Example) -> str | None:
    name = str(first(example.settings, "torch_dtype", "dtype") or "").removeprefix("torch.")
    return DTYPES.get(name)


def _checkpointing(settings: dict[str, Any]) -> bool | None:
    value = first(
        settings,
        "gradient_checkpointing",
        "enable_activation_checkpointing",
        f"{VERL}model.enable_gradient_checkpointing",
        "use_gradient_checkpointing",
    )
    return None if value is None else str(value).lower() in ("true", "unsloth")


def _eight_bit(settings: dict[str, Any]) -> bool | None:
    value = first(settings, "optimizer", "optim")
    if value is None:
        return None
    return "8bit" in str(value["_component_"] if isinstance(value, dict) else value).lower()
