"""What one rank holds of tensors cut along their first dimension: FSDP2's shards, padding included.

fully_shard cuts every parameter on its own into ceil(rows / ranks) rows a rank (torch 2.13,
distributed/fsdp/_fully_shard/_fsdp_param.py); what is gathered has those rows from every rank.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import prod
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.spec import LayerSpec, ModelSpec, ModuleSpec
from planner.quant.schemes import Scheme
from planner.quant.table import Table, packed_bytes, scheme_table, tensors
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.counts import adapters, base_weights, rest_width
from planner.units import format_bytes


def shard(modules: Iterable[ModuleSpec], ranks: int) -> int:
    """Return the elements of one rank's part of `modules`, on the first rank, which is the fullest."""
    return sum(
        module.count * -(-shape[0] // ranks) * prod(shape[1:])
        for module in modules
        for shape in module.shapes
        if shape
    )


def root_shard(model: ModelSpec, ranks: int) -> int:
    """Return the same of the root unit: embeddings, final norm, head, and towers before the text."""
    return shard([*outside_layers(model), *model.towers], ranks)


def outside_layers(model: ModelSpec) -> list[ModuleSpec]:
    """Return the text's own modules that are in no layer; a tied head is its embedding."""
    head = [model.head] if model.head is not None and not model.tied else []
    return [*model.embeddings, *model.final, *head]


def layer_shard(layer: LayerSpec, ranks: int) -> int:
    """Return the same of one decoder layer."""
    return shard(layer.modules, ranks)


def model_shard(model: ModelSpec, ranks: int) -> int:
    """Return the same of the whole model."""
    layers = (model.layers[index] for index in model.layer_order)
    return root_shard(model, ranks) + sum(layer_shard(layer, ranks) for layer in layers)


def adapter_shard(model: ModelSpec, r: Resolved, ranks: int) -> int:
    """Return the same of all LoRA matrices: A has few rows, so the first ranks hold most of it."""
    return sum(
        count * -(-rows // ranks) * columns for rows, columns, count in adapters(model, r).matrices
    )


def trained_share(model: ModelSpec, r: Resolved, shards: int) -> Fraction:
    """Return which part of all that is trained one of `shards` ranks holds, padding included.

    Eight experts on 64 ranks are eight ranks' alone: a rank that has one holds an eighth of them.
    """
    if not r.placement.flat_buffers or shards == 1:
        return Fraction(1, shards)
    if r.method is Method.FULL:
        return Fraction(model_shard(model, shards), model.parameters)
    total = adapters(model, r).parameters
    return Fraction(adapter_shard(model, r, shards), total) if total else Fraction(1, shards)


FOUR_BIT = ("nf4", "fp4")
"""Schemes whose packed codes are a parameter of bytes that is divided like any other."""


def storage_note(model: ModelSpec, r: Resolved) -> tuple[str, ...]:
    """Return what a plan says of 4-bit weights that ranks divide: how they must be stored for it."""
    ranks = r.placement.weight_shards
    if (
        not r.trains
        or r.quantization not in FOUR_BIT
        or ranks == 1
        or r.switches.divides_packed_bytes
    ):
        return ()
    whole = base_weights(model, r).quantized
    return (
        f"4-bit weights are divided over {ranks} ranks, as bnb_4bit_quant_storage bfloat16 lets them be; "
        f"as uint8, its default, they stay whole on every rank: {format_bytes(whole - whole // ranks)} more",
    )


class Packed(NamedTuple):
    """One rank's part of modules whose linears are packed in 4 bits."""

    divided: int
    """Bytes of its rows: packed codes and what is not packed."""
    constants: int
    """Bytes of block maxima and code tables: attributes of a tensor, which nothing divides."""

    def times(self, count: int) -> "Packed":
        """Return the part of `count` such modules."""
        return Packed(self.divided * count, self.constants * count)


def packed_model(model: ModelSpec, r: Resolved, ranks: int) -> Packed:
    """Return one rank's part of a 4-bit model."""
    table, width = _table(model, r), rest_width(r)
    parts = [
        _packed(part.module, part.scheme, width, ranks).times(part.count) for part in table.parts
    ]
    return Packed(sum(each.divided for each in parts), sum(each.constants for each in parts))


def packed_root(model: ModelSpec, r: Resolved, ranks: int) -> int:
    """Return one rank's bytes of a 4-bit model's root unit, constants apart."""
    table, width = _table(model, r), rest_width(r)
    modules = [*outside_layers(model), *model.towers]
    return sum(
        module.count * _packed(module, table.outside.get(module.name), width, ranks).divided
        for module in modules
    )


def packed_layer(model: ModelSpec, r: Resolved, ranks: int) -> int:
    """Return the same of its largest decoder layer."""
    table, width = _table(model, r), rest_width(r)
    kinds = {kind: table.by_layer[place] for place, kind in enumerate(model.layer_order)}
    return max(
        sum(
            module.count * _packed(module, schemes[module.name], width, ranks).divided
            for module in model.layers[kind].modules
        )
        for kind, schemes in kinds.items()
    )


def _table(model: ModelSpec, r: Resolved) -> Table:
    return scheme_table(
        model,
        r.quantization,
        double_quant=r.double_quant,
        linear_experts=r.linear_experts,
        quantized_head=r.switches.quantized_head,
    )


def _packed(module: ModuleSpec, scheme: Scheme | None, width: int, ranks: int) -> Packed:
    parts = list(_parts(module, scheme, width, ranks))
    return Packed(sum(each.divided for each in parts), sum(each.constants for each in parts))


def _parts(module: ModuleSpec, scheme: Scheme | None, width: int, ranks: int) -> Iterator[Packed]:
    for shape, packs in tensors(module, scheme):
        if packs and scheme is not None:
            codes = -(-prod(shape) // 2)
            yield Packed(-(-codes // ranks), packed_bytes(shape, scheme, module.kind) - codes)
        elif shape:
            yield Packed(-(-shape[0] // ranks) * prod(shape[1:]) * width, 0)


def tensor_shards(
    model: ModelSpec, r: Resolved, width: int, ranks: int
) -> Iterator[tuple[int, int]]:
    """Yield one rank's bytes of each tensor of the base, and how many such tensors there are."""
    for part in _table(model, r).parts:
        for each in _parts(part.module, part.scheme, width, ranks):
            yield each.divided, part.count


def unit_tensors(model: ModelSpec, r: Resolved, layer: LayerSpec | None) -> tuple[int, ...]:
    """Return the bytes of each gathered tensor of a layer, its adapters among them, or of the root unit."""
    ranks = r.placement.weight_shards
    width = rest_width(r)
    if r.method is Method.FULL:
        width = min(element_bytes(r.compute_dtype), width if not r.placement.fp32_shards else 4)
    table = _table(model, r) if r.quantization in FOUR_BIT else None
    modules, schemes = [*outside_layers(model), *model.towers], table.outside if table else {}
    if layer is not None:
        modules = [*layer.modules]
        index = next(kind for kind, each in enumerate(model.layers) if each is layer)
        schemes = table.by_layer[model.layer_order.index(index)] if table else {}
    sizes = [
        part.divided * ranks
        for module in modules
        for part in _parts(module, schemes.get(module.name), width, ranks)
        for _ in range(module.count)
    ]
    if layer is not None and r.method is not Method.FULL:
        each = element_bytes(r.adapter_dtype) * ranks
        sizes += [
            -(-rows // ranks) * columns * each
            for rows, columns, count in adapters(model, r).matrices
            for _ in range(count // model.num_layers)
        ]
    return tuple(sizes)
