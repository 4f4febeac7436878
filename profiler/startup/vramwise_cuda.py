"""torch's CUDA counters, read and reset at every change of phase without the program noticing.

torch keeps one peak a device, and a reset is a reset for everyone. Every road of Python to it
(torch.cuda.*, torch.accelerator.*, old names, names imported before us) ends in the same functions
of torch._C, looked up at each call: torch/cuda/memory.py and torch/accelerator/memory.py of torch
2.13. They are wrapped here, so the program sees its own peaks and we see ours, whoever resets.

Standard library only, Python 3.9 or newer; see vramwise_phases.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

_ROADS = (
    ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats"),
    ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),
)
_POOL = "vllm.device_allocator.cumem"
_POOL_CHANGES = ("sleep", "discard", "wake_up")


class CudaMeter:
    """torch's CUDA (or ROCm) caching allocator: allocated and reserved bytes of the fullest device.

    Memory that vLLM's pool has unmapped is not counted, though torch does.
    """

    kind = "cuda"

    def __init__(self, torch: Any) -> None:
        self.reserved_now: int | None = None
        self._fullest = 0  # device of the last peak
        self._peaks: dict[
            int, tuple[int, int]
        ] = {}  # device -> (allocated, reserved) since they were taken
        self._counters = Counters.of(torch)
        self._counters.meters.add(self)

    def read(self) -> tuple[int, int]:
        """Return (allocated_bytes, reserved_bytes) now."""
        return self._note(self._counters.now(d) for d in self._counters.devices())

    def take_peak(self) -> tuple[int, int]:
        """Return (allocated, reserved) peaks since the last call and start again."""
        with self._counters.lock:
            self._note([self._counters.collect(d) for d in self._counters.devices()])
            peaks, self._peaks = self._peaks, {}
        self._fullest = max(peaks, key=lambda device: peaks[device], default=0)
        return peaks.get(self._fullest, (0, 0))

    def holds(self, device: Any, address: int) -> bool:
        """Return whether memory of a tensor is part of the last peak: on its device, and mapped."""
        return bool(
            device.type == self.kind
            and device.index == self._fullest
            and not any(start <= address < start + size for start, size in unmapped(device.index))
        )

    def keep(self, device: int, peak: tuple[int, int]) -> None:
        """Remember a peak that is about to be reset."""
        known = self._peaks.get(device, (0, 0))
        self._peaks[device] = (max(known[0], peak[0]), max(known[1], peak[1]))

    def close(self) -> None:
        """Want no more peaks."""
        self._counters.meters.discard(self)

    def _note(self, readings: Iterable[tuple[int, int]]) -> tuple[int, int]:
        fullest = max(readings, default=(0, 0))
        self.reserved_now = fullest[1]
        return fullest


class Counters:
    """One process's counters, and who still wants a peak of them: our meters, the program."""

    _shared: ClassVar[Counters | None] = None

    @classmethod
    def of(cls, torch: Any) -> Counters:
        """Return the counters whose wrappers are in place, or put them there."""
        found = cls._shared
        if found is None or getattr(torch._C, _ROADS[0][0]) is not found.wrapper:
            found = cls._shared = cls(torch)
        return found

    def __init__(self, torch: Any) -> None:
        self.lock = threading.RLock()
        self.meters: Any = weakref.WeakSet()
        self._seen: dict[
            int, dict[str, Any]
        ] = {}  # device -> peaks that we reset and the program may still ask for
        self._read = getattr(torch._C, _ROADS[0][0])
        self._reset = getattr(torch._C, _ROADS[0][1])
        self._has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        self._devices: list[int] = []
        self._others = list(range(torch.cuda.device_count()))
        self._undo: list[Callable[[], None]] = []
        self._pool: Any = None
        for read, reset in _ROADS:
            if hasattr(torch._C, read):
                self._wrap(torch._C, read, self._program_reads)
                self._wrap(torch._C, reset, self._program_resets)
        self.wrapper = getattr(torch._C, _ROADS[0][0])

    def devices(self) -> list[int]:
        """Return the devices with a context of this process: torch holds memory nowhere else."""
        for device in tuple(self._others):
            if self._has_context is None or self._has_context(device):
                self._others.remove(device)
                self._devices.append(device)
        return self._devices

    def now(self, device: int) -> tuple[int, int]:
        """Return (allocated, reserved) bytes of `device`."""
        self._watch_pool()
        return _mapped(self._read(device), device, "current")

    def collect(self, device: int) -> tuple[int, int]:
        """Give the peaks to all who want them and reset them; return (allocated, reserved) now."""
        with self.lock:
            self._watch_pool()
            stats = self._read(device)
            peak = _mapped(stats, device, "peak")
            for meter in self.meters:
                meter.keep(device, peak)
            _fold(self._seen.setdefault(device, {}), stats)
            self._reset(device)
            return _mapped(stats, device, "current")

    def _program_reads(self, original: Callable[[int], Any], device: int) -> Any:
        with self.lock:
            stats = original(device)
            _raise(stats, self._seen.get(device, {}))
        return stats

    def _program_resets(self, original: Callable[[int], Any], device: int) -> Any:
        with self.lock:
            if self.meters:
                with contextlib.suppress(Exception):  # the program's own reset says what is wrong
                    self.collect(device)
            self._seen.pop(device, None)
            if not self.meters and not self._seen:  # nothing is known here that torch doesn't know
                self._restore()
            return original(device)

    def _watch_pool(self) -> None:
        """Collect before vLLM maps or unmaps memory, so that a peak has one amount to subtract."""
        pool = getattr(sys.modules.get(_POOL), "CuMemAllocator", None)
        if pool is None or pool is self._pool:
            return
        self._pool = pool
        for name in _POOL_CHANGES:
            if name in vars(pool):
                self._wrap(pool, name, self._pool_changes)

    def _pool_changes(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # a peak is not worth vLLM's sleep
            for device in self.devices():
                self.collect(device)
        return original(*args, **kwargs)

    def _wrap(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        def undo() -> None:
            # someone may have wrapped ours meanwhile: then theirs stays
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)

        setattr(owner, name, wrapper)
        self._undo.append(undo)

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def unmapped(device: int) -> list[tuple[int, int]]:
    """Return (address, bytes) of every segment that vLLM's sleep mode has unmapped on `device`.

    The pool gives the physical memory back under live tensors, so torch counts it as before
    (vllm/device_allocator/cumem.py, 0.30 to 0.33). Segments are up to 1 MiB larger than a KV
    tensor in them, and torch's segments of 20 MiB are shared by small weights.
    """
    pool = getattr(sys.modules.get(_POOL), "CuMemAllocator", None)
    allocator = getattr(pool, "instance", None)
    if allocator is None:
        return []
    return [
        (entry.handle[2], entry.handle[1])
        for entry in list(allocator.pointer_to_data.values())
        if getattr(entry, "is_asleep", False) and entry.handle[0] == device
    ]


def _mapped(stats: dict[str, Any], device: int, metric: str) -> tuple[int, int]:
    """Return (allocated, reserved) bytes of torch's nested statistics without what is unmapped."""
    gone = sum(size for _, size in unmapped(device))
    allocated, reserved = (
        max(0, stats[kind]["all"][metric] - gone) for kind in ("allocated_bytes", "reserved_bytes")
    )
    return allocated, reserved


def _fold(known: dict[str, Any], stats: dict[str, Any]) -> None:
    """Raise every peak in `known` to that of `stats`."""
    for key, value in stats.items():
        if isinstance(value, dict):
            _fold(known.setdefault(key, {}), value)
        elif key == "peak":
            known[key] = max(known.get(key, 0), value)


def _raise(stats: dict[str, Any], known: dict[str, Any]) -> None:
    """Raise the peaks of `stats` to those of `known`."""
    for key, value in stats.items():
        if isinstance(value, dict):
            _raise(value, known.get(key, {}))
        elif key == "peak":
            stats[key] = max(value, known.get(key, 0))
