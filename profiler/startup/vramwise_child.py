"""The recorder inside a program that `profile run` started: phases and totals to a journal.

The journal is JSON lines appended with one write each, so what was written survives a crash and
kill -9; one file per process, so ranks and forks never share one. Standard library only, Python
3.9 or newer. Every failure in here is noted in the journal and switches recording off: the
program goes on as if nothing had been there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_MIN_GAP_S = 0.05
_EVERY_STEP_UP_TO = 1000


def _load(name: str) -> Any:
    """Import a file of this folder by path, whatever the program did to sys.path."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, os.path.join(_HERE, name + ".py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Journal:
    """Appends JSON lines to one file; opened with the first line."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._descriptor: int | None = None
        self.broken = False

    def write(self, **line: Any) -> None:
        """Append one line; a full disk ends the journal, not the program."""
        if self.broken:
            return
        line["t"] = time.monotonic()
        try:
            if self._descriptor is None:
                path = os.path.join(self.folder, f"process-{os.getpid()}.jsonl")
                flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
                self._descriptor = os.open(path, flags, 0o600)
            os.write(self._descriptor, (json.dumps(line) + "\n").encode())
        except OSError:
            self.broken = True


class Child:
    """Everything recorded in one process."""

    def __init__(self, folder: str, *, rate_hz: float, snapshot: str, follow: bool) -> None:
        self.folder, self.rate_hz = folder, rate_hz
        self.snapshot_when, self.follow = snapshot, follow
        self.torch: Any = None
        self.follower: Any = None
        self.lock = threading.RLock()
        self.tracker = _load("vramwise_phases").PhaseTracker(self._on_change)
        self.meters = _load("vramwise_meters")
        self._start_fresh()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def torch_ready(self, torch: Any) -> None:
        """torch has just been imported: hook it and say who we are."""
        self.torch = torch
        try:
            self.tracker.install(torch)
            self._new_book(self.meters.CpuMeter(torch))
            if self.follow:
                self._start_following()
            self._hello()
            atexit.register(self._goodbye)
        except Exception as error:
            self._give_up(error)

    def generation_ready(self, module: ModuleType, owner: str, names: tuple[str, ...]) -> None:
        """A library with a generate() has just been imported."""
        for name in names:
            if hasattr(module, owner):
                self.tracker.wrap_generate(getattr(module, owner), name)

    def marker_ready(self, module: ModuleType) -> None:
        """The bundled trainer marks its phases itself: it does not generate by generate()."""
        self.tracker.wrap_marker(module.PhaseMemory, "__call__")

    def _start_fresh(self) -> None:
        self.journal = Journal(self.folder)
        self.book: Any = None
        self.last_line_s = 0.0
        self.sampler: threading.Thread | None = None
        self.greeted = False
        self.dumps = 0
        self.dumped_bytes = 0
        self.stack_on = False

    def _after_fork(self) -> None:
        # a forked worker is a process of its own: new file, no sampler thread, no inherited lock
        self.lock = threading.RLock()
        self._start_fresh()
        if self.torch is not None:
            self._new_book(self.meters.CpuMeter(self.torch))

    def _new_book(self, meter: Any) -> None:
        self.book = self.meters.PeakBook(meter, self.tracker)

    def _hello(self) -> None:
        torch, self.greeted = self.torch, True
        rank = os.environ.get("RANK")
        self.journal.write(
            e="start",
            pid=os.getpid(),
            ppid=os.getppid(),
            rank=int(rank) if rank and rank.isdigit() else None,
            argv=[str(part)[:500] for part in sys.argv][:40],
            python=sys.version.split()[0],
            torch=str(torch.__version__),
        )
        if self.rate_hz > 0:
            self.sampler = threading.Thread(target=self._sample, name="vramwise", daemon=True)
            self.sampler.start()

    def _pick_meter(self) -> None:
        """Move on to the CUDA meter once the program has touched a GPU."""
        cuda = self.torch.cuda
        if self.book.meter.kind == "cpu" and cuda.is_available() and cuda.is_initialized():
            self._new_book(_load("vramwise_cuda").CudaMeter(self.torch))
            _load("vramwise_snapshots").prepare(self)
            device = cuda.get_device_properties(cuda.current_device())
            self.journal.write(e="device", name=device.name, total=device.total_memory)

    def _on_change(self, old: str, new: str) -> None:
        if self.journal.broken:
            return
        try:
            with self.lock:
                self._close_phase(old, new)
        except Exception as error:
            self._give_up(error)

    def _close_phase(self, old: str, new: str) -> None:
        if not self.greeted:
            self._hello()
        self._pick_meter()
        peak, entry = self.book.close(old)
        if entry is not None:
            self.journal.write(e="peak", phase=old, **entry)
        self._follow(old, new)
        now_s = time.monotonic()
        # a long run changes phase millions of times: the timeline needs only some of them
        early_step = old == "step" and self.tracker.steps <= _EVERY_STEP_UP_TO
        if entry is not None or early_step or now_s - self.last_line_s >= _MIN_GAP_S:
            self.last_line_s = now_s
            self.journal.write(e="phase", old=old, new=new, peak=peak, step=self.tracker.steps)
        if old == "step" and self.book.meter.kind == "cuda" and self.snapshot_when == "peak":
            _load("vramwise_snapshots").at_peak(self)

    def _start_following(self) -> None:
        """Enter the dispatch mode now, below any that the program may enter and leave later."""
        sys.path.append(os.path.dirname(os.path.dirname(_HERE)))  # last: hides nothing
        from profiler.follower import Follower

        self.follower = Follower(self.tracker)
        self.follower.start()

    def _follow(self, old: str, new: str) -> None:
        """With --follow: hand the change to the storage follower, and write what it found."""
        if self.follower is None:
            return
        if self.follower.on_change(old, new) or not new:
            self.journal.write(e="follow", **self.follower.to_dict())

    def _sample(self) -> None:
        """Write totals `rate_hz` times a second until the process ends."""
        journal, interval_s = self.journal, 1.0 / self.rate_hz
        while not journal.broken and journal is self.journal:
            time.sleep(interval_s)
            try:
                with self.lock:
                    self._pick_meter()  # a load that runs out ends before the first phase does
                    allocated, reserved = self.book.meter.read()
                journal.write(
                    e="s",
                    phase=self.tracker.phase,
                    step=self.tracker.steps,
                    a=allocated,
                    r=reserved,
                )
            except Exception as error:
                self._give_up(error)

    def _goodbye(self) -> None:
        if self.greeted and not self.journal.broken:
            self._on_change(self.tracker.phase, "")
            self.journal.write(e="end", step=self.tracker.steps)
            self.journal.broken = True

    def _give_up(self, error: Exception) -> None:
        self.journal.write(e="error", error=repr(error)[:300])
        self.journal.broken = True
        with contextlib.suppress(Exception):
            self.tracker.remove()


def watched() -> dict[str, Callable[[ModuleType], None]]:
    """Modules to wait for, and what to do when the program has imported them."""
    child = Child(
        os.environ["VRAMWISE_JOURNAL"],
        rate_hz=float(os.environ.get("VRAMWISE_RATE", "10")),
        snapshot=os.environ.get("VRAMWISE_SNAPSHOT", "oom"),
        follow=bool(os.environ.get("VRAMWISE_FOLLOW")),
    )
    generates = functools.partial
    return {
        "torch": child.torch_ready,
        "trainer.phase_memory": child.marker_ready,
        "transformers.generation.utils": generates(
            child.generation_ready, owner="GenerationMixin", names=("generate", "generate_batch")
        ),
        "vllm.entrypoints.llm": generates(
            child.generation_ready, owner="LLM", names=("generate", "chat")
        ),
    }
