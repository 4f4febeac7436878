"""What any GPU driver says: memory per GPU, per slice and per process.

Every byte count may be None, which means that the driver does not tell: it is never shown or summed
as 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

from planner.units import MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessReading:
    """GPU memory of one process on one GPU."""

    pid: int
    """In the driver's own PID namespace: inside a container it may name a foreign process."""
    used_bytes: int | None
    """None under WSL, on Windows, and where the driver needs more permission."""
    gpu_instance: int | None = None
    """MIG slice that the process runs on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU or one MIG slice at one moment."""

    index: int
    label: str
    """"0", or "0:1" for slice 1 of GPU 0."""
    name: str
    uuid: str = ""
    total_bytes: int | None = None
    """What the driver lists as total, its own reserve included."""
    reserved_bytes: int | None = None
    """Kept by driver and firmware; torch sees total minus this. None on old drivers."""
    used_bytes: int | None = None
    """All processes together, without the driver's reserve where that is known."""
    free_bytes: int | None = None
    processes: tuple[ProcessReading, ...] | None = None
    """None: the driver does not list processes here. Empty: there are none (or none visible)."""
    notes: tuple[str, ...] = ()


class GpuReader(Protocol):
    """Anything that reads GPUs: NVML, AMD, a recorded session."""

    def read(self) -> list[GpuReading]:
        """Return one reading per GPU or slice, in order."""
        ...

    def versions(self) -> dict[str, str]:
        """Return driver and library versions."""
        ...

    def close(self) -> None:
        """Let go of the library."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def used_by_tree(
    readings: Iterable[GpuReading], pids: set[int], known_pids: set[int]
) -> int | None:
    """Return the GPU bytes of the processes `pids`; None if the driver does not tell.

    `known_pids` are all processes that this PID namespace can see. A listed process outside it
    means that the driver speaks of another namespace (a container), so that "ours are not
    listed" says nothing; nor does an empty list of a GPU that is in use.
    """
    total, foreign, unlisted = 0, False, False
    found = False
    for gpu in readings:
        if gpu.processes is None or _hides(gpu):
            unlisted = True
            continue
        for process in gpu.processes:
            if process.pid in pids:
                if process.used_bytes is None:
                    return None
                total += process.used_bytes
                found = True
            elif process.pid not in known_pids:
                foreign = True
    if unlisted or (foreign and not found):
        return None
    return total


IDLE_BYTES = 64 * MiB
"""An idle GPU without processes uses less, the driver's reserve left out."""


def _hides(gpu: GpuReading) -> bool:
    """True when memory is in use but no process is listed: a container without the host's PIDs."""
    known = gpu.reserved_bytes is not None and gpu.used_bytes is not None
    return known and not gpu.processes and (gpu.used_bytes or 0) > IDLE_BYTES
