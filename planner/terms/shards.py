"""What one rank holds of tensors cut along their first dimension: FSDP2's shards, padding included.

fully_shard cuts every parameter on its own into ceil(rows / ranks) rows a rank (torch 2.13,
distributed/fsdp/_fully_shard/_fsdp_param.py); what is gathered has those rows from every rank.
"""

from collections.abc import Iterable
from math import prod

from planner.models.spec import LayerSpec, ModelSpec, ModuleSpec
from planner.run.resolve import Resolved
from planner.terms.counts import adapters


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
