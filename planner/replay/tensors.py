"""The tensors of a model, one by one, in the order of the checkpoint: what loading and training allocate."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from planner.dtypes import QUANTIZATIONS, element_bytes, quantized_bytes
from planner.models.lora_targets import lora_counts
from planner.models.quantization import left_in_16_bit
from planner.models.spec import ModelSpec, ModuleKind, ModuleSpec
from planner.run.recipe import Method
from planner.run.resolve import Resolved
from planner.terms.counts import BITSANDBYTES, LINEARS
from planner.terms.weights import trained_width

EIGHT_BIT = frozenset({"int8", "fp8", "fp8-block", "gptq-8bit"})
"""Schemes with a byte for every weight; the others pack two in one."""


class Loaded(NamedTuple):
    """What loading one tensor allocates."""

    blocks: tuple[int, ...]
    """Bytes that stay."""
    passing: int = 0
    """Bytes of the tensor as the checkpoint has it, while it is quantised."""


def modules_in_order(model: ModelSpec) -> Iterator[ModuleSpec]:
    """Yield every module that holds parameters of its own, first to last."""
    yield from model.embeddings
    for index in model.layer_order:
        yield from model.layers[index].modules
    yield from model.final
    yield from model.towers
    if model.head is not None and not model.tied:
        yield model.head


def loaded(model: ModelSpec, r: Resolved) -> Iterator[Loaded]:
    """Yield what each tensor of the base takes."""
    full = r.method is Method.FULL and r.trains
    width = trained_width(r) if full else element_bytes(r.dtype)
    upcast = r.switches.kbit_upcast == "all" and r.quantization in BITSANDBYTES
    for module in modules_in_order(model):
        quantised = bool(r.quantization) and _is_quantised(model, module, r)
        for shape in module.shapes:
            numel = prod(shape)
            packed = quantised and (len(shape) == 3 or shape is module.shapes[0])
            for _ in range(module.count):
                if not packed:
                    yield Loaded((numel * (4 if upcast else width),))
                else:
                    yield _packed(numel, shape[-1], r)


def _is_quantised(model: ModelSpec, module: ModuleSpec, r: Resolved) -> bool:
    if module is model.head:
        return r.switches.quantized_head
    if any(module is other for other in (*model.embeddings, *model.final, *model.towers)):
        return False
    if module.kind is ModuleKind.EXPERTS:
        return r.switches.linear_experts or r.quantization not in BITSANDBYTES
    if module.kind not in LINEARS:
        return False
    published = QUANTIZATIONS.get(model.checkpoint_quantization or "none") == r.quantization
    return not (published and left_in_16_bit(model, module))


def _packed(numel: int, columns: int, r: Resolved) -> Loaded:
    total = quantized_bytes(numel, r.quantization, double_quant=r.double_quant, columns=columns)
    codes = numel if r.quantization in EIGHT_BIT else numel // 2
    passing = numel * element_bytes(r.dtype) if r.quantization in BITSANDBYTES else 0
    return Loaded((min(codes, total), max(0, total - codes)), passing)


def trained(model: ModelSpec, r: Resolved) -> list[int]:
    """Return the elements of every trained tensor, first to last."""
    if r.method is Method.FULL:
        return [
            prod(shape)
            for module in modules_in_order(model)
            if module.kind is not ModuleKind.BUFFER
            for shape in module.shapes
            for _ in range(module.count)
        ]
    counts = lora_counts(
        model,
        r.lora_targets,
        rank=r.lora_rank,
        dora=r.dora,
        modules_to_save=r.modules_to_save,
    )
    by_layer: dict[int, list[int]] = {}
    outside: list[int] = []
    for module in counts.adapted:
        if module.layer is None:
            outside.extend(module.count * list(module.tensors))
        else:
            times = max(1, module.count // model.layers[module.layer].count)
            by_layer.setdefault(module.layer, []).extend(times * list(module.tensors))
    sizes = [size for index in model.layer_order for size in by_layer.get(index, ())]
    if counts.saved_parameters:
        outside.append(counts.saved_parameters)
    return sizes + outside
