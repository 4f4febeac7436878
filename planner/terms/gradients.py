"""gradients: one per trained parameter, alive from backward to the step (always with accumulation)."""

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolve import Resolved
from planner.terms.adapters import trained_parameters
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
    shards, copies = r.placement.gradient_shards, r.placement.gradient_copies
    size = -(-count * width * copies // shards)
    return Term(
        "gradients",
        size,
        "{0:,} trained parameters x {1} B x {2} / {3} shard(s)",
        (count, width, copies, shards),
        "autograd: the parameter's dtype",
    )


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
