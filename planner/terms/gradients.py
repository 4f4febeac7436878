"""gradients: one per trained parameter, alive from backward to the step (always with accumulation)."""

from math import ceil, prod

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.adapters import trained_groups, trained_parameters
from planner.terms.counts import adapters
from planner.terms.shards import trained_share
from planner.terms.term import Term
from planner.terms.weights import trained_width


def gradient_width(r: Resolved) -> int:
    """Bytes of one gradient element."""
    if r.method is Method.FULL:
        return (
            max(trained_width(r), element_bytes(r.gradient_dtype))
            if r.gradient_dtype == r.dtype
            else element_bytes(r.gradient_dtype)
        )
    return element_bytes(r.adapter_dtype)


def gradients(model: ModelSpec, r: Resolved) -> Term:
    """Return all gradients' bytes on one GPU."""
    count, width = trained_parameters(model, r), gradient_width(r)
    if r.optimizer_in_backward and r.method is Method.FULL:
        return _largest(model, r, width)
    if r.placement.offload.gradients:
        return _passing(model, r, width)
    if r.placement.bucket_views:
        return _copied(model, r, width)
    shards = r.placement.gradient_shards
    if r.method is not Method.FULL and len(trained_groups(model, r)) > 1:
        return _by_width(model, r)
    size = ceil(count * width * trained_share(model, r, shards))
    return Term(
        "gradients",
        size,
        "{0:,} trained parameters x {1} B / {2} shard(s)",
        (count, width, shards),
        "autograd: the parameter's dtype",
    )


def _by_width(model: ModelSpec, r: Resolved) -> Term:
    """Return the gradients of adapters, and of modules and biases that have the base's dtype."""
    shards = r.placement.gradient_shards
    adapted, rest = trained_groups(model, r)
    total = adapted.parameters * adapted.width + rest.parameters * rest.width
    return Term(
        "gradients",
        ceil(total * trained_share(model, r, shards)),
        "({0:,} adapters' parameters x {1} B + {2:,} of modules_to_save and biases x {3} B) / {4} shard(s)",
        (*adapted, *rest, shards),
        "autograd: the parameter's dtype",
    )


def accumulated(model: ModelSpec, r: Resolved, grads: Term) -> Term:
    """Return the gradients that wait from one micro-batch to the next; none without accumulation."""
    if r.switches.gradient_buffers:
        return grads
    if r.grad_accum == 1 or r.copies_into_buckets:
        return Term("gradients", 0)
    if not r.accumulates_whole:
        return grads
    count, width = trained_parameters(model, r), reduce_width(r)
    return Term(
        "gradients",
        count * width,
        "{0:,} trained parameters x {1} B, whole until the last micro-batch reduces them",
        (count, width),
        "transformers trainer.py: accelerator.no_sync; torch FSDP set_requires_gradient_sync",
    )


def whole_width(r: Resolved) -> int:
    """Return bytes of an element of a gradient before it is reduced: the gathered weight's dtype."""
    if r.method is not Method.FULL or not r.placement.gathers:  # adapters are gathered as they are
        return gradient_width(r)
    return min(element_bytes(r.compute_dtype), gradient_width(r))


def reduce_width(r: Resolved) -> int:
    """Return bytes of an element while it is reduced, and while it waits whole for its reduction."""
    if r.placement.flat_buffers and r.reduce_dtype:
        return element_bytes(r.reduce_dtype)
    return whole_width(r)


def adds_in_place(r: Resolved) -> bool:
    """Return whether autograd adds a gradient to the one of the micro-batches before.

    FSDP2 takes a unit's away when it reduces them, or when it keeps them in another dtype.
    """
    if r.grad_accum == 1 or not r.placement.flat_buffers:
        return r.grad_accum > 1
    return r.accumulates_whole and reduce_width(r) == whole_width(r)


def _copied(model: ModelSpec, r: Resolved, width: int) -> Term:
    """Return the one gradient that is not in its bucket yet."""
    single = largest_trained(model, r)
    return Term(
        "gradients",
        single * width,
        "{0:,} elements of the largest x {1} B, until it is copied into its bucket",
        (single, width),
        "torch csrc/distributed/c10d/reducer.cpp: mark_variable_ready_dense",
    )


def _passing(model: ModelSpec, r: Resolved, width: int) -> Term:
    """Return gradients on their way to the host: what is reduced at once.

    FSDP: one unit's shard. DeepSpeed: one gradient beside its bucket, which is communication's.
    """
    if r.placement.offload.by == "fsdp":
        unit = max(layer.parameters for layer in model.layers)
        unit = unit if r.method is Method.FULL else trained_parameters(model, r)
        size = -(-unit * width // r.placement.gradient_shards)
        return Term("gradients", size, "{0:,} B of one unit, on the way to the host", (size,), FSDP)
    single = largest_trained(model, r)
    return Term(
        "gradients",
        single * width,
        "largest of {0:,} elements x {1} B, the others in the bucket or on the host",
        (single, width),
        "DeepSpeed stage3.py: IPGBucketZ3; stage_1_and_2.py: temp_grad_buffer_for_gpu_offload",
    )


FSDP = "torch.distributed.fsdp _flat_param.py: the sharded gradient is copied into _cpu_grad"


def largest_trained(model: ModelSpec, r: Resolved) -> int:
    """Return elements of the largest tensor with a gradient."""
    if r.method is not Method.FULL:
        return adapters(model, r).largest
    modules = [*model.embeddings, *model.final, *(m for each in model.layers for m in each.modules)]
    if model.head is not None:
        modules.append(model.head)
    return max((prod(shape) for module in modules for shape in module.shapes), default=0)


def _largest(model: ModelSpec, r: Resolved, width: int) -> Term:
    """Return the gradients that live at once when every parameter is stepped in the backward."""
    layer = max(layer.parameters for layer in model.layers)
    count = max(layer, model.vocab * model.hidden)
    return Term(
        "gradients",
        -(-count * width // r.placement.gradient_shards),
        "{0:,} parameters of the largest layer or matrix x {1} B: stepped in the backward",
        (count, width),
        "torchtune optimizer_in_bwd: a hook steps and frees each gradient",
    )
