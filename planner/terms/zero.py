"""DeepSpeed ZeRO's gradients: the buckets they are reduced in, those on their way, the step's copies.

DeepSpeed 0.19.6, runtime/zero: stage3.py holds its bucket and all of a rank's gradients from the start and
makes one more copy of a bucket to reduce it (reduce_scatter_coalesced); stage_1_and_2.py makes its buckets
for each backward (setup_buckets) and one more when a bucket spans two ranks' parts (allreduce_and_scatter).
"""

from math import prod

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.adapters import trained_groups, trained_parameters
from planner.terms.counts import adapters
from planner.terms.gradients import gradient_width, largest_trained
from planner.terms.term import Term

FP32 = 4
STAGE3 = "DeepSpeed runtime/zero/stage3.py: _setup_for_real_optimizer"
REDUCTION = "DeepSpeed runtime/zero: setup_buckets, allreduce_and_scatter, reduce_scatter_coalesced"


def standing_bucket(model: ModelSpec, r: Resolved) -> Term:
    """Return stage 3's reduction bucket, which is there from the start."""
    zero = r.placement.zero
    if zero is None or not zero.window or not zero.buckets:
        return Term("communication", 0)
    width = bucket_width(r)
    text = "reduction bucket of {0:,} elements x {1} B"
    return Term("communication", zero.reduce * width, text, (zero.reduce, width), STAGE3)


def standing_gradients(r: Resolved, grads: Term) -> Term:
    """Return gradients that are there from the start: those of stage 3, unless they go to the host."""
    zero = r.placement.zero
    stands = zero is not None and zero.window and not r.placement.offload.gradients
    return grads if stands else Term("gradients", 0)


def step_gradients(r: Resolved, grads: Term) -> Term:
    """Return the gradients beside the step's copies: stage 1 has given back all but this rank's."""
    shards = r.placement.state_shards
    if r.placement.zero is None or r.placement.gradient_shards == shards or not grads.bytes:
        return grads
    part = -(-grads.bytes // shards)
    text = "{0:,} B / {1} shard(s), the others' given back"
    return Term("gradients", part, text, (grads.bytes, shards), grads.source)


def passing_buckets(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of the buckets and copies that one backward makes beside a standing bucket."""
    zero = r.placement.zero
    if zero is None:
        return 0
    trained = trained_parameters(model, r)
    filled = min(zero.reduce, trained) * bucket_width(r)
    # stages 1 and 2 fill theirs in the weights' dtype and cast the copy
    own = 0 if zero.window else zero.buckets * zero.reduce * element_bytes(r.dtype)
    if r.placement.gradient_shards == 1 and r.placement.state_shards == 1:
        return own  # one rank: nobody to reduce with
    return own + filled


def bucket_width(r: Resolved) -> int:
    """Bytes of an element while it is reduced."""
    zero = r.placement.zero
    return element_bytes((zero.dtype if zero is not None else "") or r.dtype)


def waiting_gradients(
    model: ModelSpec, r: Resolved, width: int, part: int
) -> tuple[int, int] | None:
    """Return the gradients there in the backward: while a layer runs, and without the one on its way.

    None where they are those of autograd alone. `part`: bytes of this rank's gradients at the step. Stage 1
    reduces whole gradients at the end, into this rank's part; stage 2 fills a new part in every micro-batch
    and adds it to the one before; stage 3's, and what goes to the host, is counted elsewhere.
    """
    zero, here = r.placement.zero, r.placement
    if zero is None:
        return None
    if not zero.partitions_gradients:
        whole = part + -(-part // here.state_shards)
        return whole, whole
    counted = zero.window or here.offload.gradients
    held = 0 if counted else part * (2 if r.grad_accum > 1 else 1)
    return held + largest_layer_tensor(model, r) * width, held


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
    width = gradient_width(r)
    at_once = count
    if zero.window:
        least = -(-max(largest_trained(model, r), 1) // here.state_shards)
        at_once = min(count, max(zero.sub_group, least))
    flat = at_once * width if width < FP32 else 0
    freed = 0 if zero.window else flat
    roots = at_once * FP32 if square_roots else 0
    return at_once * FP32 + max(flat, roots - freed), at_once
