"""Sharded units: what FSDP and ZeRO-3 gather before a layer, and reduce after it.

torch/distributed/fsdp (FSDP1): flat parameters are gathered on a stream of their own; the rate
limiter lets two gathers wait in the forward, and the backward's prefetch adds a third; a flat
gradient is freed when its reduce-scatter has run, one layer later. Before all that, wrapping a unit joins
its tensors and cuts them (_init_utils.py, _init_param_handle_from_module).
"""

from dataclasses import dataclass, field
from itertools import chain

from planner.allocator.pool import Chunk
from planner.dtypes import element_bytes
from planner.models.spec import LayerSpec, ModelSpec
from planner.replay.player import Player
from planner.replay.tensors import Loaded, by_unit
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.gradients import gradient_width
from planner.terms.loading import FULL, SHARDED
from planner.terms.weights import gathered, trained_width
from planner.units import MiB

GATHER, REDUCE, CAST = 1, 2, 3
"""Streams: blocks of one never serve another."""
FORWARD_UNITS, BACKWARD_UNITS = 2, 3
"""Units gathered at once: _FreeEventQueue's two, and one that the backward prefetches."""
BROADCAST_BUCKET, BROADCASTS = 250 * MiB, 2
"""sync_module_states: PARAM_BROADCAST_BUCKET_SIZE, and the buckets on their way at once
(torch/csrc/distributed/c10d/comm.cpp, broadcast_coalesced)."""


@dataclass(slots=True)
class Units:
    """The gathered units of one rank."""

    model: ModelSpec
    r: Resolved
    player: Player
    waiting: list[Chunk] = field(default_factory=list)
    """Gathered layers, oldest first."""
    flat: list[Chunk] = field(default_factory=list)
    """Gradients whose reduction may still run."""
    root: Chunk | None = None

    @property
    def full(self) -> bool:
        """All weights are trained."""
        return self.r.method is Method.FULL

    @property
    def gathers(self) -> bool:
        """Weights are sharded too; ZeRO-2 only reduces gradients to their owner."""
        return self.r.placement.gathers

    def start(self) -> None:
        """Gather the root unit: embeddings, final norm and head, until the backward ends."""
        if not self.gathers:
            return
        size = gathered(self.model, self.r, 0).bytes
        self._cast(size)
        self.root = self.player.take(size, GATHER)

    def before(self, layer: LayerSpec, *, backward: bool) -> None:
        """Gather a layer."""
        if not self.gathers:
            return
        most = BACKWARD_UNITS if backward else FORWARD_UNITS
        while len(self.waiting) >= most:
            self.player.give(self.waiting.pop(0))
        size = self._bytes(layer)
        self._cast(size)
        chunk = self.player.take(size, GATHER)
        if chunk is not None:
            self.waiting.append(chunk)

    def forward_done(self) -> None:
        """The last layer has run forward."""

    def backward_starts(self) -> None:
        """The loss is about to be differentiated."""

    def after_backward(self, layer: LayerSpec, made: list[Chunk], grads: list[Chunk]) -> None:
        """Reduce a layer's gradients: one flat copy, then this rank's shard."""
        if not self.full:
            grads.extend(made)
            return
        self._reduce(layer.parameters * self._width, layer.parameters, made, grads)

    def finish(self, outside: list[Chunk], grads: list[Chunk]) -> None:
        """Reduce the root's gradients and give every gathered unit back."""
        if self.full and outside:
            inside = sum(layer.count * layer.parameters for layer in self.model.layers)
            parameters = self.model.parameters - inside
            self._reduce(parameters * self._width, parameters, outside, grads)
        elif not self.full:
            grads.extend(outside)
        self.player.give(*self.flat, *self.waiting, self.root)
        self.flat.clear()
        self.waiting.clear()
        self.root = None

    def _reduce(self, size: int, parameters: int, made: list[Chunk], grads: list[Chunk]) -> None:
        flat = self.player.take(size)
        self.player.give(*made, *self.flat)
        self.flat = [flat] if flat is not None else []
        shard = -(-size // self.r.placement.gradient_shards)
        reduced = self.player.take(shard, REDUCE)
        wide = -(-parameters * gradient_width(self.r) // self.r.placement.gradient_shards)
        if wide != shard:
            cast = self.player.take(wide, REDUCE)
            self.player.give(reduced)
            reduced = cast
        if reduced is not None and self.r.placement.offload.gradients:
            self.player.give(reduced)  # its copy is on the host
        elif reduced is not None:
            grads.append(reduced)

    @property
    def _width(self) -> int:
        return min(element_bytes(self.r.compute_dtype), trained_width(self.r))

    def _cast(self, size: int) -> None:
        """Cast the fp32 shard to the dtype that is gathered."""
        if self.full and trained_width(self.r) > element_bytes(self.r.compute_dtype):
            self.player.give(self.player.take(-(-size // self.r.placement.weight_shards), CAST))

    def _bytes(self, layer: LayerSpec) -> int:
        whole = gathered(self.model, self.r, 1).bytes - gathered(self.model, self.r, 0).bytes
        largest = max(each.parameters for each in self.model.layers)
        return whole * layer.parameters // largest


def wrap_units(model: ModelSpec, r: Resolved, player: Player) -> None:
    """Wrap every layer in FSDP1, the root last, until each rank has its part of every unit.

    A unit's tensors come to the GPU one by one and rank 0's are broadcast; then they are joined, the
    joined one is cut and freed, and they go after it. accelerate makes the parts of trained weights fp32
    when all units are wrapped.
    """
    here, units = r.placement, by_unit(model, r)
    _quantise(units, player)
    whole = here.loads_whole or r.loads == FULL
    there = [player.take_all(each.blocks[0] for each in unit) for unit in units if whole]
    parts: list[tuple[int, Chunk]] = []
    for number in (*range(1, len(units)), 0):
        sizes = [each.blocks[0] for each in units[number]]
        tensors = there[number] if whole else player.take_all(sizes)
        if not whole and r.loads != SHARDED:
            _broadcast(sizes, player)
        joined = player.take(sum(sizes))
        size = -(-sum(sizes) // here.weight_shards)
        part = player.block(size)
        player.give(joined, *tensors)
        if here.offload.weights:
            player.give(part)
        else:
            parts.append((size, part))
    wide, narrow = trained_width(r), element_bytes(r.dtype)
    if r.method is Method.FULL and wide > narrow:
        for size, part in (*parts[-1:], *parts[:-1]):
            player.take(size * wide // narrow)
            player.give(part)


def _quantise(units: list[list[Loaded]], player: Player) -> None:
    """Quantise every weight on the GPU: its codes go to the host until it is wrapped, its constants stay whole."""
    for each in chain.from_iterable(units):
        wide = player.take(each.passing)
        codes = player.take(each.blocks[0]) if each.passing else None
        player.take_all(each.blocks[1:])
        player.give(wide, codes)


def _broadcast(sizes: list[int], player: Player) -> None:
    """Send tensors in buckets; a tensor alone in one is sent as it is."""
    sent: list[Chunk | None] = []
    bucket: list[int] = []
    for place, size in enumerate(sizes):
        bucket.append(size)
        if sum(bucket) >= BROADCAST_BUCKET or place == len(sizes) - 1:
            if len(sent) == BROADCASTS:
                player.give(sent.pop(0))
            sent.append(player.take(sum(bucket)) if len(bucket) > 1 else None)
            bucket = []
    player.give(*sent)
