"""What a snapshot says: the peak in its history, who owned it, and how fragmented the pool is."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from profiler.recording import Recording
from profiler.recording_parts import LiveTensor, PhaseRecord
from profiler.snapshot import ROUND_BYTES, Block, Snapshot, Stack
from profiler.snapshot_terms import BEFORE, Owner, owner_of, weight_sizes_of

TOP = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBlock:
    """A block in use at the moment looked at."""

    address: int
    bytes: int
    stack: Stack
    owner: Owner


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragmentation:
    """Where reserved memory is that no tensor uses. Bytes of the moment of the dump."""

    reserved_bytes: int
    allocated_bytes: int
    rounding_bytes: int | None
    """Given less requested; None where the format does not carry requests."""
    free_bytes: int
    """In segments, in no block in use."""
    split_bytes: int
    """Free pieces of segments that are partly in use: they cannot go back to the driver."""
    releasable_bytes: int
    """Whole free segments: empty_cache() gives them back."""
    largest_free_bytes: int
    free_blocks: int
    private_bytes: int
    """Reserved by CUDA graphs and pools of the user's: of no use to anybody else."""
    expandable: bool


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The answer of `profile snapshot`."""

    snapshot: Snapshot
    peak_bytes: int
    """Most allocated at any moment that the history covers, or at the dump."""
    at_peak: tuple[LiveBlock, ...]
    from_history: bool
    """False: no history was recorded, the moment of the dump is all there is."""
    fragmentation: Fragmentation

    def terms_bytes(self) -> dict[str, int]:
        """Return bytes by term at the peak, largest first."""
        terms: dict[str, int] = defaultdict(int)
        for block in self.at_peak:
            terms[block.owner.term] += block.bytes
        return dict(sorted(terms.items(), key=lambda item: -item[1]))

    def places_bytes(self) -> dict[str, int]:
        """Return bytes by the line of code that stands for them, largest first."""
        places: dict[str, int] = defaultdict(int)
        for block in self.at_peak:
            places[block.owner.where] += block.bytes
        return dict(sorted(places.items(), key=lambda item: -item[1]))


def analyse(snapshot: Snapshot, *, vocab: int | None = None) -> Analysis:
    """Return the peak, its owners and the fragmentation of a snapshot."""
    peak_bytes, alive = _peak(snapshot)
    with_history = any(event.action == "alloc" for event in snapshot.events)
    gradients = weight_sizes_of((stack, size) for _, size, stack, _ in alive)
    if with_history:
        gradients += Counter(size for _, size, stack, stays in alive if stays and not stack)
    blocks = []
    for address, size, stack, stays in sorted(alive, key=lambda item: -item[1]):
        if with_history and stays and not stack:
            owner = BEFORE
        else:
            owner = owner_of(stack, size, gradients=gradients, long_lived=stays, vocab=vocab)
        blocks.append(LiveBlock(address=address, bytes=size, stack=stack, owner=owner))
    return Analysis(
        snapshot=snapshot,
        peak_bytes=peak_bytes,
        at_peak=tuple(blocks),
        from_history=with_history,
        fragmentation=fragmentation(snapshot),
    )


def fragmentation(snapshot: Snapshot) -> Fragmentation:
    """Return where the reserved memory of `snapshot` is."""
    free: list[int] = []
    split = releasable = private = 0
    rounding: int | None = 0
    for segment in snapshot.segments:
        used = [block for block in segment.blocks if block.active]
        # an old snapshot lists no free pieces: what no block covers is free
        gap = segment.bytes - sum(block.bytes for block in segment.blocks)
        pieces = [block.bytes for block in segment.blocks if not block.active]
        pieces += [gap] if gap > 0 else []
        free += pieces
        if used:
            split += sum(pieces)
        else:
            releasable += segment.bytes
        private += segment.bytes if segment.private_pool else 0
        for block in used:
            if rounding is not None:
                known = block.requested_bytes
                rounding = None if known is None else rounding + max(0, block.bytes - known)
    return Fragmentation(
        reserved_bytes=snapshot.reserved_bytes,
        allocated_bytes=snapshot.allocated_bytes,
        rounding_bytes=rounding,
        free_bytes=sum(free),
        split_bytes=split,
        releasable_bytes=releasable,
        largest_free_bytes=max(free, default=0),
        free_blocks=len(free),
        private_bytes=private,
        expandable=any(segment.expandable for segment in snapshot.segments),
    )


Alive = list[tuple[int, int, Stack, bool]]
"""(address, bytes, stack, still in use at the dump) of every block in use."""


def _peak(snapshot: Snapshot) -> tuple[int, Alive]:
    """Walk the history backwards from the dump: its end is known, its start may be cut off."""
    live: dict[int, Block] = {block.address: block for block in snapshot.active_blocks()}
    sizes = {address: rounded(block.bytes) for address, block in live.items()}
    total = best = sum(sizes.values())
    best_index = len(snapshot.events)
    for index in range(len(snapshot.events) - 1, -1, -1):
        event = snapshot.events[index]
        if event.action == "alloc":
            total -= sizes.pop(event.address, 0)
        elif event.action == "free_completed" and event.address not in sizes:
            sizes[event.address] = rounded(event.bytes)
            total += sizes[event.address]
            if total > best:
                best, best_index = total, index
    return best, _alive_at(snapshot, best_index, live)


def _alive_at(snapshot: Snapshot, moment: int, final: dict[int, Block]) -> Alive:
    """Return what was in use just before event number `moment`."""
    alive: dict[int, tuple[int, Stack]] = {
        address: (rounded(block.bytes), block.stack) for address, block in final.items()
    }
    events = snapshot.events
    gone: set[int] = set()
    for index in range(len(events) - 1, moment - 1, -1):
        event = events[index]
        if event.action == "alloc":
            alive.pop(event.address, None)
        elif event.action == "free_completed":
            alive.setdefault(event.address, (rounded(event.bytes), ()))
            gone.add(event.address)
    # a block that died later carries the stack of the event that allocated it
    wanted = {address for address, (_, stack) in alive.items() if not stack}
    for index in range(moment - 1, -1, -1):
        if not wanted:
            break
        event = events[index]
        if event.action == "alloc" and event.address in wanted:
            wanted.discard(event.address)
            alive[event.address] = (alive[event.address][0], event.stack)
    return [(address, size, stack, address not in gone) for address, (size, stack) in alive.items()]


def blocks_before_history(snapshot: Snapshot) -> list[tuple[int, int]]:
    """Return (address, bytes) of what was in use when the history began."""
    final = {block.address: block for block in snapshot.active_blocks()}
    return [(address, size) for address, size, _, _ in _alive_at(snapshot, 0, final)]


def rounded(num_bytes: int) -> int:
    """Return what the allocator counts for a request."""
    return max(ROUND_BYTES, -(-num_bytes // ROUND_BYTES) * ROUND_BYTES)


def to_recording(analysis: Analysis, *, subject: str) -> Recording:
    """Return the snapshot as a Recording, so that reports and `compare` can read it."""
    modules = dict(list(analysis.places_bytes().items())[:TOP])
    notes = [] if analysis.from_history else ["no allocation history: the moment of the dump only"]
    return Recording(
        source="snapshot",
        subject=subject,
        environment={
            "format": analysis.snapshot.format,
            "device": analysis.snapshot.device,
            "gpu": f"cuda:{analysis.snapshot.device}",
            "allocator_settings": analysis.snapshot.settings,
        },
        phases=(
            PhaseRecord(
                name="peak",
                peak_bytes=analysis.peak_bytes,
                terms_bytes=analysis.terms_bytes(),
                modules_bytes=modules,
                reserved_bytes=analysis.snapshot.reserved_bytes,
            ),
        ),
        peak_bytes=analysis.peak_bytes,
        peak_phase="peak",
        peak_reserved_bytes=analysis.snapshot.reserved_bytes,
        largest=tuple(
            LiveTensor(
                bytes=block.bytes,
                shape=(),
                dtype="",
                term=block.owner.term,
                module=block.owner.where,
                op="",
                phase="",
            )
            for block in analysis.at_peak[:TOP]
        ),
        partial=not analysis.from_history,
        notes=tuple(notes),
    )
