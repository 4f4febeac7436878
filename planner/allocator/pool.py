"""Blocks, segments and the pools of the simulated caching allocator."""

from bisect import bisect_left, insort

from planner.units import MiB

MIN_BLOCK = 512
SMALL_SIZE = 1 * MiB
SMALL_BUFFER = 2 * MiB
LARGE_BUFFER = 20 * MiB
MIN_LARGE_ALLOC = 10 * MiB
ROUND_LARGE = 2 * MiB
SHIFT = 50
"""Free blocks are listed as one number, size and address together; addresses have this many bits."""


class Chunk:
    """One block of a segment, linked to its neighbours in address order."""

    __slots__ = ("address", "after", "before", "free", "freed_at", "mapped", "pool", "size")

    def __init__(self, size: int, address: int, pool: "Pool", *, mapped: bool = True) -> None:
        self.size = size
        self.address = address
        self.pool = pool
        self.free = True
        self.mapped = mapped
        """False: a hole of an expandable range that was given back to the device."""
        self.freed_at = 0
        self.before: Chunk | None = None
        self.after: Chunk | None = None

    @property
    def whole(self) -> bool:
        """The block is a whole segment."""
        return self.before is None and self.after is None

    @property
    def key(self) -> int:
        """Its place among free blocks: by size, then by address."""
        return self.size << SHIFT | self.address


class Pool:
    """Free blocks by size, and the memory taken from the device for them."""

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.expandable = expandable
        self.page = SMALL_BUFFER if small else LARGE_BUFFER
        self.least_rest = MIN_BLOCK if small or expandable else SMALL_SIZE + 1
        """A rest of at least this is split off."""
        self.least_segment = SMALL_BUFFER if small else MIN_LARGE_ALLOC
        self.reserved_bytes = 0
        self.segments = 0
        self.keys: list[int] = []
        self.chunks: dict[int, Chunk] = {}
        """The free blocks by their key."""
        self._next_address = 0
        self._first: Chunk | None = None
        self._last: Chunk | None = None

    @property
    def free_chunks(self) -> list[Chunk]:
        """Free blocks, smallest first."""
        return [self.chunks[key] for key in self.keys]

    @property
    def idle_bytes(self) -> int:
        """Segments that are free as a whole; no segment is smaller than `least_segment`."""
        first = bisect_left(self.keys, self.least_segment << SHIFT)
        return sum(chunk.size for key in self.keys[first:] if (chunk := self.chunks[key]).whole)

    def best_fit(self, size: int) -> Chunk | None:
        """Return the smallest free block of at least `size` bytes, the lowest of equals."""
        index = bisect_left(self.keys, size << SHIFT)
        return self.chunks[self.keys[index]] if index < len(self.keys) else None

    def take(self, chunk: Chunk) -> Chunk:
        """Remove a free block from the list."""
        key = chunk.size << SHIFT | chunk.address
        del self.keys[bisect_left(self.keys, key)]
        del self.chunks[key]
        return chunk

    def new_segment(self, size: int) -> Chunk:
        """Take a segment from the device; the caller uses or splits it."""
        self.reserved_bytes += size
        self.segments += 1
        chunk = Chunk(size, self._next_address, self)
        self._next_address += size
        return chunk

    def split(self, chunk: Chunk, size: int) -> None:
        """Cut `chunk` to `size`; the rest becomes a free block after it."""
        rest = Chunk(chunk.size - size, chunk.address + size, self)
        rest.freed_at = chunk.freed_at
        chunk.size = size
        after = chunk.after
        rest.before, rest.after = chunk, after
        if after is not None:
            after.before = rest
        chunk.after = rest
        if self._last is chunk:
            self._last = rest
        self._list(rest)

    def give_back(self, chunk: Chunk) -> None:
        """Mark a block free, merge it with free neighbours and list it."""
        near = chunk.before
        if near is not None and near.free and near.mapped:
            self._absorb_before(chunk, self.take(near))
        near = chunk.after
        if near is not None and near.free and near.mapped:
            self._absorb_after(chunk, self.take(near))
        chunk.free = True
        key = chunk.size << SHIFT | chunk.address
        insort(self.keys, key)
        self.chunks[key] = chunk

    def release(self) -> int:
        """Return unused segments (expandable: unused pages) to the device."""
        return self._unmap() if self.expandable else self._drop(self.free_chunks)

    def release_at_least(self, size: int, *, floor: int) -> int:
        """Return one oversized segment of at least `size`, or the largest ones until it is enough."""
        whole = [chunk for chunk in self.free_chunks if chunk.whole]
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
        freed = 0
        while freed < excess:
            idle = [chunk for chunk in self.free_chunks if chunk.whole]
            if not idle:
                break
            average = sum(now - chunk.freed_at for chunk in idle) / len(idle)
            for chunk in idle:
                if freed < excess and now - chunk.freed_at >= average:
                    freed += self._drop([chunk])
        return freed

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
        for chunk in self.free_chunks:
            start = -(-chunk.address // self.page) * self.page
            end = (chunk.address + chunk.size) // self.page * self.page
            if end <= start:
                continue
            self.take(chunk)
            if start > chunk.address:
                self.split(chunk, start - chunk.address)
                self._list(chunk)
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

    def _list(self, chunk: Chunk) -> None:
        key = chunk.size << SHIFT | chunk.address
        insort(self.keys, key)
        self.chunks[key] = chunk

    def _link(self, chunk: Chunk, new: Chunk) -> None:
        new.before, new.after = chunk, chunk.after
        if chunk.after is not None:
            chunk.after.before = new
        chunk.after = new
        if self._last is chunk:
            self._last = new

    def _absorb_before(self, chunk: Chunk, other: Chunk) -> None:
        chunk.address = other.address
        chunk.size += other.size
        chunk.before = other.before
        if other.before is not None:
            other.before.after = chunk
        if self._first is other:
            self._first = chunk

    def _absorb_after(self, chunk: Chunk, other: Chunk) -> None:
        chunk.size += other.size
        chunk.after = other.after
        if other.after is not None:
            other.after.before = chunk
        if self._last is other:
            self._last = chunk
