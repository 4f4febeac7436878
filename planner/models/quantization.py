"""What a checkpoint's quantization_config says: the scheme's name, and which modules it leaves alone."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from planner.errors import UsageError
from planner.models.spec import ModelSpec, ModuleKind, ModuleSpec

_SAFE = re.compile(r"[\w.*\\()|^$-]{1,200}")
"""Patterns of names, alternatives and ".*": nothing that could make a match explode."""
MAX_PATTERNS = 4096


def quantization_name(config: Mapping[str, Any], *, experts: str = "") -> str:
    """Return the planner's name of a published quantisation, "" for none.

    `experts` is DeepSeek-V4's expert_dtype: nearly all its weights are experts in MXFP4.
    """
    method = str(config.get("quant_method", "")).lower().replace("_", "-")
    if method == "fp8":
        if experts == "fp4":
            return "mxfp4"
        return "fp8-block" if config.get("weight_block_size") else "fp8"
    if method == "compressed-tensors":
        return _compressed(config)
    if method == "bitsandbytes":
        return "bnb-int8" if config.get("load_in_8bit") else "bnb-nf4"
    if method in ("gptq", "awq"):
        bits = config.get("bits", 4)
        return method if bits == 4 else f"{method}-{bits}bit"
    if method == "modelopt":
        algorithm = str(config.get("quant_algo", "")).lower()
        return algorithm if algorithm in ("fp8", "nvfp4") else f"modelopt-{algorithm}"
    return {"fbgemm-fp8": "fp8", "mxfp4": "mxfp4"}.get(method, method)


def _compressed(config: Mapping[str, Any]) -> str:
    """Return the scheme of a compressed-tensors config: its format, else its weights' bits."""
    layout = str(config.get("format", ""))
    for name in ("mxfp4", "nvfp4"):
        if layout.startswith(name):
            return name
    groups = config.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return "compressed-tensors"
    kind, bits = weights.get("type"), weights.get("num_bits")
    if kind == "float" and bits == 8:
        return "fp8-block" if weights.get("strategy") == "block" else "fp8"
    if kind == "int" and bits in (4, 8):
        return "compressed-int4" if bits == 4 else "int8"
    return f"compressed-{kind}{bits}"


@lru_cache(maxsize=512)
def _patterns(listed: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    patterns = []
    for text in listed:
        body = text.removeprefix("re:")
        if not text.startswith("re:"):
            body = re.escape(body).replace(r"\*", r"[^.]+")
            patterns.append(re.compile(rf"(.*\.)?{body}(\..*)?"))
        elif _SAFE.fullmatch(body) and body.count(".*") <= 4 and ")*" not in body:
            try:
                patterns.append(re.compile(body))
            except re.error:
                raise _bad(text) from None
        else:
            raise _bad(text)
    return tuple(patterns)


def _bad(text: str) -> UsageError:
    return UsageError(
        f"quantization_config: cannot read the pattern {text[:60]!r}",
        hint="names, or re: with names, alternatives and .*",
    )


def left_in_16_bit(model: ModelSpec, module: ModuleSpec) -> bool:
    """Say whether the published quantisation leaves a layer's module in 16 bits."""
    config = model.quantization_config
    listed = config.get("modules_to_not_convert") or config.get("ignore") or ()
    if not isinstance(listed, list | tuple) or len(listed) > MAX_PATTERNS:
        raise UsageError(
            "quantization_config.modules_to_not_convert: expected a list of names",
            hint=f"at most {MAX_PATTERNS}",
        )
    # transformers quantises only the experts to MXFP4
    if config.get("quant_method") == "mxfp4" and module.kind is not ModuleKind.EXPERTS:
        return True
    path = f"model.layers.0.{module.name}"
    return any(p.fullmatch(path) for p in _patterns(tuple(str(name) for name in listed)))
