"""Plays allocations, one by one or a layer at a time, on the simulated allocator."""

from collections.abc import Iterable
from functools import lru_cache

from planner.allocator.caching import AllocatorConfig, CachingAllocator
from planner.allocator.pool import Chunk
from planner.layer.events import LayerEvents
from planner.layer.tape import FREED

Blocks = dict[int, Chunk]
"""Blocks that events left, by their number."""


class DeviceFullError(Exception):
    """The device cannot hold a request even after the cache was given back."""


class Player:
    """One device while a run goes on."""

    def __init__(self, config: AllocatorConfig | None = None, capacity_bytes: int | None = None):
        self.device = CachingAllocator(config, capacity_bytes=capacity_bytes)

    def block(self, size: int) -> Chunk:
        """Allocate `size` bytes, one at least."""
        chunk = self.take(max(1, size))
        assert chunk is not None
        return chunk

    def take(self, size: int, stream: int = 0) -> Chunk | None:
        """Allocate `size` bytes; None for none."""
        if size <= 0:
            return None
        chunk = self.device.malloc(size, stream)
        if chunk is None:
            raise DeviceFullError(size)
        return chunk

    def take_all(self, sizes: Iterable[int]) -> list[Chunk]:
        """Allocate one block after the other; none for none."""
        blocks: Blocks = {}
        self._play([(number, size) for number, size in enumerate(sizes) if size > 0], blocks)
        return list(blocks.values())

    def give(self, *chunks: Chunk | None) -> None:
        """Free blocks."""
        for chunk in chunks:
            if chunk is not None:
                self.device.free(chunk)

    def passing(self, *sizes: int) -> None:
        """Allocate blocks, then free them in the same order."""
        self.give(*self.take_all(sizes))

    def stay(self, tensors: Iterable[tuple[tuple[int, ...], int]]) -> None:
        """Allocate, one tensor after the other, blocks that stay, and beside them one that goes again."""
        events, number = [], 0
        for blocks, passing in tensors:
            if passing:
                events.append((0, passing))
            events += [(number := number + 1, size) for size in blocks if size > 0]
            if passing:
                events.append((0, 0))
        self._play(events, {})

    def play(self, layer: LayerEvents, tokens: int, blocks: Blocks) -> Blocks:
        """Play a layer's events; `blocks` are those they may free. Returns what is left."""
        self._play(sized(layer, tokens), blocks)
        return blocks

    def _play(self, events: Iterable[tuple[int, int]], blocks: Blocks) -> None:
        failed = self.device.play(events, blocks)
        if failed:
            raise DeviceFullError(failed)


@lru_cache(maxsize=4096)
def sized(layer: LayerEvents, tokens: int) -> tuple[tuple[int, int], ...]:
    """Return a layer's events at `tokens` tokens as (block, bytes); 0 bytes frees."""
    found, empty = [], set()
    for block, per_token, constant in layer.events:
        if per_token == FREED:
            if block not in empty:
                found.append((block, 0))
            continue
        size = int(per_token * tokens) + constant
        if size > 0:
            found.append((block, size))
        else:
            empty.add(block)
    return tuple(found)
