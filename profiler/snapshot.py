"""torch memory snapshots (`torch.cuda.memory._dump_snapshot`): read, checked and made small.

Formats: torch 2.1 and newer (block frames, addresses, requested sizes); older ones, whose blocks
carry a `history` and no address; and what torch.profiler's memory profiles are converted to, which
has no real segments. Fields that a version does not have are None, never 0.
"""

import gc
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from profiler.safe_pickle import load_plain

MAX_FRAMES = 64
"""Innermost frames kept of a stack."""
ROUND_BYTES = 512
PROFILE = "torch.profiler"
ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack, innermost first in a stack."""

    file: str
    line: int
    name: str


Stack = tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of a segment: in use, or free for reuse."""

    address: int
    bytes: int
    """What the allocator gave, rounded up."""
    requested_bytes: int | None
    active: bool
    stack: Stack


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """What one cudaMalloc (or a growing expandable segment) gave."""

    device: int
    address: int
    bytes: int
    stream: int
    small: bool
    expandable: bool
    private_pool: bool
    """Belongs to CUDA graphs or a memory pool of the user's."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry of the allocator's history."""

    action: str
    """alloc, free_requested, free_completed, segment_alloc, segment_free, oom ..."""
    address: int
    bytes: int
    """As requested: the allocator rounds it up."""
    stack: Stack
    time_us: int | None
    free_bytes: int | None
    """oom: what was free on the device."""


