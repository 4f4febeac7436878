"""Records a training loop from inside its own process.

    with record(model, optimizer) as live:
        train()
    print(live.recording.peak_bytes)

On a GPU the totals come from torch's allocator and cost next to nothing; on a CPU, or with
`follow=True`, every tensor storage is followed and each byte has its term, at the price of about
20 microseconds an operator.
"""

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from planner.errors import UsageError
from profiler.follower import Follower
from profiler.journal import phase_record
from profiler.recording import PHASES, Recording
from profiler.recording_parts import PhaseRecord
from profiler.startup.vramwise_cuda import CudaMeter
from profiler.startup.vramwise_meters import CpuMeter, PeakBook, static_terms
from profiler.startup.vramwise_phases import PhaseTracker

MAX_TIMELINE = 20_000
"""Phase changes kept; after that every second one is dropped, again and again."""


class LiveRecording:
    """A recording under way; `recording` is the result so far."""

    def __init__(self, model: Any, optimizer: Any, *, subject: str, follow: bool) -> None:
        self.phases = PhaseTracker(self._on_change)
        self._subject = subject
        self._started_s = time.monotonic()
        self._timeline: list[dict[str, Any]] = []
        self._models = [] if model is None else [model]
        self._optimizers = [] if optimizer is None else [optimizer]
        self._book = None if follow else self._new_book()
        if self._book is not None:
            self._book.meter.take_peak()  # what was before is no peak of ours
        self._follower = Follower(self.phases) if follow else None
        self._complete = False
        self._window = (0, 0)

    def take_peak(self) -> tuple[int, int | None]:
        """Return the most that was allocated and reserved in the phases since the last call."""
        (allocated, reserved), self._window = self._window, (0, 0)
        return allocated, reserved or None

    def turn(self, name: str) -> None:
        """Go on to phase `name` inside the one that is marked."""
        self.phases.change(name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count everything inside as phase `name`, whatever the hooks would say."""
        if name not in PHASES:
            raise UsageError(f"phase: {name!r} is not one of {', '.join(PHASES)}")
        self.phases.hold(name)
        try:
            yield
        finally:
            self.phases.let_go("other")

    @property
    def recording(self) -> Recording:
        """The Recording so far; partial until the `with` block has ended without an error."""
        phases = self._phases()
        # between phases nothing is computed, but an evaluation or a save may be what is largest
        top = max(phases, key=lambda phase: phase.peak_bytes, default=None)
        follower = self._follower
        return Recording(
            source="torch",
            subject=self._subject,
            environment=self._environment(),
            phases=phases,
            peak_bytes=top.peak_bytes if top else 0,
            peak_phase=top.name if top else "",
            peak_reserved_bytes=max(
                (phase.reserved_bytes for phase in phases if phase.reserved_bytes is not None),
                default=None,
            ),
            host_peak_bytes=_host_peak_bytes(),
            peak_op=top.peak_op if top else "",
            peak_module=top.peak_module if top else "",
            largest=follower.largest if follower else (),
            events=follower.events if follower else (),
            timeline=tuple(self._timeline),
            partial=not self._complete,
        )

    def _new_book(self) -> PeakBook:
        """Return the book of the device that this process works on right now."""
        if torch.cuda.is_initialized():
            return PeakBook(CudaMeter(torch), self.phases)
        holding = sum(static_terms(self._models, self._optimizers).values())
        return PeakBook(CpuMeter(torch, holding=holding), self.phases)

    def start(self) -> None:
        """Install the hooks."""
        self.phases.install(torch)
        generation = _generation_mixin()
        if generation is not None:
            self.phases.wrap_generate(generation)
        if self._follower is not None:
            self._follower.start()
        self.phases.know(self._models, self._optimizers)
        if self._follower is not None:
            self._follower.adopt_known()

    def stop(self, *, complete: bool = True) -> None:
        """Take the hooks away and close the books."""
        self._on_change(self.phases.phase, "")
        self.phases.remove()
        if self._follower is not None:
            self._follower.stop()
        if self._book is not None:
            self._book.meter.close()
        # hooks and recording refer to each other: what is kept here would outlive the `with` block
        self._models, self._optimizers = [], []
        self._complete = complete

    def _on_change(self, old: str, new: str) -> None:
        row: dict[str, Any] = {"t_s": round(time.monotonic() - self._started_s, 4), "phase": old}
        if self._follower is not None:
            live = self._follower.live_bytes()
            self._follower.on_change(old, new)
            row |= {"allocated_bytes": live, "reserved_bytes": None}
        if self._book is not None:
            if self._book.meter.kind == "cpu" and torch.cuda.is_initialized():
                self._book = self._new_book()
            peak, _ = self._book.close(old)
            row |= {"allocated_bytes": peak, "reserved_bytes": self._book.meter.reserved_now}
        self._window = (
            max(self._window[0], row.get("allocated_bytes") or 0),
            max(self._window[1], row.get("reserved_bytes") or 0),
        )
        self._timeline.append(row)
        if len(self._timeline) > MAX_TIMELINE:
            del self._timeline[::2]

    def _phases(self) -> tuple[PhaseRecord, ...]:
        if self._follower is not None:
            found = self._follower.phases
            return tuple(found[name] for name in (*PHASES, "other") if name in found)
        assert self._book is not None
        peaks = self._book.peaks
        return tuple(
            phase_record(name, peaks[name]) for name in (*PHASES, "other") if name in peaks
        )

    def _environment(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "os": platform.platform(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
            "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "elapsed_s": round(time.monotonic() - self._started_s, 3),
            "steps": self.phases.steps,
            "method": "allocator totals"
            if self._follower is None
            else f"{self._follower.storages.device_type} storages followed",
        }


@contextmanager
def record(
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    *,
    subject: str = "python",
    follow: bool | None = None,
) -> Iterator[LiveRecording]:
    """Record what runs inside the block; the yielded object's `recording` is the result.

    `follow` None means: follow storages on a CPU, read the allocator's totals on a GPU.
    """
    if follow is None:
        follow = not torch.cuda.is_available()
    live = LiveRecording(model, optimizer, subject=subject, follow=follow)
    live.start()
    try:
        yield live
    except BaseException:
        live.stop(complete=False)
        raise
    live.stop()


def _generation_mixin() -> Any:
    """Return transformers' GenerationMixin if the program has loaded it."""
    import sys

    module = sys.modules.get("transformers.generation.utils")
    return getattr(module, "GenerationMixin", None)


def _host_peak_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(kib) * (1 if platform.system() == "Darwin" else 1024)
