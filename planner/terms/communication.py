"""communication: DDP's and DeepSpeed's buckets, and the flat buffers of FSDP2 and ZeRO-3.

torch 2.13, distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives}.py: a unit's shards
arrive in one flat buffer, which is copied out into its parameters and stays until the next unit's
copy is done; the backward asks for the next unit's buffer before the running one's layer; gradients
leave through a flat input, alive until the next unit's reduction.
"""

from typing import NamedTuple

from planner.models.spec import ModelSpec
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.adapters import trained_groups
from planner.terms.gradients import gradient_width, reduce_width, whole_width
from planner.terms.shards import (
    adapter_shard,
    layer_shard,
    model_shard,
    outside_layers,
    root_shard,
)
from planner.terms.term import Term
from planner.terms.weights import gathered
from planner.terms.window import flat_group
from planner.terms.zero import REDUCTION, passing_buckets, standing_bucket

DDP = "torch 2.13 csrc/distributed/c10d/reducer.cpp: Bucket.gradients"
PASSING = "the next layer's, and gradients on their way"
SOURCE = "torch 2.13 distributed/fsdp/_fully_shard/_fsdp_collectives.py"


class Buffers(NamedTuple):
    """Bytes of the flat buffers by phase."""

    start: int
    """At the first layer's copy-out: the root's and the layer's."""
    forward: int
    loss: int
    gather: int
    """What the backward asked for ahead of the running layer."""
    reduced: int
    """A layer's gradients on their way."""
    end: int
    """When the layers are done; FSDP2: while the root unit's whole gradients are copied in."""
    root_gradients: int
    """The root unit's whole gradients that wait for the end of the backward, the embeddings' apart."""
    summed: int
    """All layers' shards in the dtype of their sum over replicas, where that is not the gradients'."""
    backward: int = 0
    """In all of the backward: DeepSpeed's buckets."""
    sums: int = 0
    """The root's reduced gradients beside their cast, or beside those that they are added to."""
    held: int = 0
    """The last whole gradient of a unit, which foreach_reduce's loop holds until it returns."""

    def in_backward(self, layers_left: int, layers: int) -> int:
        """Return the buffers while a layer runs backward with `layers_left` of `layers` to come."""
        done = layers - layers_left
        return (
            self.backward
            + (self.gather if layers_left > 1 else 0)
            + (self.reduced if done else 0)
            + self.summed * done // layers
        )


def buffers(model: ModelSpec, r: Resolved) -> Buffers:
    """Return the flat buffers of a run; zeros where units are not gathered through any."""
    if r.placement.zero is not None:
        group = flat_group(model, r)
        back = passing_buckets(model, r)
        return Buffers(0, group, group, group, 0, back, 0, 0, back)
    if not r.placement.flat_buffers:
        return Buffers(0, 0, 0, 0, 0, 0, 0, 0)
    root = gathered(model, r, 0).bytes
    unit = gathered(model, r, 1).bytes - root
    ranks = r.placement.gradient_shards
    if r.placement.weight_shards == 1:  # replicas alone: no flat buffer is between
        root = unit = 0
    # what stayed whole is not asked for again
    ahead = 0 if r.placement.keeps_over == 1 else unit
    if r.method is not Method.FULL:
        each = adapter_shard(model, r, ranks) * ranks // model.num_layers
        return Buffers(root + unit, unit, unit, ahead, each * reduce_width(r), 0, 0, 0)
    # in whole rows of every rank: a stack of 8 experts on 64 ranks travels as one of 64
    inside, outside = model_shard(model, ranks), root_shard(model, ranks)
    inside -= outside
    largest = max(layer_shard(layer, ranks) for layer in model.layers) * ranks
    waits = sum(module.parameters for module in model.final)
    if model.head is not None:
        waits += model.head.parameters
    wide, sent = whole_width(r), reduce_width(r)
    # the sum over replicas is held beside its cast until the backward ends: _fsdp_param_group.py,
    # _all_reduce_state
    held = sent if r.placement.replicas > 1 and sent != gradient_width(r) else 0
    summed = inside * held
    end = outside * sent * ranks + summed  # copied in, while the whole gradients are still there
    own = gradient_width(r)
    adds = r.grad_accum > 1 and not r.accumulates_whole
    sums = outside * (sent * (adds or sent != own) + own * (adds and sent != own))
    sums = sums if not r.placement.offload.gradients else outside * (sent + own * (sent != own))
    own_modules = outside_layers(model)  # none in the middle of a pipeline
    held = own_modules[-1].parameters * wide if own_modules and ranks > 1 else 0
    return Buffers(
        *(root + unit, unit, unit, ahead, largest * sent, end, waits * wide, summed),
        sums=sums,
        held=held,
    )


def buckets(model: ModelSpec, r: Resolved) -> Term:
    """Return the buckets that stay: DDP's, of 25 MiB, as large as all gradients together; ZeRO-3's one.

    They are made with the module and stay (torch 2.13, nn/parallel/distributed.py; csrc/distributed/c10d/
    reducer.cpp: initialize_buckets).
    """
    if r.placement.zero is not None:
        return standing_bucket(model, r)
    if not r.placement.buckets or r.switches.gradient_buffers:  # those are the gradients themselves
        return Term("communication", 0)
    full = gradient_width(r) if r.method is Method.FULL else 0
    size = sum(group.parameters * (full or group.width) for group in trained_groups(model, r))
    return Term("communication", size, "DDP's buckets {0:,} B, as the gradients", (size,), DDP)


def term(r: Resolved, size: int, what: str) -> Term:
    """Return the term of a phase; `what`: FSDP2's buffers."""
    here = r.placement
    if here.zero is not None:
        text = "{0:,} B for {1} ranks: " + (
            "what a prefetched group is copied out of" if here.window else "buckets"
        )
        text += ", and a bucket's copy on its way" if what == PASSING else ""
        return Term("communication", size, text, (size, here.state_shards), REDUCTION)
    return Term("communication", size, "flat buffers: " + what + " {0:,} B", (size,), SOURCE)
