"""The memory of the card at the moment of failure, line by line, and whether fragmentation decided it."""

import json
from dataclasses import dataclass
from functools import cache

from planner.allocator.pool import LARGE_BUFFER
from planner.datafiles import data_dir
from planner.doctor.event import Event
from planner.units import GiB, format_bytes

ROOM = GiB
"""Free beyond the request: with that much neither its size nor holes in the reserve refused it."""


@cache
def ordinary(name: str) -> float:
    """Return what public out-of-memory messages have at most: a constant of data/calibration/doctor.json."""
    text = (data_dir() / "calibration" / "doctor.json").read_text(encoding="utf-8")
    value: float = json.loads(text)["constants"][name]["value"]
    return value


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Where the card's memory was. None = the message does not say."""

    requested_bytes: int | None
    total_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    unallocated_bytes: int | None
    """Reserved by PyTorch but in no tensor."""
    context_bytes: int | None
    """This process beyond PyTorch's allocator: CUDA context, NCCL, cuBLAS, CUDA graphs."""
    other_bytes: int | None
    """Held by other processes, or by another allocator on the card."""
    unaccounted_bytes: int | None
    """total - free - allocated - unallocated: context and other processes together."""
    shortfall_bytes: int | None
    fragmentation_decides: bool
    tiny_request: bool
    """The request prints as the smallest segment: the card was full, the tensor says nothing."""

    @property
    def had_room(self) -> bool:
        """Return whether the card itself could have given the request."""
        return (
            self.requested_bytes is not None
            and self.free_bytes is not None
            and self.free_bytes >= self.requested_bytes + ROOM
        )

    def rows(self) -> list[tuple[str, int]]:
        """Return (name, bytes) of the card's parts that are known."""
        parts = (
            ("allocated by PyTorch", self.allocated_bytes),
            ("reserved by PyTorch, unused", self.unallocated_bytes),
            ("context, NCCL, graphs", self.context_bytes),
            ("other processes", self.other_bytes),
            (
                "context or other processes",
                self.unaccounted_bytes if self.context_bytes is None else None,
            ),
            ("free", self.free_bytes),
            ("total", self.total_bytes),
        )
        return [(name, value) for name, value in parts if value is not None]

    def tiny_sentence(self) -> str:
        """Return what a request of the smallest segment says, "" for a larger one."""
        if not self.tiny_request:
            return ""
        if self.free_bytes is not None and self.free_bytes > GiB:
            return (
                "a request this small prints as the smallest segment: the tensor says nothing, "
                f"and {format_bytes(self.free_bytes)} were free"
            )
        return "a request this small prints as the smallest segment: the card was full, the tensor says nothing"

    def fragmentation_sentence(self) -> str:
        """Return whether fragmentation decided the failure, with the numbers."""
        if (
            self.requested_bytes is None
            or self.free_bytes is None
            or self.unallocated_bytes is None
        ):
            return "fragmentation: cannot be judged, the message does not give all numbers"
        holes = self.free_bytes + self.unallocated_bytes
        sums = (
            f"{format_bytes(self.free_bytes)} free + {format_bytes(self.unallocated_bytes)} unused"
            f" = {format_bytes(holes)} against a request of {format_bytes(self.requested_bytes)}"
        )
        if self.fragmentation_decides:
            return f"fragmentation decided it: {sums}"
        if holes >= self.requested_bytes:
            return (
                f"fragmentation did not decide it: {sums}, but so little unused memory is ordinary"
            )
        return f"fragmentation did not decide it: {sums}"


def read_budget(event: Event) -> Budget | None:
    """Return the budget of a device message, or None when the event has none."""
    message = event.cuda
    if message is None or not message.facts:
        return None
    get = message.get
    total, free, tried = get("total"), get("free"), get("tried")
    if message.backend == "mps" and get("allowed") is not None:
        total = get("allowed")
        free = max(0, (total or 0) - (get("allocated") or 0) - (get("other") or 0))
    alloc = get("alloc") if get("alloc") is not None else get("allocated")
    unalloc = get("unalloc")
    if unalloc is None and alloc is not None and get("reserved") is not None:
        unalloc = max(0, (get("reserved") or 0) - alloc)
    unaccounted = None
    if total is not None and free is not None and alloc is not None and unalloc is not None:
        unaccounted = (total or 0) - (free or 0) - (alloc or 0) - (unalloc or 0)
    # "this process has 0 bytes" means that the driver cannot see the pid (containers)
    proc = get("proc") or get("proc_named")
    context = None
    if proc and alloc is not None:
        context = max(0, proc - alloc - (unalloc or 0))
    other = sum(message.others_bytes) or get("other")
    if other is None and proc and total and free is not None:
        other = max(0, total - free - proc)
    decides = bool(
        tried
        and free is not None
        and unalloc
        and total
        and free < tried + ROOM
        and free + unalloc >= tried
        and unalloc > ordinary("unused_share") * total
        and tried > LARGE_BUFFER
    )
    return Budget(
        requested_bytes=tried,
        total_bytes=total or get("limit"),
        free_bytes=free,
        allocated_bytes=alloc,
        unallocated_bytes=unalloc,
        context_bytes=context,
        other_bytes=other,
        unaccounted_bytes=unaccounted,
        shortfall_bytes=tried - free if tried is not None and free is not None else None,
        fragmentation_decides=decides,
        tiny_request=tried is not None and tried <= LARGE_BUFFER and message.backend == "native",
    )


def foreign_bytes(budget: Budget) -> int:
    """Return what is on the card beyond this process: surely (listed), or more than any context."""
    if budget.context_bytes is not None:
        return budget.other_bytes or 0
    if budget.other_bytes:
        return budget.other_bytes
    unaccounted = budget.unaccounted_bytes or 0
    return unaccounted if unaccounted > ordinary("context_bytes") else 0
