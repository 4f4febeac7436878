"""What of a model is trained, adapted, quantised: parameter counts a plan needs, cached by model."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from planner.dtypes import QUANTIZATIONS, element_bytes, quantized_bytes
from planner.models.lora_targets import lora_counts
from planner.models.quantization import left_in_16_bit
from planner.models.spec import ModelSpec, ModuleKind
from planner.run.resolve import Resolved

BITSANDBYTES = ("nf4", "fp4", "int8")
SMALL_TENSOR = 4096
"""Elements below which 8-bit optimizers keep a tensor in 32 bit."""
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
    experts: int
    """Parameters on the fused experts of one layer (the largest)."""
    saved: int
    """Parameters of modules_to_save."""
    largest: int
    """Parameters of the largest tensor."""


_STORE: dict[tuple[int, object], tuple[ModelSpec, object]] = {}


def base_weights(model: ModelSpec, resolved: Resolved) -> BaseWeights:
    """Return the bytes of the base model on one GPU before sharding."""
    upcast = resolved.switches.kbit_upcast == "all" and resolved.quantization in BITSANDBYTES
    key = BaseKey(
        resolved.dtype,
        resolved.quantization,
        resolved.double_quant,
        upcast,
        resolved.switches.linear_experts,
        resolved.switches.quantized_head,
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
    published = QUANTIZATIONS.get(model.checkpoint_quantization or "none") == key.quantization
    for layer in model.layers:
        for module in layer.modules:
            if module.kind in LINEARS or module.kind is ModuleKind.EXPERTS:
                if published and left_in_16_bit(model, module):
                    continue
                fused = module.kind is ModuleKind.EXPERTS and not key.linear_experts
                if fused and key.quantization in ("nf4", "fp4", "int8"):
                    continue  # bitsandbytes replaces nn.Linear only; 3-D experts stay 16-bit
                shapes = module.shapes[:1]
                if module.kind is ModuleKind.EXPERTS:
                    shapes = tuple(shape for shape in module.shapes if len(shape) == 3)
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
    counts = lora_counts(
        model,
        resolved.lora_targets,
        rank=resolved.lora_rank,
        dora=resolved.dora,
        modules_to_save=resolved.modules_to_save,
    )
    small = modules = 0
    leaves: set[str] = set()
    experts = [0] * len(model.layers)
    for module in counts.adapted:
        small += module.count * sum(size for size in module.tensors if size < SMALL_TENSOR)
        modules += module.count
        if module.layer is not None and ".experts" in module.name:
            experts[module.layer] += sum(module.tensors)
        else:
            leaves.add(module.name.rsplit(".", 1)[-1])
    return Adapters(
        parameters=counts.parameters,
        small=small,
        modules=modules,
        leaves=frozenset(leaves),
        experts=max(experts, default=0),
        saved=counts.saved_parameters,
        largest=max((size for module in counts.adapted for size in module.tensors), default=0),
    )
