"""Where a backward is largest: gradients that exist by then, flat buffers, activations, towers."""

from dataclasses import replace
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.activations import Activations
from planner.terms.adapters import trains_embedding, trains_head, trains_tied
from planner.terms.communication import PASSING, Buffers, term
from planner.terms.embedding import backward_blocks
from planner.terms.gradients import adds_in_place, gradient_width, reduce_width, whole_width
from planner.terms.logits import head_gradient_width
from planner.terms.running import running_term
from planner.terms.term import Term
from planner.terms.vision import Vision
from planner.terms.weights import RESHARD, flat_units, gathered, kept_between
from planner.terms.zero import waiting_gradients


def backward(
    model: ModelSpec,
    r: Resolved,
    acts: Activations,
    grads: Term,
    held: Term,
    flat: Buffers,
    seen: Vision,
) -> tuple[Term, ...]:
    """Return gradients, flat buffers, activations and the towers' share where the backward is largest.

    With accumulation all gradients exist; without, they appear from the last layer to the first.
    The order is the forward's, reversed: the text, the towers, the embedding.
    """
    whole = r.accumulates_whole
    most = held.bytes if whole else grads.bytes
    # whole ones that wait for the last micro-batch are added to in place if they have the same dtype
    waiting = 0 if whole and reduce_width(r) == whole_width(r) else flat.root_gradients
    by_zero = waiting_gradients(model, r, gradient_width(r), grads.bytes)
    moments: list[_Moment] = []
    for moment in acts.backward:
        running, left = moment.layer_grads, moment.layers_left
        done = _earlier_grads(model, r, grads.bytes, left)
        if whole:  # reduced layer by layer, in the last micro-batch
            done += most - _earlier_grads(model, r, most, left)
        stands = r.switches.gradient_buffers or (r.grad_accum > 1 and not whole)
        alive = running + (most if stands else done)
        if not (flat.reduced or r.switches.gradient_buffers):
            # a unit's whole gradients are beside the shards, else among them
            alive = min(alive, most)
        alive = by_zero[0] if by_zero is not None else alive + waiting
        flown = flat.in_backward(left, model.num_layers)
        stays = kept_between(model, r, max(0, left - 1)).bytes
        moments.append(_Moment(alive, moment.activations, flown, seen.backward, stays))
        # the next layer down meets the first reduction, the second one has most shards made
        lower = {left - 1, 2} if flat.reduced and left == model.num_layers else set()
        for down in (each for each in lower if 0 < each < left):
            shard = 0 if stands else _earlier_grads(model, r, grads.bytes, down)
            shard -= _earlier_grads(model, r, most, down) if whole else 0
            kept = moment.activations - acts.kept * (left - down) // left
            stays = kept_between(model, r, down - 1).bytes
            flown = flat.in_backward(down, left)
            moments.append(_Moment(alive + shard, kept, flown, seen.backward, stays))
    for own in seen.own:
        alive = min(_text_grads(model, r, grads.bytes) + own.grads, grads.bytes)
        moments.append(_Moment(alive, 0, flat.gather, replace(seen.backward, bytes=own.bytes)))
    total = grads.bytes if by_zero is None else by_zero[1]
    made, beside = _embedding_moment(model, r, total)
    if r.placement.flat_buffers and r.method is Method.FULL:
        flown = flat.in_backward(0, model.num_layers)
        # no layer is whole any more
        moments.append(_Moment(made, beside, flown, seen.after, 0, whole="root"))
        # then the root unit's are reduced, its weights divided again: a tied embedding's two are one by then
        reduced = total + _root_whole(model, r)
        moments.append(_Moment(reduced, 0, flat.end, seen.after, 0, whole=""))
        moments.append(_Moment(total + flat.held, 0, flat.end + flat.sums, seen.after, whole=""))
    else:
        moments.append(_Moment(made, beside, flat.end, seen.after))
    units = {
        "layer": gathered(model, r, r.placement.gathered_layers),
        "root": gathered(model, r, 0),
        "": Term("weights", 0),
    }
    sizes = [each.total + units[each.whole].bytes for each in moments]
    largest = moments[sizes.index(max(sizes))]
    template = "{0:,} B that exist by then, of {1:,} B at the step"
    return (
        units[largest.whole],
        Term("gradients", largest.grads, template, (largest.grads, grads.bytes), grads.source),
        term(r, largest.flown, PASSING),
        running_term("backward", largest.activations, acts),
        largest.seen,
        Term(
            "weights",
            largest.staying,
            "layers that stayed from the forward {0:,} B",
            (largest.staying,),
            RESHARD,
        ),
    )


