"""DeepSpeed ZeRO: the live window of stage 3, reduction buckets, gradients on their way, the step's copies.

DeepSpeed 0.19.6. Stage 3 (runtime/zero/partitioned_param_coordinator.py): every module's hook asks for
another prefetch bucket ahead, until `live` elements are whole, so the window fills up whatever a layer
takes; a tensor needed again within `reuse` elements is not given back. Several tensors arrive in one
flat buffer and are copied out of it (partition_parameters.py: AllGatherCoalescedHandle.wait), one alone
arrives in place. stage3.py holds its bucket and all of a rank's gradients from the start and makes one
more copy of a bucket to reduce it (reduce_scatter_coalesced); stage_1_and_2.py makes its buckets for
each backward (setup_buckets) and one more when a bucket spans two ranks' parts (allreduce_and_scatter).
"""

from collections.abc import Iterator
from math import prod

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec, ModuleSpec
from planner.run.recipe import Checkpointing, Method
from planner.run.resolve import Resolved
from planner.terms.adapters import trained_groups, trained_parameters
from planner.terms.counts import adapters, base_weights
from planner.terms.term import Term

FP32 = 4
COORDINATOR = "DeepSpeed runtime/zero/partitioned_param_coordinator.py: fetch_sub_module, __params_to_release"
STAGE3 = "DeepSpeed runtime/zero/stage3.py: _setup_for_real_optimizer"
REDUCTION = "DeepSpeed runtime/zero: setup_buckets, allreduce_and_scatter, reduce_scatter_coalesced"


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
    whole = base_weights(model, r).total - small * width
    needs = _needed(model, r)
    live = min(max(zero.live, needs), whole // width)
    copied = 0
    if here.offload.weights and here.weight_shards > 1:  # a shard comes from the host first
        copied = -(-max(prefetched(model, r), needs) * width // here.weight_shards)
    return Term(
        "weights",
        (live + small) * width + copied,
        "whole of {0} ranks' shards: window of {1:,} elements (live {2:,}, needed at once {3:,}) x {4} B "
        "+ tensors of up to {5:,} elements {6:,} B" + (" + shard from the host {7:,} B" if copied else ""),
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
    largest = max((module.parameters // module.count for module, _ in _modules(model)), default=0)
    layer = max(layer.parameters for layer in model.layers)
    again = r.checkpointing not in (Checkpointing.NONE, Checkpointing.SELECTIVE_OP)
    # a recomputed layer stays for its backward; the last layers of a forward stay for theirs
    kept = layer if again and zero.reuse >= layer else 0
    return max(largest, kept, zero.reuse // (3 if again else 2))


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


def standing_bucket(model: ModelSpec, r: Resolved) -> Term:
    """Return stage 3's reduction bucket, which is there from the start."""
    zero = r.placement.zero
    if zero is None or not zero.window or not zero.buckets:
        return Term("communication", 0)
    width = reduce_width(r)
    text = "reduction bucket of {0:,} elements x {1} B"
    return Term("communication", zero.reduce * width, text, (zero.reduce, width), STAGE3)


def passing_buckets(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of the buckets and copies that one backward makes beside a standing bucket."""
    zero = r.placement.zero
    if zero is None:
        return 0
    trained = trained_parameters(model, r)
    filled = min(zero.reduce, trained) * reduce_width(r)
    own = 0 if zero.window else zero.buckets * zero.reduce * reduce_width(r)
    if r.placement.gradient_shards == 1 and r.placement.state_shards == 1:
        return own  # one rank: nobody to reduce with
    return own + filled


def reduce_width(r: Resolved) -> int:
    """Bytes of a bucket's element: the module's dtype."""
    return element_bytes(r.dtype)


def waiting_gradients(model: ModelSpec, r: Resolved, width: int, part: int) -> int:
    """Return the gradients there while a layer runs backward: this rank's part and one on its way.

    `part`: bytes of this rank's gradients. Stage 2 fills a new part in every micro-batch and adds it to
    the one before; stage 3 adds in place.
    """
    zero = r.placement.zero
    assert zero is not None
    twice = r.grad_accum > 1 and not zero.window and not r.placement.offload.gradients
    return part * (2 if twice else 1) + largest_layer_tensor(model, r) * width


def largest_layer_tensor(model: ModelSpec, r: Resolved) -> int:
    """Return elements of the largest trained tensor inside the layers."""
    if r.method is not Method.FULL:
        return adapters(model, r).largest
    return max(
        (prod(shape) for layer in model.layers for m in layer.modules for shape in m.shapes),
        default=0,
    )


def step_copies(model: ModelSpec, r: Resolved, *, square_roots: bool) -> tuple[int, int]:
    """Return bytes of the step's temporaries beside gradients and states, and elements stepped at once.

    Gradients are flattened, then made fp32 (stage3.py: _prepare_fp32_grad_for_sub_group; stage_1_and_2.py:
    step); after that stages 1 and 2 give the first ones back. torch's foreach AdamW then takes roots.
    """
    zero, here = r.placement.zero, r.placement
    assert zero is not None
    groups = trained_groups(model, r)
    count = -(-sum(group.parameters for group in groups) // here.state_shards)
    width = max((group.width for group in groups), default=FP32)
    at_once = count
    if zero.window:
        least = -(-max(largest_layer_tensor(model, r), 1) // here.state_shards)
        at_once = min(count, max(zero.sub_group, least))
    flat = at_once * width if width < FP32 else 0
    freed = 0 if zero.window else flat
    roots = at_once * FP32 if square_roots else 0
    return at_once * FP32 + max(flat, roots - freed), at_once
