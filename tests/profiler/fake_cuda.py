"""A CUDA allocator's counters for machines without CUDA: torch's own Python runs on top of them.

The counters stand in for the functions of torch._C that torch/cuda/memory.py and
torch/accelerator/memory.py call, with the meaning that c10/core/CachingDeviceAllocator.h gives
them: every statistic has current, peak, allocated and freed; a reset makes peak = current, on one
device, for everybody. Requests are rounded to 512 bytes and cut from segments of 2 MiB, 20 MiB or
their own size (c10/cuda/CUDACachingAllocator.cpp); there is no fragmentation.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

MiB = 1024**2
_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
_NUMBERS = ("allocation", "segment", "active", "inactive_split")
_POOLS = ("all", "small_pool", "large_pool")
_METRICS = ("current", "peak", "allocated", "freed")


class _Device:
    """One device's statistics and cached bytes."""

    def __init__(self) -> None:
        self.stats = {
            name: {pool: dict.fromkeys(_METRICS, 0) for pool in _POOLS}
            for name in (*_BYTES, "requested_bytes", *_NUMBERS)
        }
        self.cached = dict.fromkeys(_POOLS, 0)

    def move(self, name: str, pool: str, change: int) -> None:
        for where in ("all", pool):
            stat = self.stats[name][where]
            stat["current"] += change
            stat["peak"] = max(stat["peak"], stat["current"])
            stat["allocated" if change > 0 else "freed"] += abs(change)

    def reset_peaks(self) -> None:
        for pools in self.stats.values():
            for stat in pools.values():
                stat["peak"] = stat["current"]


class FakeCuda:
    """`num_devices` GPUs of `total_bytes`; device 0 has a context, another once it is used."""

    def __init__(self, num_devices: int = 1, total_bytes: int = 80 * 1024**3) -> None:
        self.total_bytes = total_bytes
        self.calls: Counter[str] = Counter()
        """How often each function of torch._C was called."""
        self._devices = [_Device() for _ in range(num_devices)]
        self._contexts = {0}
        self._blocks: dict[int, tuple[int, str, int, int]] = {}
        self._next = 0x7F00_0000_0000

    def alloc(self, size: int, device: int = 0) -> int:
        """Allocate as a tensor would; return its address."""
        self._contexts.add(device)
        rounded = -(-size // 512) * 512
        pool = "small_pool" if rounded <= MiB else "large_pool"
        found = self._devices[device]
        if found.cached[pool] < rounded:
            segment = 2 * MiB if rounded <= MiB else 20 * MiB
            if rounded >= 10 * MiB:
                segment = -(-rounded // (2 * MiB)) * 2 * MiB
            found.cached[pool] += segment
            found.move("reserved_bytes", pool, segment)
            found.move("segment", pool, 1)
        found.cached[pool] -= rounded
        self._count(found, pool, rounded, size, 1)
        self._next += 1 << 32
        self._blocks[self._next] = (device, pool, rounded, size)
        return self._next

    def free(self, address: int) -> None:
        """Free what `alloc` returned: the pool keeps it."""
        device, pool, rounded, size = self._blocks.pop(address)
        self._devices[device].cached[pool] += rounded
        self._count(self._devices[device], pool, -rounded, -size, -1)

    def spike(self, size: int, device: int = 0) -> None:
        """Allocate and free at once: only a peak remains."""
        self.free(self.alloc(size, device))

    def empty_cache(self) -> None:
        """Give what is cached back to the driver."""
        for device in self._devices:
            for pool, cached in device.cached.items():
                if cached:
                    device.move("reserved_bytes", pool, -cached)
                    device.cached[pool] = 0

    def install(self, monkeypatch: Any = None) -> "FakeCuda":
        """Make torch see these devices, until `monkeypatch` ends (None: for good)."""
        for name, function in self._bindings().items():
            _set(monkeypatch, torch._C, name, self._counted(name, function))
        card = SimpleNamespace(name="NVIDIA Fake", total_memory=self.total_bytes)
        state = {
            "_initialized": True,
            "_cached_device_count": None,
            "get_device_properties": lambda device=None: card,
        }
        for name, value in state.items():
            _set(monkeypatch, torch.cuda, name, value)
        return self

    def _bindings(self) -> dict[str, Any]:
        def stats(device: int) -> dict[str, Any]:
            return {
                name: {pool: dict(stat) for pool, stat in pools.items()}
                for name, pools in self._devices[device].stats.items()
            } | {
                "oversize_allocations": dict.fromkeys(_METRICS, 0),
                "oversize_segments": dict.fromkeys(_METRICS, 0),
                "num_ooms": 0,
                "num_alloc_retries": 0,
            }

        def reset(device: int) -> None:
            self._devices[device].reset_peaks()

        def free(device: int) -> tuple[int, int]:
            used = self._devices[device].stats["reserved_bytes"]["all"]["current"]
            return self.total_bytes - used, self.total_bytes

        return {
            "_cuda_getDeviceCount": lambda: len(self._devices),
            "_cuda_getDevice": lambda: 0,
            "_cuda_memoryStats": stats,
            "_cuda_resetPeakMemoryStats": reset,
            "_cuda_hasPrimaryContext": lambda device: device in self._contexts,
            "_cuda_emptyCache": self.empty_cache,
            "_cuda_attach_out_of_memory_observer": lambda observer: None,
            "_accelerator_getAccelerator": lambda: torch.device("cuda"),
            "_accelerator_getDeviceIndex": lambda: 0,
            "_accelerator_isAllocatorInitialized": lambda: True,
            "_accelerator_getDeviceStats": stats,
            "_accelerator_resetPeakStats": reset,
            "_accelerator_getMemoryInfo": free,
            "_accelerator_emptyCache": self.empty_cache,
            "_accelerator_synchronizeDevice": lambda device: None,
        }

    def _counted(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return function(*args)

        return call

    @staticmethod
    def _count(device: _Device, pool: str, rounded: int, size: int, number: int) -> None:
        device.move("allocated_bytes", pool, rounded)
        device.move("active_bytes", pool, rounded)
        device.move("requested_bytes", pool, size)
        device.move("allocation", pool, number)
        device.move("active", pool, number)


def _set(monkeypatch: Any, owner: Any, name: str, value: Any) -> None:
    if monkeypatch is None:
        setattr(owner, name, value)
    else:
        monkeypatch.setattr(owner, name, value, raising=False)
