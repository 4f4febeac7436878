"""Reads a quantization_config as its own library does: each module's scheme, and who trains it.

Rules read in transformers 5.19 (quantizers/, integrations/), compressed_tensors 0.15 utils/match.py,
vLLM 0.32 layers/quantization (modelopt, quark, gptq_utils, inc) and AutoAWQ's quantizer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.models.spec import LINEARS, ModuleKind
from planner.quant import schemes, training
from planner.quant.patterns import (
    MAX_PATTERNS,
    Test,
    prefix_or_suffix,
    regex,
    substring,
)
from planner.quant.schemes import Scheme
from planner.quant.sites import Site

Decide = Callable[[Site], Scheme | None]
BLOCKSIZES = "vramwise_blocksizes"
"""Of a bitsandbytes block that vramwise wrote: full names by block size, where that is not 64."""
BNB_BLOCKSIZES = ("32", "64", "128", "256", "512", "1024", "2048", "4096")
"""Of 4-bit weights: bitsandbytes 0.50 functional.py, quantize_4bit."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a quantization_config says."""

    decide: Decide
    training: training.Training
    listed: tuple[tuple[str, Test], ...] = ()
    """The names it leaves alone (or picks), each with its library's rule."""


def names_in(config: Mapping[str, Any], *keys: str) -> tuple[str, ...] | None:
    """Return the first list of names that is there; None if none is."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list | tuple) or len(value) > MAX_PATTERNS:
            raise UsageError(
                f"quantization_config.{key}: expected a list of names",
                hint=f"at most {MAX_PATTERNS}",
            )
        return tuple(str(name) for name in value)
    return None


def whole(config: Mapping[str, Any], *keys: str, default: int, allowed: Sequence[int] = ()) -> int:
    """Return an integer field under any of its spellings."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"quantization_config.{key}: {value!r} is not a whole number")
        if allowed and value not in allowed:
            raise UsageError(
                f"quantization_config.{key}: {value} is not allowed",
                hint=f"one of {', '.join(map(str, allowed))}",
            )
        return value
    return default


def group_of(config: Mapping[str, Any], *keys: str, default: int) -> int:
    """Return a group size; -1 and 0 mean one scale a row."""
    size = whole(config, *(keys or ("group_size",)), default=default)
    if size < -1 or size > 1 << 20:
        raise UsageError(f"quantization_config.group_size: {size} is not a group size")
    return max(0, size)


def hit(site: Site, tests: Sequence[tuple[str, Test]], *, end: str = "") -> bool:
    """Say whether a name of the site is one of those listed."""
    return any(test(name + end) for name in site.names for _, test in tests)


def converted(
    scheme: Callable[[Site], Scheme],
    listed: tuple[str, ...] | None,
    *,
    experts: bool,
    conv1d: bool = False,
    end: str = "",
) -> tuple[Decide, tuple[tuple[str, Test], ...]]:
    """Return transformers' rule: every linear but those listed; without a list, all but the head."""
    tests = tuple((name, prefix_or_suffix(name)) for name in listed or ())

    def decide(site: Site) -> Scheme | None:
        fits = site.linear or (conv1d and site.kind is ModuleKind.CONV1D)
        if not fits and not (experts and site.kind is ModuleKind.EXPERTS):
            return None
        if (listed is None and site.role == "head") or hit(site, tests, end=end):
            return None
        return scheme(site)

    return decide, tests


def bitsandbytes(config: Mapping[str, Any]) -> Reading:
    """bitsandbytes through transformers: a null list means the head stays, [] that nothing does."""
    own: dict[str, Scheme] = {}
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        scheme = schemes.bnb_int8()
    else:
        kind = str(config.get("bnb_4bit_quant_type") or "nf4").lower()
        if kind not in ("nf4", "fp4"):
            raise UsageError(
                f"quantization_config.bnb_4bit_quant_type: {kind!r} is not allowed",
                hint="nf4 or fp4",
            )
        nested = bool(config.get("bnb_4bit_use_double_quant", False))
        scheme = schemes.bnb_4bit(kind, nested=nested)
        own = {
            name: schemes.bnb_4bit(kind, nested=nested, block=block)
            for name, block in _blocksizes(config).items()
        }
    listed = names_in(config, "llm_int8_skip_modules")
    decide, tests = converted(
        lambda site: next((own[name] for name in site.names if name in own), scheme),
        listed,
        experts=True,
        conv1d=True,
    )
    return Reading(decide, training.BNB, tests)


