"""From a quantization_config to its Reading: one method, one reader."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from planner.errors import UnsupportedError
from planner.models.spec import ModelSpec
from planner.quant import listed, methods, schemes, training
from planner.quant.methods import Reading
from planner.quant.schemes import Scheme


def method_of(config: Mapping[str, Any]) -> str:
    """Return the method, folded; files of before quant_method say load_in_4bit only."""
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return str(config.get("quant_method", "")).lower().replace("_", "-").removeprefix("intel/")


def _aqlm(config: Mapping[str, Any]) -> Reading:
    group = methods.whole(config, "in_group_size", default=8)
    outs = methods.whole(config, "out_group_size", default=1)
    books = methods.whole(config, "num_codebooks", default=1)
    bits = methods.whole(config, "nbits_per_codebook", default=16)
    stored = 8 if bits <= 8 else 16
    scheme = Scheme(
        "aqlm",
        Fraction(books * stored, max(1, group * outs)),
        constant=Fraction(2, max(1, outs)),
        fixed=books * 2 ** min(bits, 24) * group * outs * 2,
    )
    return methods.simple(config, scheme, training.AQLM)


def _bitnet(config: Mapping[str, Any]) -> Reading:
    scheme = Scheme("bitnet", Fraction(2), -1, constant=Fraction(2))
    return methods.simple(config, scheme, training.BITNET)


def _quanto(config: Mapping[str, Any]) -> Reading:
    kind = str(config.get("weights", "int8"))
    bits = {"float8": 8, "int8": 8, "int4": 4, "int2": 2}.get(kind)
    if bits is None:
        raise UnsupportedError(f"quantization_config.weights: {kind[:40]!r} is not one of quanto's")
    if bits == 8:
        scheme = schemes.integer(f"quanto-{kind}", 8, 0, zeros=False)
    else:
        # optimum-quanto WeightQBitsTensor: groups of 128, scale and shift
        scheme = Scheme(f"quanto-{kind}", Fraction(bits), 128, constant=Fraction(4))
    return methods.simple(config, scheme, training.QUANTO)


_READERS: dict[str, Callable[[Mapping[str, Any]], Reading]] = {
    "bitsandbytes": methods.bitsandbytes,
    "fp8": methods.fp8,
    "mxfp4": methods.mxfp4,
    "mxfp8": lambda config: methods.simple(
        config, schemes.mx("mxfp8", 8), training.FP8, experts=True
    ),
    "fbgemm-fp8": lambda config: methods.simple(
        config, schemes.floating("fp8", per="row"), training.FBGEMM, experts=True
    ),
    "hqq": methods.hqq,
    "awq": methods.awq,
    "gptq": methods.gptq,
    "gptqmodel": methods.gptq,
    "auto-round": methods.auto_round,
    "exl2": methods.exl2,
    "exl3": methods.exl2,
    "compressed-tensors": listed.compressed_tensors,
    "modelopt": listed.modelopt,
    "modelopt-fp4": listed.modelopt,
    "modelopt-mixed": listed.modelopt,
    "quark": listed.quark,
    "torchao": listed.torchao,
    "eetq": lambda config: methods.simple(
        config, schemes.integer("eetq", 8, 0, zeros=False), training.EETQ
    ),
    "quanto": _quanto,
    "aqlm": _aqlm,
    "bitnet": _bitnet,
}
_BY_NAME: dict[str, dict[str, Any]] = {
    "nf4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "fp8": {"quant_method": "fp8"},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq-4bit": {"quant_method": "gptq", "bits": 4},
    "gptq-8bit": {"quant_method": "gptq", "bits": 8},
    "awq-4bit": {"quant_method": "awq", "bits": 4},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}
"""The block of a checkpoint whose name alone is known, as its tool writes it by default."""


def read(model: ModelSpec, scheme: str) -> Reading:
    """Return how a published checkpoint is quantised; `scheme` stands in where it has no config.

    Raises UnsupportedError for a method that the planner has no law for.
    """
    config: Mapping[str, Any] = model.quantization_config
    method = method_of(config)
    if not method:
        config = {**_BY_NAME.get(scheme, {}), **config}
        method = method_of(config)
    if method == "fp8":
        experts = "fp4" if model.checkpoint_quantization == "mxfp4" else ""
        return methods.fp8(config, experts=experts)
    if method not in _READERS:
        raise UnsupportedError(
            f"quantization_config: quant_method {method[:40]!r} is not a scheme the planner has a "
            "law for",
            hint=", ".join(sorted({*_READERS} - {"modelopt-fp4", "modelopt-mixed", "gptqmodel"})),
        )
    return _READERS[method](config)
