"""Peak memory by phase while a run goes on: the device's allocator on a GPU, resident memory on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from profiler.startup.vramwise_cuda import CudaMeter


class PhaseMemory:
    """`with memory("rollout"): ...` notes the phase's peak; `take()` returns the peaks since the last.

    On a GPU allocated and reserved bytes as torch counts them, without what a sleeping vLLM has
    unmapped (torch still counts its KV cache). A CPU has no allocator that counts:
    there it is the process's resident memory at the end of the phase, and nothing is reserved.
    """

    def __init__(self, device: torch.device) -> None:
        self._meter = CudaMeter(torch) if device.type == "cuda" else None
        self._process = psutil.Process()
        self.peaks: dict[str, tuple[int, int | None]] = {}
        """Phase -> (allocated or resident, reserved)."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self._meter is not None:
            self._meter.take_peak()
        try:
            yield
        finally:
            self._note(phase)

    def loss_until(self, hidden: Tensor) -> None:
        """Count what runs backward before the gradient of `hidden` is there as the loss's: the head's backward."""
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._note("loss"))

    def _note(self, phase: str) -> None:
        """Note the peak since the last note as `phase`'s."""
        reserved: int | None
        if self._meter is not None:
            allocated, reserved = self._meter.take_peak()
        else:
            allocated, reserved = self._process.memory_info().rss, None
        before = self.peaks.get(phase, (0, None))
        self.peaks[phase] = (
            max(before[0], allocated),
            None if reserved is None else max(before[1] or 0, reserved),
        )

    def take(self, planned_bytes: dict[str, int]) -> dict[str, int | None]:
        """Return metrics of the phases since the last call, beside what was planned."""
        kind = "resident" if self._meter is None else "allocated"
        metrics: dict[str, int | None] = {}
        for phase, (allocated, reserved) in self.peaks.items():
            metrics[f"memory/{phase}/{kind}_bytes"] = allocated
            if reserved is not None:
                metrics[f"memory/{phase}/reserved_bytes"] = reserved
            if phase in planned_bytes:
                metrics[f"memory/{phase}/planned_bytes"] = planned_bytes[phase]
        self.peaks.clear()
        return metrics