def _blocksizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the block sizes of weights by name; those that are not listed have 64."""
    listed = config.get(BLOCKSIZES) or {}
    if not isinstance(listed, Mapping):
        raise UsageError(f"quantization_config.{BLOCKSIZES}: expected an object of names by size")
    found: dict[str, int] = {}
    for size in listed:
        if size not in BNB_BLOCKSIZES:
            raise UsageError(
                f"quantization_config.{BLOCKSIZES}: {str(size)[:40]!r} is not allowed",
                hint=f"one of {', '.join(BNB_BLOCKSIZES)}",
            )
        found |= dict.fromkeys(names_in(listed, size) or (), int(size))
    return found


def fp8(config: Mapping[str, Any], *, experts: str = "") -> Reading:
    """Finegrained FP8 through transformers: linears and fused experts."""
    if config.get("modules_to_convert"):
        raise UnsupportedError(
            "quantization_config.modules_to_convert: FP8 embeddings are not planned",
            hint="give a checkpoint without it",
        )
    block, scale = config.get("weight_block_size"), 1 if config.get("scale_fmt") == "ue8m0" else 4
    if block is None:
        scheme = schemes.floating("fp8", per="tensor")
    elif isinstance(block, list | tuple) and len(block) == 2 and all(_size(n) for n in block):
        scheme = schemes.floating(
            "fp8-block", per="block", scale=scale, block=(int(block[0]), int(block[1]))
        )
    else:
        raise UsageError(f"quantization_config.weight_block_size: {block!r} is not two sizes")
    packed = schemes.mx("mxfp4", 4) if experts == "fp4" else scheme
    decide, tests = converted(
        lambda site: packed if site.kind is ModuleKind.EXPERTS else scheme,
        names_in(config, "modules_to_not_convert", "ignored_layers"),
        experts=True,
    )
    return Reading(decide, training.MXFP4 if experts == "fp4" else training.FP8, tests)


def _size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 20


def simple(
    config: Mapping[str, Any], scheme: Scheme, how: training.Training, *, experts: bool = False
) -> Reading:
    """A transformers integration of one scheme for all linears."""
    decide, tests = converted(
        lambda _: scheme,
        names_in(config, "modules_to_not_convert", "linear_weights_not_to_quantize"),
        experts=experts,
    )
    return Reading(decide, how, tests)


def mxfp4(config: Mapping[str, Any]) -> Reading:
    """MXFP4 through transformers: the experts of gpt-oss, nothing else."""
    scheme = schemes.mx("mxfp4", 4)
    decide, tests = converted(
        lambda _: scheme, names_in(config, "modules_to_not_convert"), experts=True
    )
    return Reading(
        lambda site: decide(site) if site.kind is ModuleKind.EXPERTS else None,
        training.MXFP4,
        tests,
    )


def hqq(config: Mapping[str, Any]) -> Reading:
    """HQQ: skip_modules and per-layer settings hold tags, names without "model", "layers" and numbers."""
    settings = config.get("quant_config")
    if not isinstance(settings, Mapping):
        settings = config
    common = settings.get("weight_quant_params", settings)
    by_tag = None if "weight_quant_params" in settings or "nbits" in settings else settings
    skipped = names_in(config, "skip_modules")
    skipped = ("lm_head",) if skipped is None else skipped

    def decide(site: Site) -> Scheme | None:
        if not site.linear or site.block in skipped:
            return None
        own = common
        if by_tag is not None:
            own = by_tag.get(site.block)
            own = own.get("weight_quant_params", own) if isinstance(own, Mapping) else None
        if not isinstance(own, Mapping):
            return None
        bits = whole(own, "nbits", default=4, allowed=(8, 4, 3, 2, 1))
        return schemes.hqq(bits, group_of(own, default=64))

    tests = tuple((name, _tag_test(name)) for name in skipped)
    return Reading(decide, training.HQQ, tests)


def _tag_test(tag: str) -> Test:
    parts = ("model", "layers")

    def test(name: str) -> bool:
        return tag == ".".join(
            part for part in name.split(".") if part not in parts and not part.isdigit()
        )

    return test


def awq(config: Mapping[str, Any]) -> Reading:
    """AutoAWQ: the decoder layers' linears, but names that hold a listed text anywhere."""
    bits = whole(config, "bits", "w_bit", default=4, allowed=(2, 3, 4, 8))
    scheme = schemes.integer(
        f"awq-{bits}bit", bits, group_of(config, "group_size", "q_group_size", default=128)
    )
    tests = tuple(
        (name, substring(name)) for name in names_in(config, "modules_to_not_convert") or ()
    )

    def decide(site: Site) -> Scheme | None:
        fits = site.role == "layer" and (*LINEARS, ModuleKind.EXPERTS).count(site.kind)
        return None if not fits or hit(site, tests) else scheme

    return Reading(decide, training.AWQ, tests)


