"""The name of a published quantisation; planner.quant reads which module has which scheme."""

from collections.abc import Mapping
from typing import Any

TEXT_ONLY = "vramwise_text_only"
"""Set by the families where the block stood in text_config: towers are not its business."""


def quantization_name(config: Mapping[str, Any], *, experts: str = "") -> str:
    """Return the planner's name of a published quantisation, "" for none.

    `experts` is DeepSeek-V4's expert_dtype: nearly all its weights are experts in MXFP4.
    """
    method = str(config.get("quant_method", "")).lower().replace("_", "-").removeprefix("intel/")
    if method == "bitsandbytes" or config.get("load_in_4bit") or config.get("load_in_8bit"):
        if config.get("load_in_8bit") or config.get("_load_in_8bit"):
            return "bnb-int8"
        return "bnb-fp4" if config.get("bnb_4bit_quant_type") == "fp4" else "bnb-nf4"
    if method == "fp8":
        if experts == "fp4":
            return "mxfp4"
        return "fp8-block" if config.get("weight_block_size") else "fp8"
    if method == "compressed-tensors":
        return _compressed(config)
    if method in ("gptq", "gptqmodel", "awq"):
        bits, method = config.get("bits", config.get("w_bit", 4)), method.removesuffix("model")
        return method if bits == 4 else f"{method}-{bits}bit"
    if method.startswith("modelopt"):
        inner = config.get("quantization")
        config = inner if isinstance(inner, Mapping) else config
        algorithm = str(config.get("quant_algo", "")).lower()
        return algorithm if algorithm in ("fp8", "nvfp4") else f"modelopt-{algorithm}"
    if method in ("auto-round", "exl2", "exl3"):
        return f"{method}-{config.get('bits', 4)}bit"
    if method == "hqq":
        settings = config.get("quant_config")
        inner = settings.get("weight_quant_params") if isinstance(settings, Mapping) else None
        bits = inner.get("nbits", 4) if isinstance(inner, Mapping) else "mixed-"
        return f"hqq-{bits}bit"
    if method == "torchao":
        return f"torchao-{_torchao(config.get('quant_type'))}"
    return {"fbgemm-fp8": "fp8"}.get(method, method)


def _torchao(kind: object) -> str:
    """Return a torchao config's short name."""
    if isinstance(kind, Mapping):
        inner = kind.get("default", kind)
        kind = inner.get("_type", "") if isinstance(inner, Mapping) else inner
    word = str(kind).lower().replace("_", "").removesuffix("config")
    return word[:40] or "unknown"


def _compressed(config: Mapping[str, Any]) -> str:
    """Return the scheme of a compressed-tensors config: its format, else its weights' bits."""
    layout = str(config.get("format", ""))
    for name in ("mxfp4", "nvfp4"):
        if layout.startswith(name):
            return name
    groups = config.get("config_groups")
    listed = list(groups.values()) if isinstance(groups, Mapping) else []
    kinds = {_group(group) for group in listed if isinstance(group, Mapping)} - {""}
    if len(kinds) > 1:
        return "compressed-mixed"
    return next(iter(kinds), "compressed-tensors")


def _group(group: Mapping[str, Any]) -> str:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return ""
    kind, bits = weights.get("type"), weights.get("num_bits")
    if kind == "float" and bits == 8:
        return "fp8-block" if weights.get("strategy") == "block" else "fp8"
    if kind == "int" and bits in (4, 8):
        return "compressed-int4" if bits == 4 else "int8"
    return f"compressed-{kind}{bits}"
