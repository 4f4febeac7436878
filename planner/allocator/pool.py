"""Blocks, segments and the two pools of the simulated caching allocator."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count
from typing import Optional

from planner.units import MiB

MIN_BLOCK = 512
SMALL_SIZE = 1 * MiB
SMALL_BUFFER = 2 * MiB
LARGE_BUFFER = 20 * MiB
MIN_LARGE_ALLOC = 10 * MiB
ROUND_LARGE = 2 * MiB


@dataclass(slots=True, eq=False)
class Chunk:
    """One block of a segment, linked to its neighbours in address order."""

    size: int
    address: int
    pool: "Pool"
    free: bool = True
    mapped: bool = True
    """False: a hole of an expandable range that was given back to the device."""
    freed_at: int = 0
    before: Optional["Chunk"] = None
    after: Optional["Chunk"] = None

    @property
    def whole(self) -> bool:
        """The block is a whole segment."""
        return self.before is None and self.after is None


class Pool:
    """Free blocks by size, and the memory taken from the device for them."""

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.expandable = expandable
        self.page = SMALL_BUFFER if small else LARGE_BUFFER
        self.reserved_bytes = 0
        self.segments = 0
        self._free: list[tuple[int, int, Chunk]] = []
        self._addresses = count(0, 2**44)
        self._first: Chunk | None = None
        self._last: Chunk | None = None

    def best_fit(self, size: int) -> Chunk | None:
        """Return the smallest free block of at least `size` bytes, the lowest of equals."""
        index = bisect_left(self._free, (size, -1))
        return self._free[index][2] if index < len(self._free) else None

    def take(self, chunk: Chunk) -> Chunk:
        """Remove a free block from the list."""
        del self._free[bisect_left(self._free, (chunk.size, chunk.address))]
        return chunk

    def new_segment(self, size: int) -> Chunk:
        """Take a segment from the device; the caller uses or splits it."""
        self.reserved_bytes += size
        self.segments += 1
        return Chunk(size, next(self._addresses), self)

    def split(self, chunk: Chunk, size: int) -> None:
        """Cut `chunk` to `size`; the rest becomes a free block after it."""
        rest = Chunk(chunk.size - size, chunk.address + size, self)
        rest.freed_at = chunk.freed_at
        chunk.size = size
        self._link(chunk, rest)
        self._insert(rest)

    def give_back(self, chunk: Chunk) -> None:
        """Mark a block free, merge it with free neighbours and list it."""
        chunk.free = True
        for neighbour in (chunk.before, chunk.after):
            if neighbour is not None and neighbour.free and neighbour.mapped:
                self.take(neighbour)
                self._merge(chunk, neighbour)
        self._insert(chunk)

    def release(self) -> int:
        """Return unused segments (expandable: unused pages) to the device."""
        return self._unmap() if self.expandable else self._drop([c for _, _, c in self._free])

    def release_at_least(self, size: int, *, floor: int) -> int:
        """Return one oversized segment of at least `size`, or the largest ones until it is enough."""
        whole = [chunk for _, _, chunk in self._free if chunk.whole]
        for chunk in whole:
            if chunk.size >= size:
                return self._drop([chunk])
        chosen: list[Chunk] = []
        total = 0
        for chunk in reversed(whole):
            if chunk.size < floor or total >= size:
                break
            chosen.append(chunk)
            total += chunk.size
        return self._drop(chosen) if total >= size else 0

    def collect(self, excess: int, *, now: int) -> int:
        """Return segments that were idle longer than average until `excess` bytes are back."""
        wanted = excess
        while excess > 0:
            idle = [chunk for _, _, chunk in self._free if chunk.whole]
            if not idle:
                break
            average = sum(now - chunk.freed_at for chunk in idle) / len(idle)
            old = [chunk for chunk in idle if now - chunk.freed_at >= average]
            for chunk in old:
                if excess <= 0:
                    break
                excess -= self._drop([chunk])
        return wanted - excess

    def expand(self, size: int, room: int | None) -> Chunk | None:
        """Map pages so that `size` bytes are free in one piece; None when `room` is not enough."""
        spot = self._hole(size)
        head = spot if spot is not None else self._last
        have = 0
        if spot is None and head is not None and head.free and head.mapped:
            have = head.size
        elif spot is not None:
            return self._fill(spot, size, room)
        pages = -(-(size - have) // self.page) * self.page
        if room is not None and pages > room:
            return None
        self.reserved_bytes += pages
        self.segments = 1
        if have and head is not None:
            self.take(head)
            head.size += pages
            return head
        address = head.address + head.size if head is not None else 0
        grown = Chunk(pages, address, self)
        if head is not None:
            self._link(head, grown)
        else:
            self._first = self._last = grown
        return grown

    def _hole(self, size: int) -> Chunk | None:
        """Return an unmapped hole that is large enough, lowest address first."""
        chunk = self._first
        while chunk is not None:
            if not chunk.mapped and chunk.size >= size:
                return chunk
            chunk = chunk.after
        return None

    def _fill(self, hole: Chunk, size: int, room: int | None) -> Chunk | None:
        pages = min(hole.size, -(-size // self.page) * self.page)
        if room is not None and pages > room:
            return None
        self.reserved_bytes += pages
        if pages < hole.size:
            rest = Chunk(hole.size - pages, hole.address + pages, self, mapped=False)
            hole.size = pages
            self._link(hole, rest)
        hole.mapped = True
        return hole

    def _unmap(self) -> int:
        freed = 0
        for _, _, chunk in list(self._free):
            start = -(-chunk.address // self.page) * self.page
            end = (chunk.address + chunk.size) // self.page * self.page
            if end <= start:
                continue
            self.take(chunk)
            if start > chunk.address:
                self.split(chunk, start - chunk.address)
                self._insert(chunk)
                chunk = chunk.after  # type: ignore[assignment]
                self.take(chunk)
            if chunk.address + chunk.size > end:
                self.split(chunk, end - chunk.address)
            chunk.mapped = False
            freed += chunk.size
        self.reserved_bytes -= freed
        return freed

    def _drop(self, chunks: list[Chunk]) -> int:
        freed = 0
        for chunk in chunks:
            if chunk.whole:
                self.take(chunk)
                freed += chunk.size
                self.segments -= 1
        self.reserved_bytes -= freed
        return freed

    def _insert(self, chunk: Chunk) -> None:
        insort(self._free, (chunk.size, chunk.address, chunk), key=lambda item: item[:2])

    def _link(self, chunk: Chunk, new: Chunk) -> None:
        new.before, new.after = chunk, chunk.after
        if chunk.after is not None:
            chunk.after.before = new
        chunk.after = new
        if self._last is chunk:
            self._last = new

    def _merge(self, chunk: Chunk, other: Chunk) -> None:
        """Absorb a neighbour into `chunk`."""
        if other is chunk.before:
            chunk.address = other.address
            chunk.before = other.before
            if other.before is not None:
                other.before.after = chunk
            if self._first is other:
                self._first = chunk
        else:
            chunk.after = other.after
            if other.after is not None:
                other.after.before = chunk
            if self._last is other:
                self._last = chunk
        chunk.size += other.size
