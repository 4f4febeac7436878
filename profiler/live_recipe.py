"""Derives the Recipe of a run from what is really there: model, training arguments, optimizer.

Reads objects of transformers, PEFT, TRL and bitsandbytes by their attributes and imports none of
them. What cannot be read stays None, which means "the framework's default".
"""

from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from math import prod
from typing import Any

from planner.errors import UnsupportedError
from planner.families import model_spec_from_config
from planner.models.spec import ModelSpec
from planner.run.framework import spell
from planner.run.recipe import Recipe
from planner.run.runfile import make_recipe

_DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
}
_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "paged_adamw_32bit": "paged-adamw",
    "paged_adamw": "paged-adamw",
    "paged_adamw_8bit": "paged-adamw-8bit",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
    "lion": "lion",
    "lion_8bit": "lion-8bit",
    "sgd": "sgd",
    "muon": "muon",
}
"""TrainingArguments.optim -> Recipe.optimizer."""
_TASKS = {"GRPOConfig": "grpo", "DPOConfig": "dpo"}
MAX_ROWS = 512
"""Rows of the data set looked at for the longest sequence."""


@dataclass(kw_only=True)
class Shapes:
    """The largest passes seen so far, or looked up in the data before the first."""

    context: int | None = None
    """Tokens of the longest row of a training pass."""
    prompt: int | None = None
    rows: int | None = None
    """Rows of the largest training pass."""
    lengths: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Tokens of the rows that were looked up."""
    seen: bool = field(default=False)
    """True once they come from passes that really ran."""


def model_spec(model: Any) -> ModelSpec:
    """Return the ModelSpec of a live transformers or PEFT model; UnsupportedError if unknown."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise UnsupportedError(f"{type(model).__name__} has no transformers config")
    document = config.to_dict()
    name = document.get("_name_or_path") or type(model).__name__
    return model_spec_from_config(document, name=str(name), source="the live model")


def recipe_of(model: Any, arguments: Any, optimizer: Any, shapes: Shapes) -> Recipe:
    """Return the Recipe that this run is."""
    task = _task(arguments)
    fields: dict[str, Any] = {
        "task": task,
        "framework": _framework(arguments),
        "micro_batch_size": shapes.rows or int(arguments.per_device_train_batch_size),
        "gradient_accumulation": int(arguments.gradient_accumulation_steps),
        "mixed_precision": "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "none",
        "optimizer": _optimizer(arguments, optimizer),
        "checkpointing": "full" if _checkpoints(model, arguments) else "none",
        "attention": _attention(model),
        "loss": _loss(arguments),
        "packing": bool(getattr(arguments, "packing", False)) or None,
        "compile": bool(getattr(arguments, "torch_compile", False)),
        **_weights(model),
        **_lengths(arguments, task, shapes),
    }
    if task in ("grpo", "dpo"):
        fields["beta"] = float(arguments.beta)
    if task == "grpo":
        fields["num_generations"] = int(arguments.num_generations)
        fields["algorithm"] = str(arguments.loss_type)
        fields["engine"] = _engine(arguments)
    return make_recipe(**{name: value for name, value in fields.items() if value is not None})


def longest_in_data(arguments: Any, loader: Any, tokenizer: Any) -> Shapes:
    """Look up the longest row among the first rows of the data, if the data can be indexed."""
    data: Any = getattr(loader, "dataset", None)
    try:
        rows = [data[index] for index in range(min(len(data), MAX_ROWS))]
    except (TypeError, KeyError, NotImplementedError, IndexError):
        return Shapes()  # a stream: only its first pass will tell
    limit = getattr(arguments, "max_length", None)
    if _task(arguments) == "grpo":
        return Shapes(
            prompt=max((_prompt_tokens(row, tokenizer) or 0 for row in rows), default=0) or None
        )
    lengths = [
        len(row["input_ids"]) for row in rows if isinstance(row, dict) and "input_ids" in row
    ]
    if not lengths:
        return Shapes(context=limit)
    cut = tuple(min(length, limit or length) for length in lengths)
    return Shapes(context=max(cut), lengths=cut)


def _prompt_tokens(row: Any, tokenizer: Any) -> int | None:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if prompt is None or tokenizer is None:
        return None
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    ids: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)
    flat: Any = ids["input_ids"] if hasattr(ids, "keys") else ids
    return len(flat[0]) if flat and isinstance(flat[0], list) else len(flat)


def _task(arguments: Any) -> str:
    for kind in type(arguments).__mro__:
        if kind.__name__ in _TASKS:
            return _TASKS[kind.__name__]
    return "sft"


