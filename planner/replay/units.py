"""Sharded units: what FSDP and ZeRO-3 gather before a layer, and reduce after it.

torch/distributed/fsdp (FSDP1): flat parameters are gathered on a stream of their own; the rate
limiter lets two gathers wait in the forward, and the backward's prefetch adds a third; a flat
gradient is freed when its reduce-scatter has run, one layer later.
"""

from dataclasses import dataclass, field

from planner.allocator.pool import Chunk
from planner.dtypes import element_bytes
from planner.models.spec import LayerSpec, ModelSpec
from planner.replay.player import Player
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.gradients import gradient_width
from planner.terms.weights import gathered, trained_width

GATHER, REDUCE, CAST = 1, 2, 3
"""Streams: blocks of one never serve another."""
FORWARD_UNITS, BACKWARD_UNITS = 2, 3
"""Units gathered at once: _FreeEventQueue's two, and one that the backward prefetches."""


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
