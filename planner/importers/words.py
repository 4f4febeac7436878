"""Words that the tools share -> recipe values: optimizers, attention, dtypes, LoRA targets."""

import re
from typing import Any

from planner.importers.settings import Settings, as_names
from planner.run.recipe import Attention, Checkpointing, Method, Optimizer, Reference

_OPTIMIZERS: tuple[tuple[str, Optimizer], ...] = (
    (r"paged.*(?:8bit|8_bit)", Optimizer.PAGED_ADAMW_8BIT),
    (r"paged", Optimizer.PAGED_ADAMW),
    (r"lion.*8bit", Optimizer.LION_8BIT),
    (r"lion", Optimizer.LION),
    (r"adam.*(?:8bit|8_bit|fp8|4bit)|8bit.*adam|galore.*8bit|_8bit", Optimizer.ADAMW_8BIT),
    (r"adafactor|came", Optimizer.ADAFACTOR),
    (r"muon", Optimizer.MUON),
    (r"adamw?.*fused", Optimizer.ADAMW_FUSED),
    (r"adam", Optimizer.ADAMW),
    (r"sgd", Optimizer.SGD),
)
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def optimizer(settings: Settings, name: Any) -> Optimizer | None:
    """Return the optimizer of a tool's name; what is only close is said."""
    word = str(name).lower()
    for pattern, kind in _OPTIMIZERS:
        if re.search(pattern, word):
            if "4bit" in word:
                settings.effect(
                    f"optimizer {name}: 4-bit states are planned as 8-bit ones, an upper bound"
                )
            return kind
    settings.unread("optimizer", name, "optimizer states: planned as AdamW")
    return Optimizer.ADAMW


def low_rank(settings: Settings, name: Any) -> None:
    """Say that GaLore's, APOLLO's and their kind's projected states are not modelled."""
    found = re.search(r"galore|apollo|lomo|badam|adam_mini|grokadamw", str(name).lower())
    for key in ("optim_args", "optim_target_modules"):
        if settings.has(key) or any(each.startswith(f"{key}.") for each in settings.values):
            settings.raw(key)
            settings.mapping(key)
    if found:
        settings.effect(
            f"{found.group()}: its low-rank or reduced optimizer states are not modelled; whole states are "
            "planned, an upper bound"
        )


def attention(name: Any) -> Attention | None:
    """Return the attention implementation of a tool's word, or None."""
    word = str(name).lower()
    if "flash" in word or word in ("fa2", "fa3"):
        return Attention.FLASH
    if "eager" in word or word == "disabled":
        return Attention.EAGER
    return Attention.SDPA if "sdpa" in word else None


def dtype(name: Any) -> str | None:
    """Return bf16, fp16 or fp32 for a dtype word, or None."""
    word = str(name).lower().replace("torch.", "")
    if "bf16" in word or "bfloat16" in word:
        return "bf16"
    if word in ("fp16", "float16", "half", "16"):
        return "fp16"
    return "fp32" if word in ("fp32", "float32", "float", "32") else None


def lora_targets(value: Any) -> str | tuple[str, ...]:
    """Return LoRA targets: all-linear, module names, or the names a regular expression lists."""
    if isinstance(value, str):
        word = value.strip()
        if word in ("all", "all-linear", "all_linear", "auto"):
            return "all-linear"
        if re.search(r"[\\(|*]", word):
            groups = re.findall(r"\(([^()]*)\)(_proj)?", word)
            listed = [f"{part}{tail}" for body, tail in groups for part in body.split("|") if tail]
            return tuple(listed) or "all-linear"
    names = as_names(value)
    if set(names) & {"all-linear", "all", "ALL"}:
        return "all-linear"
    return tuple(name for name in names if name) or "all-linear"


def reference(method: Method, *, needed: bool) -> Reference:
    """Return where the reference is: nowhere, the policy without its adapter, or a second copy."""
    if not needed:
        return Reference.NONE
    return Reference.SEPARATE if method is Method.FULL else Reference.ADAPTER_OFF


def checkpointing(on: bool, *, offload: bool = False) -> Checkpointing:
    """Return the checkpointing of a tool's switches."""
    if offload:
        return Checkpointing.OFFLOAD
    return Checkpointing.FULL if on else Checkpointing.NONE


def hf_batch(
    settings: Settings,
    recipe: dict[str, Any],
    *,
    default: int,
    optim: str = "adamw_torch_fused",
) -> None:
    """Read the Hugging Face Trainer's batch keys and optimizer."""
    recipe["micro_batch_size"] = settings.count(
        "per_device_train_batch_size", to="micro_batch_size", default=default
    )
    recipe["gradient_accumulation"] = settings.count(
        "gradient_accumulation_steps", to="gradient_accumulation", default=1
    )
    settings.raw("per_device_eval_batch_size", "eval_accumulation_steps")
    name = settings.raw("optim", to="optimizer", default=optim)
    low_rank(settings, name)
    recipe["optimizer"] = optimizer(settings, name)
