"""The tensors of a model, one by one, in the order of the checkpoint: what loading and training allocate."""

from collections.abc import Iterator
from itertools import chain
from math import prod
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec, ModuleKind, ModuleSpec
from planner.quant.schemes import Scheme
from planner.quant.table import BITSANDBYTES, packed_bytes, scheme_table, tensors
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.counts import lora_of, rest_width
from planner.terms.weights import trained_width


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
    for tensors_of_module in _by_module(model, r):
        yield from tensors_of_module


def by_unit(model: ModelSpec, r: Resolved) -> list[list[Loaded]]:
    """Return the tensors of FSDP's units: of what is outside the layers, then of every layer in order."""
    sizes = [len(model.layers[index].modules) for index in model.layer_order]
    found = list(_by_module(model, r))
    place = len(model.embeddings)
    layers: list[list[Loaded]] = []
    for size in sizes:
        layers.append(list(chain.from_iterable(found[place : place + size])))
        place += size
    root = chain.from_iterable(found[: len(model.embeddings)] + found[place:])
    return [list(root), *layers]


def _by_module(model: ModelSpec, r: Resolved) -> Iterator[list[Loaded]]:
    """Yield the tensors of every module that holds parameters of its own, first to last."""
    width = element_bytes(r.dtype)
    upcast = r.switches.kbit_upcast == "all" and r.quantization in BITSANDBYTES
    alike: dict[
        tuple[int, Scheme | None], list[Loaded]
    ] = {}  # layers of a kind share their modules
    for module, scheme in _with_schemes(model, r):
        key = id(module), scheme
        if key not in alike:
            alike[key] = [
                _packed(shape, module.kind, scheme, r)
                if scheme is not None and packed
                else Loaded((prod(shape) * (4 if upcast else width),))
                for shape, packed in tensors(module, scheme)
                for _ in range(module.count)
            ]
        yield alike[key]


def _with_schemes(model: ModelSpec, r: Resolved) -> Iterator[tuple[ModuleSpec, Scheme | None]]:
    """Yield the modules in order, each with the scheme that its weight has."""
    table = scheme_table(
        model,
        r.quantization,
        double_quant=r.double_quant,
        linear_experts=r.linear_experts,
        quantized_head=r.switches.quantized_head,
    )
    layers = sum(len(model.layers[index].modules) for index in model.layer_order)
    inside = [
        schemes[module.name]
        for index, schemes in zip(model.layer_order, table.by_layer, strict=True)
        for module in model.layers[index].modules
    ]
    for number, module in enumerate(modules_in_order(model)):
        place = number - len(model.embeddings)
        within = 0 <= place < layers
        yield module, inside[place] if within else table.outside.get(module.name)


def _packed(shape: tuple[int, ...], kind: ModuleKind, scheme: Scheme, r: Resolved) -> Loaded:
    total, numel = packed_bytes(shape, scheme, kind), prod(shape)
    codes = int(numel * scheme.bits // 8)
    quantised_here = scheme.name in BITSANDBYTES and not r.switches.prequantized
    passing = numel * element_bytes(r.dtype) if quantised_here else 0
    return Loaded((min(codes, total), max(0, total - codes)), passing)


class Trained(NamedTuple):
    """One trained tensor."""

    elements: int
    width: int
    """Bytes of an element."""
    loads: bool = True
    """It is there beside the base's weights: an adapter, or a copy of a module."""


def trained(model: ModelSpec, r: Resolved) -> list[Trained]:
    """Return every trained tensor, first to last."""
    if r.method is Method.FULL:
        width = trained_width(r)
        return [
            Trained(prod(shape), width)
            for module in modules_in_order(model)
            if module.kind is not ModuleKind.BUFFER
            for shape in module.shapes
            for _ in range(module.count)
        ]
    counts = lora_of(model, r)
    by_layer: dict[int, list[int]] = {}
    outside: list[int] = []
    for module in counts.adapted:
        if module.layer is None:
            outside.extend(module.count * list(module.tensors))
        else:
            times = max(1, module.count // model.layers[module.layer].count)
            by_layer.setdefault(module.layer, []).extend(times * list(module.tensors))
    sizes = [size for index in model.layer_order for size in by_layer.get(index, ())]
    adapted, whole = element_bytes(r.adapter_dtype), rest_width(r)
    copies = len(counts.rest.tensors) - counts.rest.bias_count
    return [
        *(Trained(size, adapted) for size in sizes + outside),
        *(Trained(n, whole, place < copies) for place, n in enumerate(counts.rest.sizes)),
    ]


def factored(model: ModelSpec, r: Resolved) -> list[int]:
    """Return the elements of every statistic that Adafactor keeps: a matrix's rows, then its columns."""
    found: list[int] = []
    if r.method is Method.FULL:
        for module in modules_in_order(model):
            if module.kind is not ModuleKind.BUFFER:
                for shape in module.shapes:
                    found += module.count * _statistics(shape)
        return found
    for adapted in lora_of(model, r).adapted:
        found += adapted.count * list(adapted.factored)
    for shape in lora_of(model, r).rest.tensors:
        found += _statistics(shape)
    return found


def _statistics(shape: tuple[int, ...]) -> list[int]:
    if len(shape) < 2:
        return [prod(shape)]
    stacked = prod(shape[:-2])
    return [stacked * shape[-2], stacked * shape[-1]]
