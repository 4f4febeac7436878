"""FSDP2's units, allocation by allocation, each from the pool of the stream that asks.

torch 2.13, distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives}.py: flat buffers of
all-gathers are the copy-in stream's, reduced gradients the reduce-scatter stream's; gathered parameters,
one block each, and the reduce-scatter's input are the computing stream's. No block serves another stream.
"""

from dataclasses import dataclass, field

from planner.allocator.pool import Chunk
from planner.dtypes import element_bytes
from planner.models.spec import LayerSpec, ModelSpec
from planner.replay.player import Player
from planner.replay.units import GATHER, REDUCE, Units
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.counts import rest_width
from planner.terms.gradients import gradient_width, reduce_width
from planner.terms.shards import (
    FOUR_BIT,
    adapter_shard,
    layer_shard,
    packed_model,
    root_shard,
    tensor_shards,
    unit_tensors,
)
from planner.terms.weights import trained_width


@dataclass(slots=True)
class Fsdp2Units(Units):
    """The units of one micro-batch."""

    again: bool = False
    """Gradients of an earlier micro-batch are there."""
    held: list[list[Chunk]] = field(default_factory=list)
    """Whole gradients that no reduction has taken yet, a list a unit, as the backward made them."""
    whole: list[list[Chunk]] = field(default_factory=list)
    """Gathered layers, the running one last."""
    base: list[Chunk] = field(default_factory=list)
    """The gathered root unit."""
    buffer: Chunk | None = None
    """Through which the unit before was gathered, until this one is copied out; or what is asked for ahead."""
    below: int = 0
    """Layers before the next one to be gathered."""

    def start(self) -> None:
        """Gather the root unit."""
        self.base = self._copied_out(self._sizes(None))

    def before(self, layer: LayerSpec, *, backward: bool) -> None:
        """Gather a layer; in the backward ask for the next one too."""
        if not backward:
            self.below += 1
            self._reshard()
            self.whole.append(self._copied_out(self._sizes(layer)))
            return
        self.below -= 1
        if self._stays:
            return
        flat = self.buffer if self.buffer is not None else self._flat(self._sizes(layer))
        self.whole.append(self.player.take_all(self._sizes(layer)))
        self.player.give(flat)
        self.buffer = self._ahead()

    def forward_done(self) -> None:
        """Divide the last layer again."""
        self._reshard()

    def backward_starts(self) -> None:
        """Ask for the last layer, which the root does before the loss is differentiated."""
        self.player.give(self.buffer)
        self.buffer = None if self._stays else self._ahead()

    def after_backward(self, layer: LayerSpec, made: list[Chunk], grads: list[Chunk]) -> None:
        """Divide the layer again and reduce its gradients."""
        if self.whole:
            self.player.give(*self.whole.pop())
        ranks = self.r.placement.gradient_shards
        if self.full:
            count = layer_shard(layer, ranks)
        else:
            count = adapter_shard(self.model, self.r, ranks) // self.model.num_layers
        self._reduced(count, made, grads)

    def finish(self, outside: list[Chunk], grads: list[Chunk]) -> None:
        """Reduce the root's gradients and give every gathered unit back."""
        if self.full and outside:
            self._reduced(root_shard(self.model, self.r.placement.gradient_shards), outside, grads)
        elif not self.full:
            grads.extend(outside)
        self.player.give(*self.flat, *self.base, self.buffer)
        for each in self.whole:
            self.player.give(*each)
        self.flat.clear()
        self.whole.clear()
        self.base, self.buffer = [], None

    @property
    def _stays(self) -> bool:
        """Layers are whole from their forward to their backward."""
        return self.r.placement.keeps_over == 1

    def _reshard(self) -> None:
        if self.whole and not self._stays:
            self.player.give(*self.whole.pop())

    def _ahead(self) -> Chunk | None:
        if not self.below:
            return None
        index = self.model.layer_order[self.below - 1]
        return self._flat(self._sizes(self.model.layers[index]))

    def _sizes(self, layer: LayerSpec | None) -> tuple[int, ...]:
        return unit_tensors(self.model, self.r, layer)

    def _flat(self, sizes: tuple[int, ...]) -> Chunk | None:
        shards, total = self.r.placement.weight_shards, sum(sizes)
        if shards == 1:  # replicas alone: parameters are copied one by one
            return None
        narrow = self.full and trained_width(self.r) > element_bytes(self.r.compute_dtype)
        cast = self.player.take(-(-total // shards), GATHER) if narrow else None
        flat = self.player.take(total, GATHER)
        self.player.give(cast)
        return flat

    def _copied_out(self, sizes: tuple[int, ...]) -> list[Chunk]:
        flat = self._flat(sizes)
        made = self.player.take_all(sizes)
        self.player.give(self.buffer)
        self.buffer = flat
        return made

    def _reduced(self, count: int, made: list[Chunk], grads: list[Chunk]) -> None:
        """Send gradients of `count` elements a rank, padding included."""
        if self.r.accumulates_whole and not self.again:
            self.held.append(list(made))
            return
        player, sent, kept = self.player, reduce_width(self.r), gradient_width(self.r)
        player.give(*self.flat)
        flat = player.take(count * sent * self.r.placement.gradient_shards)
        self.flat = [flat] if flat is not None else []
        player.give(*made, *(self.held.pop(0) if self.held else ()))
        reduced = player.take(count * sent, REDUCE)
        if kept != sent:
            cast = player.take(count * kept, REDUCE)
            player.give(reduced)
            reduced = cast
        there = self.r.placement.offload.gradients or (self.again and not self.r.accumulates_whole)
        if there:  # on the host, or added to the first micro-batch's
            player.give(reduced)
        elif reduced is not None:
            grads.append(reduced)


def load_shards(model: ModelSpec, r: Resolved, player: Player) -> None:
    """Make this rank's part of every tensor of the base."""
    if r.placement.offload.weights:
        return
    width = trained_width(r) if r.method is Method.FULL else rest_width(r)
    for size, count in tensor_shards(model, r, width, r.placement.weight_shards):
        player.take_all([size] * count)
    if r.quantization in FOUR_BIT:
        player.take(packed_model(model, r, r.placement.weight_shards).constants)
