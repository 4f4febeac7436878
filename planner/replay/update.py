"""The optimizer's step: states at the first one, temporaries at each, gradients freed after it."""

from itertools import chain

from planner.allocator.pool import Chunk
from planner.replay.player import Player
from planner.replay.tensors import Trained
from planner.run.resolved import Resolved
from planner.terms.counts import BLOCK_8BIT, SMALL_TENSOR
from planner.terms.optimizer import state_width
from planner.terms.optimizer_kinds import KINDS
from planner.terms.step_scratch import states_away


class Update:
    """The optimizer of one run."""

    def __init__(
        self,
        r: Resolved,
        trained: list[Trained],
        player: Player,
        factored: list[int],
        copies: tuple[int, ...] | None = None,
        bundle: int = 0,
    ) -> None:
        self.r = r
        self.copies = copies
        """Blocks that DeepSpeed's step makes; None where it is not at work."""
        self.bundle = bundle
        """Bytes of what is stepped at once, where a step goes bundle by bundle."""
        self.factored = factored
        """Elements of Adafactor's statistics; empty for another optimizer."""
        self.trained = trained
        self.player = player
        self.started = False
        self.kind = KINDS[r.optimizer]

    def step(self, grads: list[Chunk]) -> None:
        """Play one step; the gradients are freed after it (zero_grad sets them to None)."""
        here = not states_away(self.r)
        if here and not self.started:
            self._start()
        if self.bundle:
            self.player.passing(self.bundle)
        elif here and self.copies is not None:
            self.player.passing(*self.copies)
        elif here and self.kind.square_roots:
            self.player.passing(
                *(each.elements * state_width(self.r, each.width) for each in self.trained)
            )
        self.started = True
        self.player.give(*grads)

    def _start(self) -> None:
        kinds = {(each.elements, each.width) for each in self.trained}
        states = {kind: self._states(*kind) for kind in kinds}
        sizes = [states[each.elements, each.width] for each in self.trained]
        self.player.take_all(chain(*sizes, (4 * size for size in self.factored)))

    def _states(self, size: int, width: int) -> list[int]:
        """Return the blocks of one tensor's states, by its elements and their bytes."""
        count = self.kind.states
        if self.kind.eight_bit and size >= SMALL_TENSOR:
            sizes = [size, -(-size // BLOCK_8BIT) * 4] * count
        elif self.kind.eight_bit:
            sizes = [4 * size] * count
        else:
            sizes = [size * state_width(self.r, width)] * count
        return [size * 4, *sizes] if self.r.master_weights and width < 4 else sizes
