"""CUDA's caching allocator, simulated: what torch reserves for a sequence of allocations and frees.

Rules and constants as in c10/cuda/CUDACachingAllocator.cpp of torch 2.13; one device.

* Requests round up to 512 bytes, or to a fraction of a power of two (roundup_power2_divisions).
* Up to 1 MiB: the small pool, in 2 MiB segments. Larger: the large pool, in 20 MiB segments below
  10 MiB, else a segment of its own rounded to 2 MiB.
* Best fit: the smallest free block that is large enough. It is split when the rest is at least 512
  bytes (small pool) or more than 1 MiB (large pool); `max_split_size` keeps large blocks whole.
* A free block merges with free neighbours of its segment.
* When the device is full: cached segments are given back first, then the request fails.
* Expandable segments: one growing range a pool, mapped in 2 MiB or 20 MiB pages, always split.
"""

import re
import sys
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from planner.allocator.pool import (
    LARGE_BUFFER,
    MIN_BLOCK,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SHIFT,
    SMALL_BUFFER,
    SMALL_SIZE,
    Chunk,
    Pool,
)
from planner.errors import UsageError
from planner.units import KiB, MiB

NO_LIMIT = sys.maxsize
INTERVALS = 16
"""Powers of two from 1 MiB on that can have divisions of their own (kRoundUpPowerOfTwoIntervals)."""


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """What PYTORCH_CUDA_ALLOC_CONF sets."""

    max_split_size_bytes: int = NO_LIMIT
    roundup_power2_divisions: int = 0
    interval_divisions: tuple[int, ...] = ()
    """The same for sizes from 1 MiB, 2 MiB, 4 MiB ... on, smaller ones as the first; empty: one for all."""
    garbage_collection_threshold: float = 0.0
    """Works in torch only with a memory limit (set_per_process_memory_fraction), so does it here:
    it needs a capacity."""
    expandable_segments: bool = False

    @classmethod
    def parse(cls, text: str) -> "AllocatorConfig":
        """Return the config of a PYTORCH_CUDA_ALLOC_CONF string; raises UsageError."""
        values: dict[str, object] = {}
        pieces = re.split(r",(?![^\[]*\])", text)  # not inside a list's brackets
        for part in filter(None, (piece.strip() for piece in pieces)):
            name, _, value = part.partition(":")
            try:
                values |= _read_option(name.strip(), value.strip())
            except (ValueError, KeyError) as error:
                raise UsageError(
                    f"PYTORCH_CUDA_ALLOC_CONF: {part[:60]!r} cannot be read",
                    hint="max_split_size_mb:N, roundup_power2_divisions:N or [64:8,>:4], "
                    "garbage_collection_threshold:0.8, expandable_segments:True",
                ) from error
        return cls(**values)  # type: ignore[arg-type]


def _read_option(name: str, value: str) -> dict[str, object]:
    if name == "max_split_size_mb":
        size = int(value)
        if size * MiB < LARGE_BUFFER:
            raise ValueError("torch refuses less than 20")
        return {"max_split_size_bytes": size * MiB}
    if name == "roundup_power2_divisions" and value.startswith("["):
        return {"interval_divisions": read_intervals(value)}
    if name == "roundup_power2_divisions":
        divisions = int(value)
        if divisions < 1 or divisions & (divisions - 1):
            raise ValueError("a power of two")
        return {"roundup_power2_divisions": divisions}
    if name == "garbage_collection_threshold":
        share = float(value)
        if not 0 < share < 1:
            raise ValueError("between 0 and 1")
        return {"garbage_collection_threshold": share}
    if name == "expandable_segments":
        return {"expandable_segments": {"true": True, "false": False}[value.lower()]}
    if name in ("backend", "pinned_use_cuda_host_register", "max_non_split_rounding_mb"):
        return {}
    raise ValueError(name)


def read_intervals(text: str) -> tuple[int, ...]:
    """Return the divisions of each interval, none for no text, as torch's parseRoundUpPower2Divisions fills them in.

    What lies below the first one named has its divisions, what lies between two that are named none; ">"
    is the last one named and all above it.
    """
    if not text:
        return ()
    found = [0] * INTERVALS
    last, first = 0, True
    for entry in text.removeprefix("[").removesuffix("]").split(","):
        name, _, value = (part.strip() for part in entry.partition(":"))
        divisions = int(value)
        if divisions < 0 or divisions & (divisions - 1):
            raise ValueError("a power of two, or 0")
        if name == ">":
            found[last:] = [divisions] * (INTERVALS - last)
            continue
        size = int(name)
        if size < 1 or size & (size - 1):
            raise ValueError("a power of two")
        last = min(size.bit_length(), INTERVALS) - 1
        if first:
            found[:last] = [divisions] * last
        found[last], first = divisions, False
    return tuple(found)


