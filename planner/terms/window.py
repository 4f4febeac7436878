"""ZeRO-3's live window: which weights are whole at once, and the buffer they are copied out of.

DeepSpeed 0.19.6, runtime/zero/partitioned_param_coordinator.py: every module's hook asks for another
prefetch bucket ahead, until `live` elements are whole, so the window fills up whatever a layer takes; a
tensor needed again within `reuse` elements is not given back. Several tensors arrive in one flat buffer
and are copied out of it (partition_parameters.py: AllGatherCoalescedHandle.wait), one alone in place.
"""

from collections.abc import Iterator
from math import prod

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec, ModuleSpec
from planner.run.recipe import Checkpointing
from planner.run.resolved import Resolved
from planner.terms.counts import base_weights
from planner.terms.term import Term

COORDINATOR = (
    "DeepSpeed runtime/zero/partitioned_param_coordinator.py: fetch_sub_module, __params_to_release"
)


def _modules(model: ModelSpec) -> Iterator[tuple[ModuleSpec, int]]:
    """Yield every module that is gathered, and how often the model has it."""
    yield from ((module, 1) for module in (*model.embeddings, *model.final, *model.towers))
    if model.head is not None and not model.tied:
        yield model.head, 1
    for layer in model.layers:
        yield from ((module, layer.count) for module in layer.modules)


def persistent(model: ModelSpec, r: Resolved) -> int:
    """Return elements of tensors that stay whole on every rank."""
    zero = r.placement.zero
    if zero is None or not zero.window:
        return 0
    return sum(
        times * module.count * prod(shape)
        for module, times in _modules(model)
        for shape in module.shapes
        if prod(shape) <= zero.persistence
    )


def window(model: ModelSpec, r: Resolved) -> Term:
    """Return the whole copies that are alive at once: the live window, and small tensors for good."""
    zero, here = r.placement.zero, r.placement
    assert zero is not None
    width, small = element_bytes(r.dtype), persistent(model, r)
    most = max(0, base_weights(model, r).total // width - small)
    needs = min(_needed(model, r), most)
    live = min(max(zero.live, needs), most)
    copied = 0
    if here.offload.weights and here.weight_shards > 1:  # a shard comes from the host first
        copied = -(
            -max(min(prefetched(model, r), most), gathered_module(model))
            * width
            // here.weight_shards
        )
    return Term(
        "weights",
        (live + small) * width + copied,
        "whole of {0} ranks' shards: window of {1:,} elements (live {2:,}, needed at once {3:,}) x {4} B "
        "+ tensors of up to {5:,} elements {6:,} B"
        + (" + shard from the host {7:,} B" if copied else ""),
        (
            *(here.weight_shards, live, zero.live, needs, width),
            *(zero.persistence, small * width, copied),
        ),
        COORDINATOR,
    )


def _needed(model: ModelSpec, r: Resolved) -> int:
    """Return elements that are whole whatever `live` says: what runs, and what is needed again soon."""
    zero = r.placement.zero
    assert zero is not None
    largest = gathered_module(model)
    layer = max(layer.parameters for layer in model.layers)
    again = r.checkpointing not in (Checkpointing.NONE, Checkpointing.SELECTIVE_OP)
    # a recomputed layer stays for its backward; the last layers of a forward stay for theirs
    kept = layer if again and zero.reuse >= layer else 0
    return max(largest, kept, zero.reuse // (3 if again else 2))


def gathered_module(model: ModelSpec) -> int:
    """Return elements of the largest module, whose tensors are asked for together."""
    return max((module.parameters // module.count for module, _ in _modules(model)), default=0)


def prefetched(model: ModelSpec, r: Resolved) -> int:
    """Return elements of the largest group of tensors asked for at once; 0 where each comes alone."""
    zero = r.placement.zero
    assert zero is not None
    if not zero.prefetch or zero.live <= 0:
        return 0
    layer = max(model.layers, key=lambda each: each.parameters).modules
    head = () if model.head is None or model.tied else (model.head,)
    order = [
        prod(shape)
        for module in (*model.embeddings, *layer, *layer, *head, *layer)
        for shape in module.shapes
        for _ in range(min(module.count, 2))
        if prod(shape) > zero.persistence
    ]
    most = 0
    for first in range(len(order)):
        total = taken = 0
        for size in order[first:]:
            if total >= zero.prefetch:
                break
            total, taken = total + size, taken + 1
        if taken > 1:
            most = max(most, total)
    return most


def flat_group(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of the flat buffer that a prefetched group is copied out of."""
    zero = r.placement.zero
    if zero is None or not zero.window or r.placement.weight_shards == 1:
        return 0
    width = element_bytes(r.dtype)
    return min(prefetched(model, r) * width, base_weights(model, r).total)
