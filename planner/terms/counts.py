"""What of a model is trained, adapted, quantised: parameter counts a plan needs, cached by model."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.lora_rest import Rest
from planner.models.lora_targets import LoraCounts, lora_counts
from planner.models.spec import ModelSpec
from planner.quant.table import BITSANDBYTES, packed_bytes, scheme_table, tensors
from planner.run.resolved import Resolved

SMALL_TENSOR = 4096
"""Elements below which 8-bit optimizers keep a tensor in 32 bit."""
BLOCK_8BIT = 256
"""bitsandbytes: elements that share one fp32 scale."""


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
    """Trained parameters in tensors below 4096 elements: 8-bit optimizers keep them in 32 bit."""
    modules: int
    factored: int
    """Elements of their matrices' rows and columns: Adafactor's statistics."""
    leaves: frozenset[str]
    experts: tuple[int, int]
    """Parameters on the fused experts of one layer (the largest): of what leads into them, and out."""
    rest: Rest
    """Modules trained whole and biases."""
    largest: int
    """Parameters of the largest tensor."""
    matrices: tuple[tuple[int, int, int], ...]
    """(rows, columns, how many) of every A, B and magnitude."""


_STORE: dict[tuple[int, object], tuple[ModelSpec, object]] = {}


def base_weights(model: ModelSpec, resolved: Resolved) -> BaseWeights:
    """Return the bytes of the base model on one GPU before sharding."""
    upcast = upcasts_rest(resolved)
    key = BaseKey(
        resolved.dtype,
        resolved.quantization,
        resolved.double_quant,
        upcast,
        resolved.linear_experts,
        resolved.switches.quantized_head,
    )
    stored = _STORE.get((id(model), key))
    if stored is None:
        stored = (model, _base_weights(model, key))
        _STORE[id(model), key] = stored
    assert isinstance(stored[1], BaseWeights)
    return stored[1]


def upcasts_rest(resolved: Resolved) -> bool:
    """Say whether what is not packed is in fp32: peft's prepare_model_for_kbit_training."""
    return resolved.switches.kbit_upcast == "all" and resolved.quantization in BITSANDBYTES


def rest_width(resolved: Resolved) -> int:
    """Return bytes of what a quantised base does not pack: of modules trained whole and biases too."""
    return 4 if upcasts_rest(resolved) else element_bytes(resolved.dtype)


def _base_weights(model: ModelSpec, key: BaseKey) -> BaseWeights:
    width = element_bytes(key.dtype)
    if not key.quantization:
        total = model.parameters * width
        return BaseWeights(total, 0, 0, total, 0)
    table = scheme_table(
        model,
        key.quantization,
        double_quant=key.double_quant,
        linear_experts=key.linear_experts,
        quantized_head=key.quantized_head,
    )
    quantized = count = largest = 0
    for part in table.parts:
        for shape, packed in tensors(part.module, part.scheme):
            if packed and part.scheme is not None:
                quantized += part.count * packed_bytes(shape, part.scheme, part.module.kind)
                count += part.count * prod(shape)
                # every expert is a weight of its own
                largest = max(largest, prod(shape[-2:]))
    rest = (model.parameters - count) * (4 if key.upcast_rest else width)
    return BaseWeights(quantized + rest, quantized, count, rest, largest)


def adapters(model: ModelSpec, resolved: Resolved) -> Adapters:
    """Return LoRA's parameter counts; raises UsageError when the targets match nothing."""
    key = (
        *(resolved.lora_rank, resolved.lora_targets, resolved.target_parameters, resolved.dora),
        *(resolved.modules_to_save, resolved.lora_bias, resolved.switches.ties_saved_modules),
    )
    stored = _STORE.get((id(model), key))
    if stored is None:
        stored = (model, _adapters(model, resolved))
        _STORE[id(model), key] = stored
    assert isinstance(stored[1], Adapters)
    return stored[1]


def lora_of(model: ModelSpec, resolved: Resolved) -> LoraCounts:
    """Return what a run trains when its base is frozen, tensor by tensor."""
    if not resolved.lora_targets and not model.embeddings:  # a tower's blocks, none of them adapted
        return LoraCounts(adapted=())
    return lora_counts(
        model,
        resolved.lora_targets,
        rank=resolved.lora_rank,
        dora=resolved.dora,
        modules_to_save=resolved.modules_to_save,
        target_parameters=resolved.target_parameters,
        bias=resolved.lora_bias,
        ties=resolved.switches.ties_saved_modules,
    )


def _adapters(model: ModelSpec, resolved: Resolved) -> Adapters:
    counts = lora_of(model, resolved)
    small = modules = 0
    leaves: set[str] = set()
    experts = {"in": [0] * len(model.layers), "out": [0] * len(model.layers)}
    for module in counts.adapted:
        small += module.count * sum(size for size in module.tensors if size < SMALL_TENSOR)
        modules += module.count
        if module.layer is not None and ".experts" in module.name:
            side = "out" if module.name.endswith(".down_proj") else "in"
            experts[side][module.layer] += sum(module.tensors)
        else:
            leaves.add(module.name.rsplit(".", 1)[-1])
    sizes = counts.rest.sizes
    return Adapters(
        parameters=counts.parameters,
        small=small + sum(size for size in sizes if size < SMALL_TENSOR),
        modules=modules,
        factored=sum(module.count * sum(module.factored) for module in counts.adapted)
        + sum(sum(shape) for shape in counts.rest.tensors),
        leaves=frozenset(leaves),
        experts=(max(experts["in"], default=0), max(experts["out"], default=0)),
        rest=counts.rest,
        largest=max([*(n for module in counts.adapted for n in module.tensors), *sizes, 0]),
        matrices=tuple(
            (rows, size // rows, module.count)
            for module in counts.adapted
            for rows, size in zip(
                (module.rank, *(module.out_features,) * 2), module.tensors, strict=False
            )
        ),
    )
