"""Replays a snapshot's history through the simulated allocator: would other settings have fitted?"""

from dataclasses import dataclass

from planner.allocator.caching import AllocatorConfig, replay
from profiler.recording_parts import Event
from profiler.snapshot import Snapshot
from profiler.snapshot_analysis import blocks_before_history

SETTINGS = (
    "expandable_segments:False",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:8",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The same allocations under one setting of PYTORCH_ALLOC_CONF."""

    setting: str
    peak_reserved_bytes: int
    fits: bool | None
    """None: nothing ran out, so there is nothing to fit."""


def trials(snapshot: Snapshot) -> list[Trial]:
    """Return what the history would have reserved under each of SETTINGS; [] without a history.

    If the history has an out-of-memory error, it is replayed up to and including the request
    that failed, on a device that has just what this one had.
    """
    if not any(event.action == "alloc" for event in snapshot.events):
        return []
    oom = next((i for i, event in enumerate(snapshot.events) if event.action == "oom"), None)
    capacity = None if oom is None else _capacity(snapshot, oom)
    events = _events(snapshot, stop=oom)
    found = []
    for setting in SETTINGS:
        result = replay(events, config=AllocatorConfig.parse(setting), capacity_bytes=capacity)
        fits = None if capacity is None else result.failure is None
        found.append(
            Trial(setting=setting, peak_reserved_bytes=result.peak_reserved_bytes, fits=fits)
        )
    return found


def _events(snapshot: Snapshot, *, stop: int | None) -> list[Event]:
    """Return alloc and free events, what was there before the history first."""
    numbers: dict[int, int] = {}
    found: list[Event] = []

    def alloc(address: int, size: int) -> None:
        numbers[address] = len(found)
        found.append(Event(kind="alloc", block=len(found), bytes=size, phase=""))

    for address, size in sorted(blocks_before_history(snapshot)):
        alloc(address, size)
    for index, event in enumerate(snapshot.events):
        if event.action == "alloc" or index == stop:
            alloc(event.address if event.action == "alloc" else -1, event.bytes)
        elif event.action == "free_completed" and event.address in numbers:
            block = numbers.pop(event.address)
            found.append(Event(kind="free", block=block, bytes=event.bytes, phase=""))
        if index == stop:
            break
    return found


def _capacity(snapshot: Snapshot, oom: int) -> int | None:
    """Return what torch had when it ran out: reserved then, and free on the device then."""
    free = snapshot.events[oom].free_bytes
    if free is None:
        return None
    reserved = snapshot.reserved_bytes
    for event in snapshot.events[oom + 1 :]:
        if event.action in ("segment_alloc", "segment_map"):
            reserved -= event.bytes
        elif event.action in ("segment_free", "segment_unmap"):
            reserved += event.bytes
    return reserved + free
