"""DeepSpeed's blocks: stage 3's window, the buckets of a backward and this rank's part of the gradients.

The window is played as one block from the forward's start to the backward's end: it fills up at once.
"""

from dataclasses import dataclass, field

from planner.allocator.pool import Chunk
from planner.models.spec import LayerSpec, ModelSpec
from planner.replay.fsdp2 import Fsdp2Units
from planner.replay.player import Player
from planner.replay.tensors import Trained
from planner.replay.units import GATHER, REDUCE, Units
from planner.run.resolved import Resolved
from planner.terms.gradients import gradients
from planner.terms.weights import gathered, trained_width
from planner.terms.window import flat_group
from planner.terms.zero import (
    passing_buckets,
    standing_bucket,
    standing_gradients,
    step_copies,
)


@dataclass(slots=True)
class ZeroUnits(Units):
    """What DeepSpeed gathers and reduces in one micro-batch."""

    buckets: list[Chunk] = field(default_factory=list)
    begun: bool = False
    """This micro-batch has given its first gradient to a bucket."""

    def start(self) -> None:
        """Fill the window, through the flat buffer of a group."""
        if not self.gathers:
            return
        self.root = self.player.take(gathered(self.model, self.r, 0).bytes, GATHER)
        self.player.give(self.player.take(flat_group(self.model, self.r), GATHER))

    def before(self, layer: LayerSpec, *, backward: bool) -> None:
        """Nothing: the window has it."""

    def after_backward(self, layer: LayerSpec, made: list[Chunk], grads: list[Chunk]) -> None:
        """Give a layer's gradients to the buckets and, from stage 2 on, free them."""
        self._to_owner(made, grads)

    def finish(self, outside: list[Chunk], grads: list[Chunk]) -> None:
        """Reduce what is left and free buckets and window."""
        self._to_owner(outside, grads)
        self.player.give(*self.buckets, self.root)
        self.buckets.clear()
        self.root = None

    def _to_owner(self, made: list[Chunk], grads: list[Chunk]) -> None:
        zero = self.r.placement.zero
        assert zero is not None
        if not zero.partitions_gradients:  # reduced after the last micro-batch
            grads.extend(made)
            return
        if not self.begun:
            self.begun = True
            self.buckets.extend(self._some(passing_buckets(self.model, self.r)))
            whole = gradients(self.model, self.r)
            counted = standing_gradients(self.r, whole).bytes or self.r.placement.offload.gradients
            if not counted:
                grads.extend(self._some(whole.bytes))
        self.player.give(*made)

    def _some(self, size: int) -> list[Chunk]:
        chunk = self.player.take(size, REDUCE)
        return [] if chunk is None else [chunk]


def load_zero(model: ModelSpec, r: Resolved, player: Player) -> None:
    """Make what DeepSpeed keeps from the start."""
    player.take(standing_bucket(model, r).bytes)
    player.take(standing_gradients(r, gradients(model, r)).bytes)


def reduce_at_the_end(model: ModelSpec, r: Resolved, player: Player, grads: list[Chunk]) -> None:
    """Reduce stage 1's whole gradients into this rank's part, and give them back."""
    zero = r.placement.zero
    if zero is None or zero.partitions_gradients or r.placement.offload.gradients:
        return
    bucket = player.take(passing_buckets(model, r), REDUCE)
    part = player.take(-(-gradients(model, r).bytes // r.placement.state_shards), REDUCE)
    player.give(bucket, *grads)
    grads[:] = [] if part is None else [part]


def flat_groups(model: ModelSpec, r: Resolved) -> list[Trained]:
    """Return the flat tensors that are stepped one after another."""
    left = -(-model.parameters // r.placement.state_shards)
    at_once = step_copies(model, r, square_roots=False)[1]
    groups = []
    while left > 0:
        groups.append(Trained(min(at_once, left), trained_width(r)))
        left -= at_once
    return groups


def step_sizes(model: ModelSpec, r: Resolved, *, square_roots: bool) -> tuple[int, ...]:
    """Return the blocks of one sub-group's step: fp32 gradients, and what they are made of or the roots."""
    size, at_once = step_copies(model, r, square_roots=square_roots)
    wide = 4 * at_once
    return wide, size - wide


def units_of(model: ModelSpec, r: Resolved, player: Player) -> Units:
    """Return the units of a run's engine."""
    if r.placement.flat_buffers:
        return Fsdp2Units(model, r, player)
    return (Units if r.placement.zero is None else ZeroUnits)(model, r, player)
