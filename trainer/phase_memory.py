"""Peak memory by phase while a run goes on: the device's allocator on a GPU, resident memory on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch


class PhaseMemory:
    """`with memory("rollout"): ...` notes the phase's peak; `take()` returns the peaks since the last.

    On a GPU allocated and reserved bytes as torch counts them. A CPU has no allocator that counts:
    there it is the process's resident memory at the end of the phase, and nothing is reserved.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self.peaks: dict[str, tuple[int, int | None]] = {}
        """Phase -> (allocated or resident, reserved)."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            if on_gpu:
                allocated = torch.cuda.max_memory_allocated(self._device)
                reserved: int | None = torch.cuda.max_memory_reserved(self._device)
            else:
                allocated, reserved = self._process.memory_info().rss, None
            before = self.peaks.get(phase, (0, None))
            self.peaks[phase] = (
                max(before[0], allocated),
                None if reserved is None else max(before[1] or 0, reserved),
            )

    def take(self, planned_bytes: dict[str, int]) -> dict[str, int | None]:
        """Return metrics of the phases since the last call, beside what was planned."""
        kind = "allocated" if self._device.type == "cuda" else "resident"
        metrics: dict[str, int | None] = {}
        for phase, (allocated, reserved) in self.peaks.items():
            metrics[f"memory/{phase}/{kind}_bytes"] = allocated
            if reserved is not None:
                metrics[f"memory/{phase}/reserved_bytes"] = reserved
            if phase in planned_bytes:
                metrics[f"memory/{phase}/planned_bytes"] = planned_bytes[phase]
        self.peaks.clear()
        return metrics
