"""`profile run -- CMD`: run any command unchanged and record the memory of everything it starts.

The command runs in this terminal with its own input and output. Beside it, this process samples
the GPU driver and /proc a few times a second; inside it, if it imports torch, the hooks of
profiler/startup tell phases and totals. Whatever way the command ends, the recording is kept.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from planner.errors import NoGpuError, UsageError
from profiler.gpu_reading import GpuReader, GpuReading, used_by_tree
from profiler.journal import ProcessJournal, read_journals
from profiler.nvml import open_gpus
from profiler.process_tree import ProcessTree

STARTUP = Path(__file__).parent / "startup"
TREE_EVERY_S = 0.5
"""Looking for new processes costs milliseconds on a busy machine: not at every sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """How a command is watched."""

    out: Path
    rate_hz: float = 10.0
    hooks: bool = True
    follow: bool = False
    """Follow every tensor storage of the device that the program works on: exact, but slower."""
    snapshot: str = "oom"
    """When to dump a CUDA memory snapshot: oom, peak (history on) or none."""
    stdout: IO[Any] | None = None
    """Where the command's stdout goes; None = where ours goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One look at the process tree."""

    monotonic_s: float
    device_used_bytes: int | None
    """GPU bytes of the tree, all GPUs; None = unknown."""
    gpu_used_bytes: int | None
    """All processes, all GPUs; None = unknown."""
    host_bytes: int | None
    processes: int


@dataclass(kw_only=True)
class Launch:
    """A finished command."""

    command: tuple[str, ...]
    exit_code: int
    """The command's own; 128 + N when signal N ended it, as shells count."""
    started_s: float
    elapsed_s: float
    samples: list[Sample]
    journals: list[ProcessJournal]
    gpus: list[GpuReading]
    versions: dict[str, str]
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)


def launch(
    command: Sequence[str],
    settings: LaunchSettings,
    *,
    on_sample: Callable[[Sample], None] = lambda sample: None,
    gpus: GpuReader | None = None,
) -> Launch:
    """Run `command` to its end under observation; raises UsageError if it cannot start."""
    journal_dir = _journal_dir(settings.out)
    reader, notes = _gpu_reader(gpus)
    started_s = time.monotonic()
    child = _start(command, settings, journal_dir)
    tree = ProcessTree(child.pid)
    samples: list[Sample] = []
    first: list[GpuReading] = []
    with _forwarded_signals(child) as interrupted:
        next_tree_s = 0.0
        while child.poll() is None:
            now_s = time.monotonic()
            readings = reader.read() if reader else []
            first = first or readings
            sample = _sample(now_s, tree, readings, known=bool(reader))
            samples.append(sample)
            on_sample(sample)
            if now_s >= next_tree_s:  # after the sample: even `true` gets one
                tree.refresh()
                next_tree_s = now_s + TREE_EVERY_S
            _wait(child, max(0.0, 1.0 / settings.rate_hz - (time.monotonic() - now_s)))
    code = child.returncode
    versions = reader.versions() if reader else {}
    if reader and gpus is None:
        reader.close()
    return Launch(
        command=tuple(command),
        exit_code=128 - code if code < 0 else code,
        started_s=started_s,
        elapsed_s=time.monotonic() - started_s,
        samples=samples,
        journals=read_journals(journal_dir),
        gpus=first,
        versions=versions,
        interrupted=bool(interrupted),
        notes=notes,
    )


def child_environment(settings: LaunchSettings, journal_dir: Path) -> dict[str, str]:
    """Return our environment plus what arms the start-up hook."""
    environment = dict(os.environ)
    if settings.hooks:
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP), inherited)))
        environment["VRAMWISE_JOURNAL"] = str(journal_dir.resolve())
        environment["VRAMWISE_RATE"] = str(settings.rate_hz)
        environment["VRAMWISE_SNAPSHOT"] = settings.snapshot
        environment["VRAMWISE_FOLLOW"] = "1" if settings.follow else ""
    return environment


def _journal_dir(out: Path) -> Path:
    folder = out / "journal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot write to {out}: {error.strerror}") from None
    for stale in folder.glob("process-*.jsonl"):
        stale.unlink()
    return folder


def _gpu_reader(given: GpuReader | None) -> tuple[GpuReader | None, list[str]]:
    if given is not None:
        return given, []
    try:
        return open_gpus(), []
    except NoGpuError as error:
        return None, [f"GPU memory of the processes is unknown: {error.message}"]


def _start(
    command: Sequence[str], settings: LaunchSettings, journal_dir: Path
) -> subprocess.Popen[bytes]:
    if not command:
        raise UsageError("CMD: nothing to run", hint="vramwise profile run -- python train.py")
    try:
        return subprocess.Popen(
            list(command), env=child_environment(settings, journal_dir), stdout=settings.stdout
        )
    except FileNotFoundError:
        where = "in this folder" if os.sep in command[0] else "on PATH"
        raise UsageError(
            f"CMD: {command[0][:200]!r} is not {where}", hint="check the spelling, or give a path"
        ) from None
    except OSError as error:
        usual = shutil.which("python3") or "python3"
        raise UsageError(
            f"CMD: cannot run {command[0][:200]!r}: {error.strerror}",
            hint=f"a Python script is run as: {usual} {command[0][:200]}",
        ) from None


def _sample(now_s: float, tree: ProcessTree, readings: list[GpuReading], *, known: bool) -> Sample:
    used = [gpu.used_bytes for gpu in readings]
    return Sample(
        monotonic_s=now_s,
        device_used_bytes=used_by_tree(readings, tree.ever, set(psutil.pids())) if known else None,
        gpu_used_bytes=None if not used or None in used else sum(u for u in used if u is not None),
        host_bytes=tree.rss_bytes(),
        processes=len(tree.pids),
    )


def _wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return


@contextmanager
def _forwarded_signals(child: subprocess.Popen[bytes]) -> Any:
    """Outlive Ctrl-C and SIGTERM until the command has ended, so that its recording is kept.

    A terminal sends Ctrl-C to the command as well; SIGTERM and SIGHUP reach only us and are
    passed on. Yields a list that is non-empty once a signal came.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGINT:
            child.send_signal(number)
        elif len(received) > 2:  # asked three times: the command ignores Ctrl-C
            child.kill()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not the main thread: signals are not ours to handle
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