class Event(Protocol):
    """One allocation or free of a recorded run (profiler.recording.Event is one)."""

    @property
    def kind(self) -> str:
        """ "alloc" or "free"."""

    @property
    def block(self) -> int:
        """Which block; a free names the block of its allocation."""

    @property
    def bytes(self) -> int:
        """As requested."""

    @property
    def op(self) -> str:
        """The operation that asked."""

    @property
    def module(self) -> str:
        """The module it ran in."""

    @property
    def phase(self) -> str:
        """The phase of the step."""

    @property
    def stream(self) -> int:
        """Whose pool it is from: 0 = the stream that computes."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The allocation that did not fit."""

    bytes: int
    op: str
    module: str
    phase: str
    event: int
    """Index in the event list."""
    message: str
    """What the user would read."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the allocator did with the events."""

    peak_allocated_bytes: int
    """torch.cuda.max_memory_allocated: blocks handed out, their unsplit rest included."""
    peak_reserved_bytes: int
    """torch.cuda.max_memory_reserved."""
    reserved_at_peak_bytes: int
    """Reserved when allocated was at its peak."""
    segments: int
    failure: Failure | None = None

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak that was not allocated at the allocated peak."""
        if not self.peak_reserved_bytes:
            return 0.0
        return 1 - self.peak_allocated_bytes / self.peak_reserved_bytes


class CachingAllocator:
    """One device's allocator. `capacity_bytes` is what the device has left for it."""

    def __init__(
        self, config: AllocatorConfig | None = None, *, capacity_bytes: int | None = None
    ) -> None:
        self.config = config or AllocatorConfig()
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = 0
        """Bytes taken from the device."""
        self.peak_reserved_bytes = self.reserved_at_peak_bytes = 0
        self.needed_bytes = 0
        """The least capacity with which all of it would have succeeded, unused segments given back."""
        self.requests = 0
        self.pools: dict[tuple[int, bool], Pool] = {}
        """By stream and size class: a block serves only the stream that allocated it."""
        self._first = (self.pool(0, small=False), self.pool(0, small=True))
        self._spare: list[Chunk] = []
        """Objects of blocks that were merged into others, to be used again."""
        self._plain = not self.config.expandable_segments and (
            self.config.max_split_size_bytes == NO_LIMIT
        )
        self._rounds = (
            self.config.roundup_power2_divisions > 1
            or max(self.config.interval_divisions, default=0) > 1
        )

    def pool(self, stream: int, *, small: bool) -> Pool:
        """Return the pool of a stream."""
        key = (stream, small)
        if key not in self.pools:
            self.pools[key] = Pool(small=small, expandable=self.config.expandable_segments)
        return self.pools[key]

    @property
    def segments(self) -> int:
        """Segments held now."""
        return sum(pool.segments for pool in self.pools.values())

    def round_size(self, size: int) -> int:
        """Return the block size for a request of `size` bytes."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.config.roundup_power2_divisions
        if self.config.interval_divisions:
            place = size.bit_length() - MiB.bit_length()
            divisions = self.config.interval_divisions[min(max(0, place), INTERVALS - 1)]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return _next_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def malloc(self, size: int, stream: int = 0) -> Chunk | None:
        """Return a block, or None when the device is full even after the cache was given back."""
        size = self.round_size(size) if self._rounds else (size + 511 & -512) or MIN_BLOCK
        small = size <= SMALL_SIZE
        pool = self.pool(stream, small=small) if stream else self._first[small]
        self.requests += 1
        chunk: Chunk | None
        if self._plain:
            keys = pool.keys
            index = bisect_left(keys, size << SHIFT)
            if index < len(keys):
                chunk = pool.chunks.pop(keys.pop(index))
            else:
                chunk = self._grow(pool, size)
        else:
            chunk = self._find(pool, size) or self._grow(pool, size)
        if chunk is None:
            return None
        if chunk.size - size >= pool.least_rest and (
            pool.small or pool.expandable or size < self.config.max_split_size_bytes
        ):
            pool.split(chunk, size)
        chunk.free = False
        self.allocated_bytes += chunk.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
            self.reserved_at_peak_bytes = self.reserved_bytes
        return chunk

    def free_state(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the free blocks, sizes and addresses together: with the same ones and the same blocks handed
        out, the same requests are answered alike. None where more than that decides."""
        if not self._plain or self.config.garbage_collection_threshold:
            return None
        return tuple(tuple(pool.keys) for pool in self.pools.values())

    def free(self, chunk: Chunk) -> None:
        """Give a block back to the cache, merged with its free neighbours."""
        self.allocated_bytes -= chunk.size
        chunk.freed_at = self.requests
        chunk.pool.give_back(chunk)

    def play(self, events: Iterable[tuple[int, int]], blocks: dict[int, Chunk]) -> int:
        """Play (block, bytes) in order, 0 bytes frees; return the bytes that did not fit, or 0.

        `blocks` are those that the events may free, and what they allocate is added. The same rules as
        malloc and free, in one loop where nothing but the free blocks decides: a replay is made of this.
        """
        if not self._plain or self._rounds:
            return self._play_one_by_one(events, blocks)
        pools, spare = self._first, self._spare
        allocated, highest = self.allocated_bytes, self.peak_allocated_bytes
        for block, size in events:
            if size:
                size = size + 511 & -512
                pool = pools[size <= SMALL_SIZE]
                keys, chunks = pool.keys, pool.chunks
                place = bisect_left(keys, size << SHIFT)
                if place < len(keys):
                    chunk = chunks.pop(keys.pop(place))
                else:
                    grown = self._grow(pool, size)
                    if grown is None:
                        self.allocated_bytes, self.peak_allocated_bytes = allocated, highest
                        return size
                    chunk = grown
                rest = chunk.size - size
                if rest >= pool.least_rest:
                    address = chunk.address + size
                    if spare:
                        part = spare.pop()
                        part.size, part.address, part.pool, part.free = rest, address, pool, True
                    else:
                        part = Chunk(rest, address, pool)
                    chunk.size = size
                    after = chunk.after
                    part.before, part.after = chunk, after
                    chunk.after = part
                    if after is not None:
                        after.before = part
                    key = rest << SHIFT | address
                    insort(keys, key)
                    chunks[key] = part
                    allocated += size
                else:
                    allocated += size + rest
                chunk.free = False
                if allocated > highest:
                    highest = allocated
                    self.reserved_at_peak_bytes = self.reserved_bytes
                blocks[block] = chunk
                continue
            chunk = blocks.pop(block)
            keys, chunks = chunk.pool.keys, chunk.pool.chunks
            size, address = chunk.size, chunk.address
            allocated -= size
            near = chunk.before
            if near is not None and near.free:
                key = near.size << SHIFT | near.address
                del keys[bisect_left(keys, key)], chunks[key]
                address = chunk.address = near.address
                size += near.size
                before = chunk.before = near.before
                if before is not None:
                    before.after = chunk
                spare.append(near)
            near = chunk.after
            if near is not None and near.free:
                key = near.size << SHIFT | near.address
                del keys[bisect_left(keys, key)], chunks[key]
                size += near.size
                after = chunk.after = near.after
                if after is not None:
                    after.before = chunk
                spare.append(near)
            chunk.size = size
            chunk.free = True
            key = size << SHIFT | address
            insort(keys, key)
            chunks[key] = chunk
        self.allocated_bytes, self.peak_allocated_bytes = allocated, highest
        return 0

    def _play_one_by_one(self, events: Iterable[tuple[int, int]], blocks: dict[int, Chunk]) -> int:
        for block, size in events:
            if size:
                chunk = self.malloc(size)
                if chunk is None:
                    return size
                blocks[block] = chunk
            else:
                self.free(blocks.pop(block))
        return 0

    def empty_cache(self) -> int:
        """Return every unused segment to the device; the bytes freed."""
        freed = sum(pool.release() for pool in self.pools.values())
        self.reserved_bytes -= freed
        return freed

    def _find(self, pool: Pool, size: int) -> Chunk | None:
        chunk = pool.best_fit(size)
        limit = self.config.max_split_size_bytes
        if chunk is None or pool.expandable:
            return pool.take(chunk) if chunk is not None else None
        if size < limit <= chunk.size:
            return None
        if size >= limit and chunk.size >= size + LARGE_BUFFER:
            return None
        return pool.take(chunk)

    def _grow(self, pool: Pool, size: int) -> Chunk | None:
        self._collect_garbage()
        chunk = self._map(pool, size)
        if chunk is None and self._release_oversized(pool, size):
            chunk = self._map(pool, size)
        if chunk is None and self.empty_cache():
            chunk = self._map(pool, size)
        return chunk

    def _map(self, pool: Pool, size: int) -> Chunk | None:
        room = None if self.capacity_bytes is None else self.capacity_bytes - self.reserved_bytes
        before = pool.reserved_bytes
        if pool.expandable:
            chunk = pool.expand(size, room)
        else:
            wanted = allocation_size(size)
            chunk = None if room is not None and wanted > room else pool.new_segment(wanted)
        self.reserved_bytes += pool.reserved_bytes - before
        self._note_need()
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return chunk

    def _note_need(self) -> None:
        """Remember the most that could not have been given back: reserved less idle segments."""
        if self.reserved_bytes <= self.needed_bytes:
            return
        idle = sum(pool.idle_bytes for pool in self.pools.values())
        self.needed_bytes = max(self.needed_bytes, self.reserved_bytes - idle)

    def _release_oversized(self, pool: Pool, size: int) -> int:
        """Give back whole oversized blocks, enough for `size` (release_available_cached_blocks)."""
        limit = self.config.max_split_size_bytes
        if limit == NO_LIMIT:
            return 0
        freed = pool.release_at_least(max(size, limit), floor=limit)
        self.reserved_bytes -= freed
        return freed

    def _collect_garbage(self) -> None:
        share = self.config.garbage_collection_threshold
        if not share or self.capacity_bytes is None:
            return
        excess = self.reserved_bytes - int(share * self.capacity_bytes)
        for pool in self.pools.values():
            if excess > 0 and not pool.small:
                freed = pool.collect(excess, now=self.requests)
                excess -= freed
                self.reserved_bytes -= freed


