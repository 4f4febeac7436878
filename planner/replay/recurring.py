"""A stack of layers that repeats itself on the allocator: what would be played again is left out.

Where a layer leaves nothing but its output, the free blocks after it and the place of that output are all
that the next layer meets. Once they are what they were before, all that follows was played already.
"""

from collections.abc import Sequence

from planner.allocator.pool import Chunk
from planner.models.spec import LayerSpec
from planner.replay.player import Player

State = tuple[object, ...]


class Recurring:
    """Where one pass through `order` stands; layers from `until` on leave more than their output."""

    def __init__(self, order: Sequence[LayerSpec], player: Player, until: int) -> None:
        self.order = order
        self.player = player
        self.until = until
        self.seen: dict[State, int] = {}
        """The states of the free blocks, and after which layer each was there."""

    def after(self, index: int, out: Chunk) -> int:
        """Return the next layer to play once `index` is; those between change nothing."""
        following = index + 1
        if following >= self.until:
            return following
        free = self.player.device.free_state()
        if free is None:
            return following
        state = (*free, out.address, out.size)
        before = self.seen.setdefault(state, index)
        period = index - before
        if period:
            again = self.order[before + 1 : following]
            while (
                following + period <= self.until
                and self.order[following : following + period] == again
            ):
                following += period
        return following
