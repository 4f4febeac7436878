"""What a DeepSpeed JSON says of ZeRO's buffers, and what in it contradicts itself.

DeepSpeed 0.19.6, runtime/zero/config.py: every stage-3 field has two spellings; what is not said is
DeepSpeed's default, whatever a framework's own presets say. "auto" is transformers' word, which it
replaces in three fields (integrations/deepspeed.py).
"""

from typing import Any

from planner.errors import UsageError
from planner.importers.settings import as_bool, as_int
from planner.run.zero import (
    ALLGATHER,
    LIVE,
    PERSISTENCE,
    PREFETCH,
    REDUCE,
    REUSE,
    SUB_GROUP,
)

SIZES: dict[str, tuple[tuple[str, ...], int]] = {
    "reduce": (("reduce_bucket_size",), REDUCE),
    "allgather": (("allgather_bucket_size",), ALLGATHER),
}
STAGE3_SIZES: dict[str, tuple[tuple[str, ...], int]] = {
    "prefetch": (("stage3_prefetch_bucket_size", "prefetch_bucket_size"), PREFETCH),
    "live": (("stage3_max_live_parameters", "max_live_parameters"), LIVE),
    "reuse": (("stage3_max_reuse_distance", "max_reuse_distance"), REUSE),
    "persistence": (
        ("stage3_param_persistence_threshold", "param_persistence_threshold"),
        PERSISTENCE,
    ),
    "sub_group": (("sub_group_size",), SUB_GROUP),
}
AUTO = ("reduce", "prefetch", "persistence")
STAGES = (0, 1, 2, 3)
DTYPES = {"fp16": "fp16", "bf16": "bf16", "bfp16": "bf16", "bfloat16": "bf16", "fp32": "fp32"}


def stage_of(zero: dict[str, Any]) -> int:
    """Return the stage; raises UsageError for one that does not exist."""
    stage = as_int(zero.get("stage"))
    if stage is None and zero.get("stage") not in (None, "auto"):
        raise UsageError(f"zero_optimization.stage: {zero['stage']!r} is no stage", hint="0 to 3")
    if stage not in (None, *STAGES):
        raise UsageError(f"zero_optimization.stage: {stage} does not exist", hint="0 to 3")
    return stage or 0


def buckets(document: dict[str, Any], zero: dict[str, Any], stage: int) -> dict[str, Any]:
    """Return recipe.buckets in full: what is not said is DeepSpeed's default."""
    if not stage:
        return {}
    found: dict[str, Any] = {}
    for name, (keys, usual) in {**SIZES, **(STAGE3_SIZES if stage == STAGES[-1] else {})}.items():
        found[name] = _size(zero, name, keys, usual)
    window = stage == STAGES[-1]
    overlap, contiguous = (
        as_bool(zero.get("overlap_comm")),
        as_bool(zero.get("contiguous_gradients")),
    )
    if not window:  # stage 3 has one bucket either way
        found["overlap"] = bool(overlap)
    found["contiguous"] = contiguous is not False
    asked = document.get("communication_data_type")
    if asked is not None:
        if str(asked) not in DTYPES:
            raise UsageError(f"communication_data_type: {asked!r}", hint=", ".join(DTYPES))
        found["dtype"] = DTYPES[str(asked)]
    return found


def _size(zero: dict[str, Any], name: str, keys: tuple[str, ...], usual: int) -> int | str:
    said = {key: zero[key] for key in keys if zero.get(key) is not None}
    if len({str(value) for value in said.values()}) > 1:
        shown = " and ".join(f"{key} {value}" for key, value in said.items())
        raise UsageError(f"zero_optimization: {shown} are one field")
    for key, value in said.items():
        if value == "auto":
            if name in AUTO:
                return "auto"
            raise UsageError(f"zero_optimization.{key}: auto", hint="a number: nobody fills it in")
        size = as_int(value)
        if size is None or size < 0:
            raise UsageError(f"zero_optimization.{key}: {value!r}", hint="elements, 0 or more")
        return size
    return usual


def refuse_contradictions(document: dict[str, Any], zero: dict[str, Any], stage: int) -> None:
    """Raise UsageError for fields that DeepSpeed would refuse together, both named."""
    enabled = [
        name
        for name in ("bf16", "fp16")
        if isinstance(document.get(name), dict) and as_bool(document[name].get("enabled"))
    ]
    if len(enabled) > 1:
        raise UsageError("bf16.enabled and fp16.enabled: both are true", hint="one of them")
    for key in ("offload_param", "offload_optimizer"):
        section = zero.get(key)
        device = str(section.get("device", "none")).lower() if isinstance(section, dict) else "none"
        least = STAGES[-1] if key == "offload_param" else 1
        if device not in ("none", "") and stage < least:
            raise UsageError(
                f"zero_optimization.{key}: device {device} contradicts stage {stage}",
                hint=f"stage {least}" + ("" if least == STAGES[-1] else " to 3"),
            )
    if as_bool(zero.get("cpu_offload")) and isinstance(zero.get("offload_optimizer"), dict):
        raise UsageError(
            "zero_optimization.cpu_offload: is the old spelling of offload_optimizer, which is there too"
        )
    _refuse_batch(document)


def _refuse_batch(document: dict[str, Any]) -> None:
    whole, micro, steps = (
        as_int(document.get(key))
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    )
    if whole and micro and whole % (micro * (steps or 1)):
        raise UsageError(
            f"train_batch_size: {whole} is no multiple of train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps or 1}"
        )
