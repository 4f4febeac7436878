"""What of a model is trained, adapted, quantised: parameter counts a plan needs, cached by model."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from planner.dtypes import element_bytes, quantized_bytes
from planner.errors import UsageError
from planner.model import ModelSpec, ModuleKind, ModuleSpec
from planner.resolve import Resolved

ATTENTION_PREFIXES = (
    "self_attn",
    "attn",
    "attention",
    "self_attention",
    "linear_attn",
    "mixer",
    "mamba",
)
BITSANDBYTES = ("nf4", "fp4", "int8")
LINEARS = (ModuleKind.LINEAR, ModuleKind.CONV1D)


class BaseKey(NamedTuple):
    """What decides the bytes of the base weights."""

    dtype: str
    quantization: str
    double_quant: bool
    upcast_rest: bool
    linear_experts: bool = False
    quantized_head: bool = False


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Bytes of the frozen or trained base."""

    total: int
    quantized: int
    """Bytes of the quantised linears, constants included; 0 = nothing is quantised."""
    quantized_parameters: int
    rest: int
    largest_quantized: int
    """Elements of the largest quantised weight."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA parameters."""

    parameters: int
    small: int
    """Parameters in tensors below 4096 elements: 8-bit optimizers keep them in 32 bit."""
    modules: int
    leaves: frozenset[str]
    per_layer: int
    saved: int
    """Parameters of modules_to_save."""


_STORE: dict[tuple[int, object], tuple[ModelSpec, object]] = {}


def layer_parameters(model: ModelSpec) -> int:
    """Parameters in the largest layer."""
    return max((layer.parameters for layer in model.layers), default=0)


def is_attention(module: ModuleSpec) -> bool:
    """True for modules inside the token mixer."""
    return module.name.split(".", 1)[0] in ATTENTION_PREFIXES


def matches(module: ModuleSpec, targets: str | tuple[str, ...]) -> bool:
    """Return whether LoRA `targets` name this module, as PEFT would."""
    if module.kind not in LINEARS:
        return False
    if targets == "all-linear":
        return True
    if targets == "attention":
        return is_attention(module)
    if targets == "mlp":
        return not is_attention(module)
    names = (targets,) if isinstance(targets, str) else targets
    return any(
        module.leaf == name or module.name == name or module.name.endswith("." + name)
        for name in names
    )


def base_weights(model: ModelSpec, resolved: Resolved) -> BaseWeights:
    """Return the bytes of the base model on one GPU before sharding."""
    upcast = resolved.switch("kbit_upcast") is True and resolved.quantization in BITSANDBYTES
    key = BaseKey(
        resolved.dtype,
        resolved.quantization,
        resolved.double_quant,
        upcast,
        bool(resolved.switch("linear_experts")),
        bool(resolved.switch("quantized_head")),
    )
    stored = _STORE.get((id(model), key))
    if stored is None:
        stored = (model, _base_weights(model, key))
        _STORE[id(model), key] = stored
    assert isinstance(stored[1], BaseWeights)
    return stored[1]


def _base_weights(model: ModelSpec, key: BaseKey) -> BaseWeights:
    width = element_bytes(key.dtype)
    if not key.quantization:
        total = model.parameters * width
        return BaseWeights(total, 0, 0, total, 0)
    quantized = count = largest = 0
    for layer in model.layers:
        for module in layer.modules:
            if module.kind in LINEARS or module.kind is ModuleKind.EXPERTS:
                fused = module.kind is ModuleKind.EXPERTS and not key.linear_experts
                if fused and key.quantization in ("nf4", "fp4", "int8"):
                    continue  # bitsandbytes replaces nn.Linear only; 3-D experts stay 16-bit
                shapes = module.shapes if module.kind is ModuleKind.EXPERTS else module.shapes[:1]
                for shape in shapes:
                    numel = prod(shape)
                    one = quantized_bytes(
                        numel, key.quantization, double_quant=key.double_quant, columns=shape[-1]
                    )
                    quantized += layer.count * module.count * one
                    count += layer.count * module.count * numel
                    single = module.kind is ModuleKind.EXPERTS and key.linear_experts
                    largest = max(largest, numel // shape[0] if single else numel)
    if key.quantized_head and model.head is not None and not model.tied:
        numel = model.head.weight_parameters
        quantized += quantized_bytes(
            numel, key.quantization, double_quant=key.double_quant, columns=model.hidden
        )
        count += numel
        largest = max(largest, numel)
    rest = (model.parameters - count) * (4 if key.upcast_rest else width)
    return BaseWeights(quantized + rest, quantized, count, rest, largest)


def adapters(model: ModelSpec, resolved: Resolved) -> Adapters:
    """Return LoRA's parameter counts; raises UsageError when the targets match nothing."""
    key = (resolved.lora_rank, resolved.lora_targets, resolved.dora, resolved.modules_to_save)
    stored = _STORE.get((id(model), key))
    if stored is None:
        stored = (model, _adapters(model, resolved))
        _STORE[id(model), key] = stored
    assert isinstance(stored[1], Adapters)
    return stored[1]


def _adapters(model: ModelSpec, resolved: Resolved) -> Adapters:
    rank, total, small, modules, widest = resolved.lora_rank, 0, 0, 0, 0
    leaves: set[str] = set()
    for layer in model.layers:
        in_layer = 0
        for module in layer.modules:
            if not matches(module, resolved.lora_targets):
                continue
            leaves.add(module.leaf)
            tensors = [rank * module.in_features, rank * module.out_features]
            if resolved.dora:
                tensors.append(module.out_features)
            in_layer += module.count * sum(tensors)
            small += layer.count * module.count * sum(n for n in tensors if n < 4096)
            modules += layer.count * module.count
        total += layer.count * in_layer
        widest = max(widest, in_layer)
    for module in (*model.embeddings, *((model.head,) if model.head else ())):
        named = resolved.lora_targets if isinstance(resolved.lora_targets, tuple) else ()
        if module.leaf in named or module.name in named:
            rows, columns = module.shapes[0]
            total += rank * (rows + columns)
            leaves.add(module.leaf)
            modules += 1
    if not modules:
        raise UsageError(
            f"lora.targets: {resolved.lora_targets!r} match no linear layer of {model.name}",
            hint="all-linear, attention, mlp, or: "
            + ", ".join(
                sorted({m.leaf for la in model.layers for m in la.modules if m.kind in LINEARS})
            ),
        )
    return Adapters(total, small, modules, frozenset(leaves), widest, _saved(model, resolved))


def _saved(model: ModelSpec, resolved: Resolved) -> int:
    total = 0
    for name in resolved.modules_to_save:
        found = [
            m
            for m in (*model.embeddings, *model.final, *((model.head,) if model.head else ()))
            if name in (m.leaf, m.name)
        ]
        if not found:
            raise UsageError(f"lora.modules_to_save: {name!r} is not a module of {model.name}")
        total += sum(module.parameters for module in found)
    return total