@dataclass(kw_only=True)
class Snapshot:
    """One device of a snapshot file."""

    device: int
    segments: tuple[Segment, ...]
    events: tuple[TraceEvent, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    format: str = ""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.bytes for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks in use."""
        return sum(block.bytes for block in self.active_blocks())

    def active_blocks(self) -> Iterator[Block]:
        """Yield the blocks in use."""
        for segment in self.segments:
            yield from (block for block in segment.blocks if block.active)

    @property
    def ooms(self) -> list[TraceEvent]:
        """Allocations that failed."""
        return [event for event in self.events if event.action == "oom"]


def read_snapshot(path: Path, *, device: int | None = None) -> Snapshot:
    """Read a snapshot file; the fullest device unless `device` says which.

    Raises UsageError for hostile, damaged and foreign files.
    """
    with _no_collector():
        return _read(path, device)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Hold the garbage collector off: it would walk the growing millions again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read(path: Path, device: int | None) -> Snapshot:
    data = load_plain(path, what="snapshot")
    if isinstance(data, list):  # torch 2.0: the segments alone
        data = {"segments": data, "device_traces": []}
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
        raise UsageError(
            "snapshot: the file is no torch memory snapshot: it has no list `segments`",
            hint="make one with torch.cuda.memory._dump_snapshot(FILE)",
        )
    return from_data(data, device=device)


def from_data(data: dict[str, Any], *, device: int | None = None) -> Snapshot:
    """Return the Snapshot of unpickled plain data; every field is checked on the way."""
    stacks = _Stacks()
    segments = [_segment(raw, index, stacks) for index, raw in enumerate(data["segments"])]
    traces = data.get("device_traces") or []
    if not isinstance(traces, list):
        raise _wrong("device_traces", traces, "a list")
    reserved: dict[int, int] = {}
    for segment in segments:
        reserved[segment.device] = reserved.get(segment.device, 0) + segment.bytes
    if device is None:
        # a device that has only a history counts too: all may have been freed by now
        busiest = max(range(len(traces)), key=lambda index: len(traces[index]), default=0)
        device = max(reserved, key=lambda key: reserved[key], default=busiest)
    elif device not in reserved and not (0 <= device < len(traces) and traces[device]):
        known = ", ".join(map(str, sorted(reserved))) or "none"
        raise UsageError(f"--device: {device} is not in the snapshot", hint=f"devices: {known}")
    trace = traces[device] if device < len(traces) else []
    events = _events(trace, stacks)
    version = _format(data)
    settings = data.get("allocator_settings")
    return Snapshot(
        device=device,
        segments=tuple(segment for segment in segments if segment.device == device),
        events=tuple(_without_rewrites(events) if version == PROFILE else events),
        settings=settings if isinstance(settings, dict) else {},
        format=version,
    )


def _format(data: dict[str, Any]) -> str:
    """Name the version by what it carries."""
    blocks = [block for segment in data["segments"][:50] for block in segment["blocks"]]
    if any("history" in block for block in blocks):
        return "before torch 2.1"
    if blocks and not any("address" in block for block in blocks):
        return PROFILE
    return "torch 2.6 or newer" if "external_annotations" in data else "torch 2.1 or newer"


def _segment(raw: Any, index: int, stacks: "_Stacks") -> Segment:
    where = f"segments[{index}]"
    if not isinstance(raw, dict):
        raise _wrong(where, raw, "a dict")
    blocks = raw.get("blocks")
    if not isinstance(blocks, list):
        raise _wrong(f"{where}.blocks", blocks, "a list")
    address = 0 if raw.get("address") is None else _int(raw, "address", where)
    pool = raw.get("segment_pool_id") or (0, 0)
    found, position = [], address
    for number, block in enumerate(blocks):
        found.append(_block(block, f"{where}.blocks[{number}]", position, stacks))
        position = found[-1].address + found[-1].bytes
    total = _int(raw, "total_size", where)
    if "segment_type" not in raw and not any("address" in block for block in blocks):
        # a profile knows no segments: its one "segment" reaches from the lowest address to the highest
        found = [block for block in found if block.active]
        total = sum(block.bytes for block in found)
    return Segment(
        device=_int(raw, "device", where, default=0),
        address=address,
        bytes=total,
        stream=_int(raw, "stream", where, default=0),
        small=raw.get("segment_type") == "small",
        expandable=bool(raw.get("is_expandable", False)),
        private_pool=tuple(pool) != (0, 0),
        blocks=tuple(found),
    )


def _block(raw: Any, where: str, position: int, stacks: "_Stacks") -> Block:
    if not isinstance(raw, dict):
        raise _wrong(where, raw, "a dict")
    size = _int(raw, "size", where)
    history = raw.get("history")
    requested: int | None = None
    frames = raw.get("frames", ())
    if isinstance(history, list) and history and isinstance(history[0], dict):
        requested = _int(history[0], "real_size", f"{where}.history[0]", default=size)
        frames = history[0].get("frames", ())
    elif "requested_size" in raw:
        requested = _int(raw, "requested_size", where)
    # blocks cover their segment without gaps: without an address they lie one after the other
    return Block(
        address=_int(raw, "address", where) if "address" in raw else position,
        bytes=size,
        requested_bytes=requested,
        active=raw.get("state") in ACTIVE,
        stack=stacks.get(frames, where),
    )


def _without_rewrites(events: list[TraceEvent]) -> Iterator[TraceEvent]:
    """Leave out free + alloc of one address: so a profile writes an update in place."""
    index = 0
    while index < len(events):
        event, then = events[index], events[index + 1 : index + 3]
        if (
            event.action == "free_requested"
            and [each.action for each in then] == ["free_completed", "alloc"]
            and all((e.address, e.bytes) == (event.address, event.bytes) for e in then)
        ):
            index += 3
            continue
        yield event
        index += 1


def _events(trace: list[Any], stacks: "_Stacks") -> list[TraceEvent]:
    """Convert a history of up to millions of entries: the usual entry takes the short way."""
    found = []
    known = stacks.known
    for index, raw in enumerate(trace):
        try:
            action, address, size = raw["action"], raw["addr"], raw["size"]
            stack = known[id(raw["frames"])][1]
            usual = type(address) is int and type(size) is int and type(action) is str
            if usual and 0 <= address <= MAX_VALUE and 0 <= size <= MAX_VALUE:
                time_us, free = raw.get("time_us"), raw.get("device_free")
                found.append(
                    TraceEvent(action, address, size, stack, _whole(time_us), _whole(free))
                )
                continue
        except (KeyError, TypeError):
            pass
        found.append(_event(raw, index, stacks))
    return found


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _event(raw: Any, index: int, stacks: "_Stacks") -> TraceEvent:
    where = f"device_traces[{index}]"
    if not isinstance(raw, dict) or not isinstance(raw.get("action"), str):
        raise _wrong(where, raw, "a dict with an action")
    return TraceEvent(
        raw["action"],
        _int(raw, "addr", where, default=0),
        _int(raw, "size", where, default=0),
        stacks.get(raw.get("frames", ()), where),
        _whole(raw.get("time_us")),
        _whole(raw.get("device_free")),
    )


class _Stacks:
    """Equal frames and stacks once: a snapshot repeats a few thousand of them a million times."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Stack]] = {}
        """id of a raw list of frames -> (that list, its stack)."""
        self._frames: dict[tuple[str, int, str], Frame] = {}
        self._stacks: dict[Stack, Stack] = {}

    def get(self, raw: Any, where: str) -> Stack:
        """Return the stack of a raw list of frames."""
        if not raw:
            return ()
        known = self.known.get(id(raw))
        if known is not None:
            return known[1]
        if not isinstance(raw, list):
            raise _wrong(f"{where}.frames", raw, "a list")
        stack = tuple(self._frame(frame, where) for frame in raw[:MAX_FRAMES])
        stack = self._stacks.setdefault(stack, stack)
        self.known[id(raw)] = (raw, stack)  # holding `raw` keeps its id its own
        return stack

    def _frame(self, raw: Any, where: str) -> Frame:
        if not isinstance(raw, dict):
            raise _wrong(f"{where}.frames", raw, "dicts")
        key = (
            str(raw.get("filename", ""))[:300],
            raw["line"] if isinstance(raw.get("line"), int) else 0,
            str(raw.get("name", ""))[:200],
        )
        packed = _PROFILER_NAME.match(key[2]) if key[0] == "none" else None
        if packed:
            key = (packed["file"], int(packed["line"]), packed["name"])
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(*key)
        return frame


MAX_VALUE = 2**63
_PROFILER_NAME = re.compile(r"(?P<file>.+\.py)\((?P<line>\d{1,7})\): (?P<name>.+)$")
"""torch.profiler packs file, line and function into the name."""


def _int(raw: dict[str, Any], name: str, where: str, *, default: int | None = None) -> int:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_VALUE:
        if isinstance(value, int) and -MAX_VALUE <= value < 0:
            return value + 2 * MAX_VALUE  # addresses are written as signed by some versions
        raise _wrong(f"{where}.{name}", value, "a whole number from 0 to 2^63")
    return value


def _wrong(field_name: str, value: Any, allowed: str) -> UsageError:
    # a plain repr of nested shared lists would never end
    shown = reprlib.repr(value)[:60]
    return UsageError(f"snapshot: {field_name} is {shown}, not {allowed}")
