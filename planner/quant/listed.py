"""Quantisations whose config names modules by group or pattern: compressed-tensors, modelopt, quark, torchao."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.models.spec import LINEARS, ModuleKind
from planner.quant import schemes, training
from planner.quant.methods import Reading, converted, group_of, hit, names_in, whole
from planner.quant.patterns import Test, below, exact_or_regex, prefix_or_suffix, wildcard
from planner.quant.schemes import Scheme
from planner.quant.sites import Site


def _unknown(field: str, value: object) -> UnsupportedError:
    return UnsupportedError(
        f"quantization_config.{field}: {str(value)[:60]!r} is not a scheme the planner has a law for"
    )


def _class_names(site: Site) -> tuple[str, ...]:
    """Return what a target may call the module's class; experts were one Linear each."""
    if site.kind in (*LINEARS, ModuleKind.EXPERTS):
        return ("Linear",)
    return ("Embedding",) if site.kind is ModuleKind.EMBEDDING else ()


def compressed_tensors(config: Mapping[str, Any]) -> Reading:
    """compressed-tensors: groups of targets (names, classes, re: patterns) less `ignore`."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise UsageError("quantization_config.config_groups: expected an object of groups")
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and str(sparsity.get("format", "dense")) != "dense":
        raise _unknown("sparsity_config.format", sparsity["format"])
    targets: list[tuple[str, Test, Scheme]] = []
    for group in groups.values():
        if not isinstance(group, Mapping):
            raise UsageError("quantization_config.config_groups: expected objects")
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            scheme = _compressed(weights, str(group.get("format") or config.get("format") or ""))
            for target in names_in(group, "targets") or ("Linear",):
                targets.append((target, exact_or_regex(target), scheme))
    ignored = tuple((name, exact_or_regex(name)) for name in names_in(config, "ignore") or ())

    def decide(site: Site) -> Scheme | None:
        classes = _class_names(site)
        if hit(site, ignored) or any(name in classes for name, _ in ignored):
            return None
        found = [item for item in targets if any(item[1](name) for name in site.names)]
        named = [item for item in found if not item[0].startswith("re:")]
        by_class = [item for item in targets if item[0] in classes]
        # the most particular target wins: a name, then a pattern, then a class
        best = next(iter((*named, *found, *by_class)), None)
        return best[2] if best and classes else None

    return Reading(decide, training.COMPRESSED, ignored)


def _compressed(weights: Mapping[str, Any], layout: str) -> Scheme:
    kind, strategy = str(weights.get("type", "int")), str(weights.get("strategy") or "tensor")
    bits = whole(weights, "num_bits", default=8)
    group = group_of(weights, default=128) if strategy in ("group", "tensor_group") else 0
    if kind == "int" and 1 < bits <= 8:
        width = 8 if layout in ("int-quantized", "naive-quantized") else bits
        name = f"compressed-int{bits}"
        if strategy == "tensor":
            return Scheme(name, Fraction(width), -1, constant=Fraction(2))
        zeros = weights.get("symmetric") is False
        packed = 32 // width if 32 % width else 0
        return schemes.integer(name, width, group, zeros=zeros, packed=packed)
    if kind == "float" and bits == 8:
        if group == schemes.MX_BLOCK and "mx" in layout:
            return schemes.mx("mxfp8", 8)
        if strategy == "block":
            shape = weights.get("block_structure") or [128, 128]
            if isinstance(shape, str):
                shape = [int(part) for part in shape.split("x") if part.isdigit()]
            return schemes.floating("fp8-block", per="block", scale=2, block=(shape[0], shape[1]))
        if strategy == "group":
            return schemes.integer("fp8", 8, group, zeros=False)
        return schemes.floating("fp8", per="row" if strategy == "channel" else "tensor", scale=2)
    if kind == "float" and bits == 4:
        return schemes.mx("mxfp4", 4) if layout.startswith("mx") else schemes.nvfp4(group or 16)
    raise _unknown("config_groups.weights", f"{kind}{bits}")


MODELOPT: dict[str, Callable[[int], Scheme]] = {
    "FP8": lambda group: schemes.floating("fp8", per="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda group: schemes.floating("fp8", per="row"),
    "FP8_PB_WO": lambda group: schemes.floating("fp8-block", per="block", block=(128, 128)),
    "FP8_PB_REAL_QUANT": lambda group: schemes.floating("fp8-block", per="block", block=(128, 128)),
    "NVFP4": lambda group: schemes.nvfp4(group or 16),
    "NVFP4_AWQ": lambda group: schemes.nvfp4(group or 16),
    "W4A16_NVFP4": lambda group: schemes.nvfp4(group or 16),
    "W4A8_NVFP4_FP8": lambda group: schemes.nvfp4(group or 16),
    "W4A16_AWQ": lambda group: schemes.integer("int4-awq", 4, group or 128, zeros=False),
    "W4A8_AWQ": lambda group: schemes.integer("int4-awq", 4, group or 128, zeros=False),
    "W8A16": lambda group: schemes.integer("int8", 8, 0, zeros=False),
    "W8A8_SQ_PER_CHANNEL": lambda group: schemes.integer("int8", 8, 0, scale=4, zeros=False),
    "MXFP8": lambda group: schemes.mx("mxfp8", 8),
    "MXFP4": lambda group: schemes.mx("mxfp4", 4),
    "W4A8_MXFP4_FP8": lambda group: schemes.mx("mxfp4", 4),
}


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    algorithm = str(config.get("quant_algo") or "").upper()
    if algorithm not in MODELOPT:
        raise _unknown("quant_algo", config.get("quant_algo"))
    return MODELOPT[algorithm](group_of(config, default=0))


def modelopt(config: Mapping[str, Any]) -> Reading:
    """NVIDIA modelopt: one algorithm or one a layer, less wildcards; "*" crosses dots."""
    inner = config.get("quantization")
    config = inner if isinstance(inner, Mapping) else config
    left = (*(names_in(config, "ignore") or ()), *(names_in(config, "exclude_modules") or ()))
    tests = tuple((name, below(name)) for name in left)
    mixed = str(config.get("quant_algo", "")).upper() == "MIXED_PRECISION"
    layers = config.get("quantized_layers") or {}
    if not isinstance(layers, Mapping):
        raise UsageError("quantization_config.quantized_layers: expected an object by layer")
    by_name = {
        str(name): _modelopt(own) for name, own in layers.items() if isinstance(own, Mapping)
    }
    common = None if mixed else _modelopt(config)

    def decide(site: Site) -> Scheme | None:
        if site.kind not in (*LINEARS, ModuleKind.EXPERTS) or hit(site, tests):
            return None
        if any("vision_tower" in name or "vision_model" in name for name in site.names):
            return None  # vLLM's ModelOptQuantConfigBase.get_quant_method
        if mixed:
            found = (by_name[name] for name in site.names if name in by_name)
            return next(found, None)
        return common

    return Reading(decide, training.MODELOPT, tests)


def quark(config: Mapping[str, Any]) -> Reading:
    """AMD quark: layer_quant_config by pattern, then by class, then the global one, less `exclude`."""
    tests = tuple((name, wildcard(name)) for name in names_in(config, "exclude") or ())
    layers = config.get("layer_quant_config") or {}
    by_type = config.get("layer_type_quant_config") or {}
    if not isinstance(layers, Mapping) or not isinstance(by_type, Mapping):
        raise UsageError("quantization_config.layer_quant_config: expected an object by pattern")
    rules = tuple((wildcard(str(key)), _quark(value)) for key, value in layers.items())
    common = _quark(by_type.get("Linear", config.get("global_quant_config")))

    def decide(site: Site) -> Scheme | None:
        if site.kind not in (*LINEARS, ModuleKind.EXPERTS) or hit(site, tests):
            return None
        for test, scheme in rules:
            if any(test(name) for name in site.names):
                return scheme
        return common

    return Reading(decide, training.QUARK, tests)


def _quark(own: object) -> Scheme | None:
    """Return the scheme of a quark layer config; None leaves the weight alone."""
    weight = own.get("weight") if isinstance(own, Mapping) else None
    if isinstance(weight, list | tuple):
        weight = weight[-1] if weight else None
    if not isinstance(weight, Mapping):
        return None
    kind, spread = str(weight.get("dtype", "")).lower(), str(weight.get("qscheme", "")).lower()
    group = group_of(weight, default=128) if spread == "per_group" else 0
    if kind == "fp4" or kind == "mx" or kind.startswith("mxfp4"):
        return schemes.mx("mxfp4", 4)
    if kind.startswith("fp8"):
        return schemes.floating("fp8", per="row" if spread == "per_channel" else "tensor")
    if kind in ("int4", "uint4", "int8", "uint8", "int2", "int3"):
        bits = int(kind[-1])
        if spread == "per_tensor":
            return Scheme("int8", Fraction(bits), -1, constant=Fraction(4))
        zeros = weight.get("symmetric") is False or kind.startswith("u")
        return schemes.integer(f"quark-{kind}", bits, group, zeros=zeros)
    raise _unknown("weight.dtype", kind)


def torchao(config: Mapping[str, Any]) -> Reading:
    """torchao: one config for all linears, or FqnToConfig's, tested against the parameter's name."""
    kind = config.get("quant_type")
    if isinstance(kind, Mapping):
        inner = kind.get("default", kind)
        kind = inner if isinstance(inner, Mapping) else kind
    if isinstance(kind, str):
        own = config.get("quant_type_kwargs")
        kind = {"_type": kind, "_data": own if isinstance(own, Mapping) else {}}
    if not isinstance(kind, Mapping):
        raise UsageError("quantization_config.quant_type: expected a torchao config")
    data = kind.get("_data")
    data = data if isinstance(data, Mapping) else {}
    listed = names_in(config, "modules_to_not_convert")
    if str(kind.get("_type")) in ("FqnToConfig", "ModuleFqnToConfig"):
        return _by_name(data, listed)
    scheme = _torchao(kind, data)
    tables = bool(config.get("include_input_output_embeddings"))
    decide, tests = converted(lambda _: scheme, listed, experts=False, end=".weight")

    def wider(site: Site) -> Scheme | None:
        if tables and site.role in ("embedding", "head") and not hit(site, tests, end=".weight"):
            return scheme if site.linear or site.kind is ModuleKind.EMBEDDING else None
        return decide(site)

    return Reading(wider, _torchao_training(kind), tests)


def _torchao_training(kind: Mapping[str, Any]) -> training.Training:
    """transformers' is_trainable looks for an 8 before "weight" in the config's name."""
    word = str(kind.get("_type", "")).lower().replace("_", "")
    return training.TORCHAO8 if "8weight" in word else training.TORCHAO4


def _by_name(data: Mapping[str, Any], listed: tuple[str, ...] | None) -> Reading:
    table = data.get("fqn_to_config") or data.get("module_fqn_to_config") or {}
    if not isinstance(table, Mapping):
        raise UsageError("quantization_config.fqn_to_config: expected an object by name")
    tests = tuple((name, prefix_or_suffix(name)) for name in listed or ())
    rules: list[tuple[Test, Scheme | None]] = []
    fallback: Scheme | None = None
    for key, own in table.items():
        inner = own.get("_data") if isinstance(own, Mapping) else None
        scheme = _torchao(own, inner if isinstance(inner, Mapping) else {}) if own else None
        if key == "_default":
            fallback = scheme
        else:
            rules.append((exact_or_regex(str(key)), scheme))

    def decide(site: Site) -> Scheme | None:
        if listed is None and site.role == "head":
            return None
        if hit(site, tests, end=".weight"):
            return None
        for test, scheme in rules:
            if any(test(name) or test(f"{name}.weight") for name in site.names):
                return scheme
        return fallback if site.linear else None

    return Reading(decide, training.TORCHAO4, tests)


def _torchao(kind: Mapping[str, Any], data: Mapping[str, Any]) -> Scheme:
    word = str(kind.get("_type", "")).lower().replace("_", "").removesuffix("config")
    if word in (
        "int4weightonly",
        "int8dynamicactivationint4weight",
        "int4dynamicactivationint4weight",
    ):
        group = group_of(data, default=128 if word == "int4weightonly" else 32)
        return Scheme("torchao-int4", Fraction(4), group, constant=Fraction(4))
    if word in ("int8weightonly", "int8dynamicactivationint8weight"):
        return schemes.integer("torchao-int8", 8, 0, scale=4, zeros=False)
    if word in ("intxweightonly", "int8dynamicactivationintxweight"):
        spread = data.get("weight_granularity") or data.get("granularity")
        inner = spread.get("_data") if isinstance(spread, Mapping) else None
        group = group_of(inner, default=0) if isinstance(inner, Mapping) else 0
        # IntxUnpackedToInt8Tensor: a byte a weight, a 16-bit scale and an int8 zero point
        return schemes.integer("torchao-intx", 8, group, scale=2)
    if word.startswith("float8"):
        row = word == "float8weightonly" or "PerRow" in str(data.get("granularity"))
        return schemes.floating("torchao-float8", per="row" if row else "tensor")
    raise _unknown("quant_type", kind.get("_type"))
