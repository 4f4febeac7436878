"""What torch's caching allocator holds at its largest: the run replayed, allocation by allocation.

planner/replay plays loading and two steps through planner/allocator. Freed blocks serve requests of
other sizes only when those are smaller, so the allocator holds more than is ever alive at once; near
the card's limit it gives unused blocks back first.
"""

from typing import NamedTuple

from planner.models.spec import ModelSpec
from planner.phases import Phase
from planner.replay.steps import replay_run
from planner.run.resolve import Resolved

COMMUNICATION_BYTES = 800 * 1024**2
"""NCCL channels and buffers of one process, outside torch's pool (0.5-1 GiB)."""


class Reserved(NamedTuple):
    """torch.cuda.max_memory_reserved."""

    low: int
    """Tensors alive at the peak: no allocator holds less."""
    typical: int
    """On this card: unused blocks are given back when it is full."""
    high: int
    """On a card with room: nothing is ever given back."""


def reserved(
    model: ModelSpec,
    r: Resolved,
    phases: tuple[Phase, ...],
    capacity_bytes: int,
    lengths: tuple[int, ...] = (),
) -> Reserved:
    """Return what the allocator holds; `lengths`: tokens of a sequence in each step, if they differ."""
    peak = max(phase.total_bytes for phase in phases)
    if not r.trains:  # vLLM stays inside its utilisation
        return Reserved(peak, peak, peak)
    fixed = {
        "workspace_bytes": _bytes(phases, "loss", "overhead"),
        "resident_bytes": _bytes(phases, "forward", "engine"),
        "lengths": lengths,
    }
    free = replay_run(model, r, **fixed)
    high = typical = max(peak, free.reserved_bytes)
    if high > capacity_bytes:
        pressed = replay_run(model, r, capacity_bytes=capacity_bytes, **fixed)
        if not pressed.full:
            typical = max(peak, pressed.reserved_bytes)
    return Reserved(peak, typical, high)


def communication_bytes(r: Resolved) -> int:
    """Return what collectives need outside torch's pool."""
    return COMMUNICATION_BYTES if r.gpus > 1 else 0


def _bytes(phases: tuple[Phase, ...], phase: str, term: str) -> int:
    found = next(each for each in phases if each.name == phase)
    return sum(each.bytes for each in found.terms if each.name == term)