def gptq(config: Mapping[str, Any]) -> Reading:
    """GPTQ: the decoder layers' linears, gptqmodel's `dynamic` rules, the head where lm_head is true."""
    bits = whole(config, "bits", default=4, allowed=(2, 3, 4, 5, 6, 7, 8))
    group = group_of(config, default=schemes.GPTQ_GROUP)
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise UsageError("quantization_config.dynamic: expected an object of rules")
    rules = tuple(
        (str(key), regex(str(key).removeprefix("-:").removeprefix("+:")), value)
        for key, value in dynamic.items()
    )
    inside = _flat(config.get("modules_in_block_to_quantize"))

    def decide(site: Site) -> Scheme | None:
        head = site.role == "head" and config.get("lm_head") is True
        if not head and (site.role != "layer" or site.kind not in (*LINEARS, ModuleKind.EXPERTS)):
            return None
        if inside and not head and not any(_inside(site, name) for name in inside):
            return None
        for key, test, own in rules:
            if any(test(name) for name in site.names):
                if key.startswith("-:"):
                    return None
                if isinstance(own, Mapping):
                    return schemes.integer(
                        "gptq",
                        whole(own, "bits", default=bits, allowed=(2, 3, 4, 5, 6, 7, 8)),
                        group_of(own, default=group),
                    )
        return schemes.integer(f"gptq-{bits}bit", bits, group)

    tests = tuple((key, test) for key, test, _ in rules)
    return Reading(decide, training.GPTQ, tests)


def _flat(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(name for item in value for name in _flat(item))
    return (value,) if isinstance(value, str) else ()


def _inside(site: Site, name: str) -> bool:
    return any(path.endswith(f".{name}") or path == name for path in site.names)


def auto_round(config: Mapping[str, Any]) -> Reading:
    """AutoRound: GPTQ-like packing, the listed blocks, and `extra_config` by name or pattern."""
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise UsageError("quantization_config.extra_config: expected an object by module name")
    rules = tuple(
        (str(key), (lambda name, key=str(key): name == key), value)
        if "*" not in str(key)
        else (str(key), regex(str(key)), value)
        for key, value in extra.items()
    )
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names")
    roots = tuple(blocks.split(",")) if isinstance(blocks, str) else _flat(blocks)

    def decide(site: Site) -> Scheme | None:
        if site.kind not in (*LINEARS, ModuleKind.EXPERTS):
            return None
        for _, test, own in rules:
            if isinstance(own, Mapping) and any(test(name) for name in site.names):
                return _rounded(own, config)
        if site.role not in ("layer", "tower"):
            return None
        if roots:
            chosen = any(name.startswith(root.strip()) for name in site.names for root in roots)
        else:
            chosen = site.role == "layer"
        return _rounded(config, config) if chosen else None

    return Reading(decide, training.ROUND, tuple((key, test) for key, test, _ in rules))


def _rounded(own: Mapping[str, Any], common: Mapping[str, Any]) -> Scheme | None:
    bits = whole(own, "bits", default=whole(common, "bits", default=4))
    if bits >= 16:
        return None
    kind = str(own.get("data_type") or common.get("data_type") or "int")
    if kind.startswith("mx_fp"):
        return schemes.mx(f"mxfp{bits}", bits)
    if kind.startswith("nv_fp"):
        return schemes.nvfp4()
    if kind.startswith("fp"):
        return schemes.floating("fp8", per="row")
    group = group_of(own, default=group_of(common, default=128))
    return schemes.integer(f"auto-round-{bits}bit", bits, group)


def exl2(config: Mapping[str, Any]) -> Reading:
    """ExLlama's exl2 and exl3: `bits` on average in the layers, head_bits in the head."""
    layers = Scheme("exl", _bits(config, "bits", 4))
    head = Scheme("exl", _bits(config, "head_bits", 6))

    def decide(site: Site) -> Scheme | None:
        if site.role == "head":
            return head
        fits = site.role == "layer" and site.kind in (*LINEARS, ModuleKind.EXPERTS)
        return layers if fits else None

    return Reading(decide, training.EXL)


def _bits(config: Mapping[str, Any], key: str, default: float) -> Fraction:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 16:
        raise UsageError(f"quantization_config.{key}: {value!r} is not a number of bits up to 16")
    return Fraction(str(value))
