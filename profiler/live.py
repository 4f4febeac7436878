"""The one live line of `profile run`, on stderr and only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from profiler.journal import last_sample
from profiler.launch import Sample
from profiler.report import shown


@contextmanager
def live_line(folder: Path, console: Console | None = None) -> Iterator[Callable[[Sample], None]]:
    """Yield a function that shows a Sample; the line disappears at the end."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda sample: None
        return
    first_s: list[float] = []
    peaks: dict[str, int] = {}
    # redirecting would capture nothing: the command writes to the terminal itself
    with Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False) as live:

        def show(sample: Sample) -> None:
            first_s.append(sample.monotonic_s)
            del first_s[1:]
            if sample.device_used_bytes is not None:
                peaks["GPU"] = max(peaks.get("GPU", 0), sample.device_used_bytes)
            inside = last_sample(folder / "journal")
            live.update(
                Text(line(sample, sample.monotonic_s - first_s[0], peaks, inside)), refresh=True
            )

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
