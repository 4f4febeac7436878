"""The one live line of `profile run`, on stderr and only on a terminal; a second where memory will run out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from planner.errors import VramwiseError
from profiler.forecast import Forecast, Step
from profiler.journal import last_sample
from profiler.launch import Sample
from profiler.report import shown

MOST_AT_ONCE = 64
"""Steps between two samples that are told apart."""


class LiveSteps:
    """A run's optimizer steps as its samples show them, for a forecast of its memory."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.forecast = Forecast(total_steps=None, capacity_bytes=capacity_bytes)
        self._step = 0
        self._since_s = 0.0
        self._held = self._reserved = 0

    def feed(self, inside: dict[str, Any], now_s: float) -> str:
        """Take the newest sample from inside the run; return what it says of its memory, "" for nothing."""
        step = inside.get("step")
        if isinstance(step, int):
            self._held = max(self._held, inside.get("a") or 0)
            self._reserved = max(self._reserved, inside.get("r") or 0)
            new = step - self._step
            if new > 0:
                seconds = (now_s - self._since_s) / new
                for _ in range(min(new, MOST_AT_ONCE)):
                    self.forecast.add(Step(seconds, self._held, self._reserved or None))
                self._step, self._since_s = step, now_s
                self._held = self._reserved = 0
        out = self.forecast.runs_out
        return out.sentence() if out is not None else ""


def capacity() -> int | None:
    """Return what the smallest GPU here holds, without one the host's memory."""
    import psutil

    from profiler.nvml import open_gpus

    try:
        with open_gpus() as gpus:
            totals = [each.total_bytes for each in gpus.read() if each.total_bytes]
    except (VramwiseError, ImportError):
        totals = []
    return min(totals, default=psutil.virtual_memory().total)


@contextmanager
def live_line(folder: Path, console: Console | None = None) -> Iterator[Callable[[Sample], None]]:
    """Yield a function that shows a Sample; the line disappears at the end."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda sample: None
        return
    first_s: list[float] = []
    peaks: dict[str, int] = {}
    steps = LiveSteps(capacity())
    # redirecting would capture nothing: the command writes to the terminal itself
    with Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False) as live:

        def show(sample: Sample) -> None:
            first_s.append(sample.monotonic_s)
            del first_s[1:]
            if sample.device_used_bytes is not None:
                peaks["GPU"] = max(peaks.get("GPU", 0), sample.device_used_bytes)
            inside = last_sample(folder / "journal")
            elapsed_s = sample.monotonic_s - first_s[0]
            text = line(sample, elapsed_s, peaks, inside)
            coming = steps.feed(inside, elapsed_s)
            live.update(Text(f"{text}\n{coming}" if coming else text), refresh=True)

        yield show


def line(sample: Sample, elapsed_s: float, peaks: dict[str, int], inside: dict[str, object]) -> str:
    """Return the live line: time, GPU and its peak, torch, host, phase."""
    parts = [f"{int(elapsed_s) // 60:02d}:{int(elapsed_s) % 60:02d}"]
    parts.append(f"GPU {shown(sample.device_used_bytes)}")
    if "GPU" in peaks:
        parts[-1] += f" (peak {shown(peaks['GPU'])})"
    if isinstance(inside.get("a"), int):
        parts.append(f"torch {shown(inside['a'])}")  # type: ignore[arg-type]
    parts.append(f"host {shown(sample.host_bytes)}")
    parts.append(f"{sample.processes} processes" if sample.processes != 1 else "1 process")
    if inside.get("phase"):
        parts.append(str(inside["phase"]))
    return "  ".join(parts)