def _is_trl(arguments: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "trl" for kind in type(arguments).__mro__)


def _framework(arguments: Any) -> str:
    family, package = ("trl", "trl") if _is_trl(arguments) else ("hf-trainer", "transformers")
    return spell(family, version(package))


def _weights(model: Any) -> dict[str, Any]:
    """Method, dtype, adapters and quantisation from the parameters themselves."""
    sizes: Counter[str] = Counter()
    adapter_dtypes: Counter[str] = Counter()
    targets: set[str] = set()
    quantization = None
    for name, parameter in model.named_parameters():
        kind = type(parameter).__name__
        if "lora_" in name:
            adapter_dtypes[str(parameter.dtype)] += prod(parameter.shape)
            # what was adapted, whatever pattern asked for it
            owner = name.split(".lora_")[0].replace(".base_layer", "")
            targets.add(owner.rpartition(".")[2])
        elif kind == "Params4bit":
            state = getattr(parameter, "quant_state", None)
            quantization = getattr(state, "quant_type", None) or "nf4"
        elif kind == "Int8Params":
            quantization = "int8"
        else:
            sizes[str(parameter.dtype)] += prod(parameter.shape)
    found: dict[str, Any] = {"quantization": quantization}
    if sizes:
        found["dtype"] = _DTYPES.get(sizes.most_common(1)[0][0])
    adapter = _adapter(model)
    if not adapter_dtypes or adapter is None:
        return {**found, "method": "full"}
    found["method"] = "qlora" if quantization else "lora"
    parameters = tuple(sorted(getattr(adapter, "target_parameters", None) or ()))
    owners = {"experts", *(path.split(".")[-2] for path in parameters if "." in path)}
    found["lora"] = {
        "rank": int(adapter.r),
        "targets": tuple(sorted(targets - owners if parameters else targets)),
        "target_parameters": parameters,
        "dtype": _DTYPES.get(adapter_dtypes.most_common(1)[0][0]),
        "dora": bool(getattr(adapter, "use_dora", False)),
        "modules_to_save": tuple(getattr(adapter, "modules_to_save", None) or ()),
        "dropout": float(getattr(adapter, "lora_dropout", 0.0)),
    }
    return found


def _adapter(model: Any) -> Any:
    configs = getattr(model, "peft_config", None) or {}
    return next((config for config in configs.values() if hasattr(config, "r")), None)


def _optimizer(arguments: Any, optimizer: Any) -> str | None:
    # Accelerate wraps the optimizer; the class says more than the argument if they differ
    inner = getattr(optimizer, "optimizer", optimizer)
    kind = type(inner).__name__
    if kind == "SGD":
        momentum = any(group.get("momentum") for group in inner.param_groups)
        return "sgd-momentum" if momentum else "sgd"
    if kind == "AdamW" and type(inner).__module__.startswith("torch."):
        return "adamw-fused" if inner.defaults.get("fused") else "adamw"
    name = getattr(arguments.optim, "value", arguments.optim)
    return _OPTIMIZERS.get(str(name))


def _checkpoints(model: Any, arguments: Any) -> bool:
    on = getattr(model, "is_gradient_checkpointing", None)
    return bool(arguments.gradient_checkpointing if on is None else on)


def _attention(model: Any) -> str | None:
    kind = str(getattr(getattr(model, "config", None), "_attn_implementation", "") or "")
    if "flash" in kind:
        return "flash"
    return kind if kind in ("eager", "sdpa") else None


def _loss(arguments: Any) -> str | None:
    if getattr(arguments, "use_liger_kernel", False):
        return "chunked"
    kind = str(getattr(arguments, "loss_type", ""))
    return "chunked" if kind == "chunked_nll" else "full" if kind == "nll" else None


def _lengths(arguments: Any, task: str, shapes: Shapes) -> dict[str, Any]:
    if task == "grpo":
        completion = int(arguments.max_completion_length)
        if shapes.seen and shapes.context and shapes.prompt:
            completion = max(1, shapes.context - shapes.prompt)
        return {"prompt_length": shapes.prompt, "completion_length": completion}
    return {"context": shapes.context or getattr(arguments, "max_length", None)}


def _engine(arguments: Any) -> dict[str, Any]:
    if not arguments.use_vllm:
        return {"kind": "transformers"}
    if arguments.vllm_mode == "server":
        return {"kind": "vllm-server"}
    return {
        "kind": "vllm-push",
        "gpu_memory_utilization": float(arguments.vllm_gpu_memory_utilization),
        "sleep_level": 1 if arguments.vllm_enable_sleep_mode else 0,
    }
