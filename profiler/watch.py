"""`profile watch`: GPU memory by GPU and process, live or once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from profiler.gpu_reading import GpuReader, GpuReading
from profiler.nvml import NvmlReader, open_gpus
from profiler.report import UNKNOWN, shown


@contextmanager
def open_reader(*, record: Path | None, replay: Path | None) -> Iterator[GpuReader]:
    """Yield this machine's GPUs, recorded to `record` if given, or a replayed session."""
    from profiler.nvml_session import RecordedNvml, ReplayedNvml

    if replay is not None:
        with NvmlReader(ReplayedNvml.load(replay)) as reader:
            yield reader
    elif record is not None:
        import pynvml

        with RecordedNvml(pynvml, record) as library, NvmlReader(library) as reader:
            yield reader
    else:
        with open_gpus() as reader:
            yield reader


def reading_document(reader: GpuReader) -> dict[str, Any]:
    """Return one reading as a JSON document: unknown is null."""
    gpus = []
    for gpu in reader.read():
        entry = asdict(gpu)
        for process in entry["processes"] or ():
            process["name"] = process_name(process["pid"])
        gpus.append(entry)
    return {"versions": reader.versions(), "gpus": gpus}


def watch(reader: GpuReader, *, once: bool, rate_hz: float) -> None:
    """Print one reading, or redraw until Ctrl-C."""
    console = Console()
    peaks: dict[str, int] = {}
    if once:
        console.print(screen(reader.read(), peaks, reader.versions()))
        return
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                live.update(screen(reader.read(), peaks, reader.versions()), refresh=True)
                time.sleep(1.0 / rate_hz)
    except KeyboardInterrupt:
        console.print(screen(reader.read(), peaks, reader.versions()))


def screen(gpus: list[GpuReading], peaks: dict[str, int], versions: dict[str, str]) -> Group:
    """Return the view: a table of GPUs and a table of processes. `peaks` is kept up to date."""
    heads = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("GPU", "name", "used", "peak", "total", "free"):
        heads.add_column(column, justify="left" if column in ("GPU", "name") else "right")
    processes = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("GPU", "PID", "process", "used"):
        processes.add_column(column, justify="right" if column in ("PID", "used") else "left")
    notes: list[str] = []
    for gpu in gpus:
        if gpu.used_bytes is not None:
            peaks[gpu.label] = max(peaks.get(gpu.label, 0), gpu.used_bytes)
        heads.add_row(
            gpu.label,
            gpu.name,
            shown(gpu.used_bytes),
            shown(peaks.get(gpu.label)),
            shown(gpu.total_bytes),
            shown(gpu.free_bytes),
        )
        for process in gpu.processes or ():
            name = process_name(process.pid)
            processes.add_row(gpu.label, str(process.pid), name, shown(process.used_bytes))
        if gpu.processes is None:
            processes.add_row(gpu.label, UNKNOWN, UNKNOWN, UNKNOWN)
        notes += [f"GPU {gpu.label}: {note}" for note in gpu.notes]
    title = " ".join(f"{name} {version}" for name, version in versions.items())
    return Group(
        Text(title, style="dim"), heads, Text(), processes, *(Text(n, style="dim") for n in notes)
    )


def process_name(pid: int) -> str:
    """Return the command of a process, or why it is not known."""
    try:
        process = psutil.Process(pid)
        return " ".join(process.cmdline())[:60] or process.name()
    except psutil.NoSuchProcess:
        return "not visible from here"
    except psutil.AccessDenied:
        return "of another user"