class _Moment(NamedTuple):
    """What is alive at one moment of the backward."""

    grads: int
    activations: int
    flown: int
    """Flat buffers."""
    seen: Term
    """The towers' share."""
    staying: int = 0
    """Of layers whose backward is still to come."""
    whole: str = "layer"
    """What is gathered: the running layer beside the root unit, the root alone, or nothing."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.grads + self.activations + self.flown + self.seen.bytes + self.staying


def _text_grads(model: ModelSpec, r: Resolved, total: int) -> int:
    """Return the gradients that exist when the text's layers are done, its embedding's apart."""
    if r.grad_accum > 1 or r.method is not Method.FULL:
        return total
    later = sum(module.parameters for module in model.towers)
    if not model.tied:
        later += sum(module.parameters for module in model.embeddings)
    return total * (model.parameters - later) // max(1, model.parameters)


def _earlier_grads(model: ModelSpec, r: Resolved, total: int, layers_left: int) -> int:
    """Return gradients that exist before a layer runs backward, `layers_left` still to come."""
    done = model.num_layers - layers_left
    if r.method is not Method.FULL:
        head, embedding = _outside_grads(model, r)
        return head + (total - head - embedding) * done // model.num_layers
    above = 0
    if not r.placement.flat_buffers:  # there the root unit is reduced last
        above = sum(module.parameters for module in model.final)
        above += model.head.parameters if model.head is not None else 0
    above += sum(model.layers[index].parameters for index in model.layer_order[layers_left:])
    return min(total, total * above // max(1, model.parameters))


def _outside_grads(model: ModelSpec, r: Resolved) -> tuple[int, int]:
    """Return gradients of a head and an embedding that modules_to_save trains: first and last ones."""
    shards, one = r.placement.gradient_shards, model.vocab * model.hidden * head_gradient_width(r)
    head = one // shards if trains_head(model, r) else 0
    own = trains_embedding(model, r) and not trains_tied(model, r)
    return head, one // shards if own else 0


def _embedding_moment(model: ModelSpec, r: Resolved, total: int) -> tuple[int, int]:
    """Return gradients and activations while a trained embedding gets its gradient."""
    if not trains_embedding(model, r) or not model.embeddings:
        return 0, 0
    scratch = sum(backward_blocks(r.tokens, model.vocab, model.hidden))
    grads = total
    if r.switches.gradient_buffers:  # made whole, then added to the buffer
        own = sum(module.parameters for module in model.embeddings) * element_bytes(r.dtype)
        return grads + own, _embedded(model, r) + scratch
    zero = r.placement.zero
    if zero is not None and zero.partitions_gradients:  # whole, on its way to its owner
        grads += model.vocab * model.hidden * head_gradient_width(r)
    if r.placement.flat_buffers and r.method is Method.FULL:  # the root unit's are reduced last
        grads += _root_whole(model, r)
    if trains_tied(model, r):
        # the embedding's gradient comes on top of the head's; that one is a view when a linear made
        # it, and then torch adds them into a third buffer
        copies = 2 if r.law.kind == "full" and r.law.chunk_count < 2 else 1
        grads += copies * model.vocab * model.hidden * head_gradient_width(r)
    elif r.columns and not r.cached:
        # another text's gradient of the embedding is there when this one's is made
        grads += model.vocab * model.hidden * head_gradient_width(r)
    # a tied head of ours adds into the gradient itself; FSDP1's flat gradients are added up at once
    straight = trains_tied(model, r) and r.law.kind == "tiled"
    flat = r.placement.gathers and not r.placement.flat_buffers
    if adds_in_place(r) and zero is None and not (straight or flat):
        # made beside the one of the micro-batches before, to which it is added
        grads += model.vocab * model.hidden * head_gradient_width(r)
    return grads, _embedded(model, r) + scratch


def _root_whole(model: ModelSpec, r: Resolved) -> int:
    """Return what the root unit's whole gradients are more than its shard of them, if that is not there yet."""
    root = flat_units(model)[0]
    width = reduce_width(r) if r.accumulates_whole else whole_width(r)
    if r.grad_accum > 1 and not r.accumulates_whole:
        return root * width
    return root * width - root * gradient_width(r) // r.placement.gradient_shards


def _embedded(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of the embeddings' output, or of its gradient."""
    return r.tokens * model.hidden * element_bytes(r.dtype)