def allocation_size(size: int) -> int:
    """Return the segment size that a block of `size` bytes is cut from."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def _next_division(size: int, divisions: int) -> int:
    """Round up to the next of `divisions` steps between two powers of two; size > MIN_BLOCK * divisions."""
    floor = 1 << (size.bit_length() - 1)
    if floor == size:
        return size
    step = floor // divisions
    return -(-size // step) * step


def replay(
    events: Iterable[Event],
    *,
    config: AllocatorConfig | None = None,
    capacity_bytes: int | None = None,
    context_bytes: int = 0,
) -> Replay:
    """Return what the allocator reserves for `events`, and where it would run out.

    `capacity_bytes` is the whole device; `context_bytes` of it belong to the CUDA context.
    """
    room = None if capacity_bytes is None else capacity_bytes - context_bytes
    allocator = CachingAllocator(config, capacity_bytes=room)
    held: dict[int, Chunk] = {}
    failure = None
    for index, event in enumerate(events):
        if event.kind == "free":
            chunk = held.pop(event.block, None)
            if chunk is not None:
                allocator.free(chunk)
            continue
        chunk = allocator.malloc(event.bytes, event.stream)
        if chunk is None:
            failure = Failure(
                bytes=event.bytes,
                op=event.op,
                module=event.module,
                phase=event.phase,
                event=index,
                message=out_of_memory(
                    allocator, event.bytes, total=capacity_bytes or 0, context=context_bytes
                ),
            )
            break
        held[event.block] = chunk
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        reserved_at_peak_bytes=allocator.reserved_at_peak_bytes,
        segments=allocator.segments,
        failure=failure,
    )


def out_of_memory(allocator: CachingAllocator, size: int, *, total: int, context: int) -> str:
    """Return torch's message for a failed request of `size` bytes."""
    used = allocator.reserved_bytes + context
    idle = allocator.reserved_bytes - allocator.allocated_bytes
    return (
        f"CUDA out of memory. Tried to allocate {format_size(allocator.round_size(size))}. "
        f"GPU 0 has a total capacity of {format_size(total)} of which "
        f"{format_size(max(0, total - used))} is free. Including non-PyTorch memory, this process "
        f"has {format_size(used)} memory in use. Of the allocated memory "
        f"{format_size(allocator.allocated_bytes)} is allocated by PyTorch, and {format_size(idle)} "
        "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def format_size(size: int) -> str:
    """Return a size as torch prints it in its message."""
    if size <= KiB:
        return f"{size} bytes"
    for unit, name in ((KiB, "KiB"), (MiB, "MiB")):
        if size <= unit * KiB:
            return f"{size / unit:.2f} {name}"
    return f"{size / (MiB * KiB):.2f} GiB"
