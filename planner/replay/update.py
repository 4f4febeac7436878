"""The optimizer's step: states at the first one, temporaries at each, gradients freed after it."""

from planner.allocator.pool import Chunk
from planner.dtypes import element_bytes
from planner.replay.player import Player
from planner.run.recipe import Method
from planner.run.resolve import Resolved
from planner.terms.counts import SMALL_TENSOR
from planner.terms.optimizer import BLOCK_8BIT
from planner.terms.optimizer_kinds import KINDS
from planner.terms.weights import trained_width


class Update:
    """The optimizer of one run."""

    def __init__(self, r: Resolved, trained: list[int], player: Player) -> None:
        self.r = r
        self.trained = trained
        self.player = player
        self.started = False
        self.kind = KINDS[r.optimizer]
        width = trained_width(r) if r.method is Method.FULL else element_bytes(r.adapter_dtype)
        self.master = 4 if r.master_weights and width < 4 else 0
        self.state_width = 4 if self.master or r.switches.fp32_optimizer_state else width

    def step(self, grads: list[Chunk]) -> None:
        """Play one step; the gradients are freed after it (zero_grad sets them to None)."""
        if not (self.r.placement.offload.states or self.kind.paged):
            if not self.started:
                self._start()
            if self.kind.square_roots and not self.r.switches.step_scratch_bytes:
                self.player.passing(*(size * self.state_width for size in self.trained))
            elif self.r.switches.step_scratch_bytes:
                most = max((12 * size for size in self.trained), default=0)
                self.player.passing(min(most, self.r.switches.step_scratch_bytes))
        self.started = True
        self.player.give(*grads)

    def _start(self) -> None:
        for size in self.trained:
            self.player.take_all(self._states(size))

    def _states(self, size: int) -> list[int]:
        count = self.kind.states
        if self.kind.eight_bit and size >= SMALL_TENSOR:
            sizes = [size, -(-size // BLOCK_8BIT) * 4] * count
        elif self.kind.eight_bit:
            sizes = [4 * size] * count
        else:
            sizes = [size * self.state_width] * count
        return [size * 4, *sizes] if self.master else sizes
