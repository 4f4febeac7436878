"""Processes that plan beside the app's own: one interpreter draws pages, others do the arithmetic.

    python -m app.workers

A worker reads (function, arguments) from stdin and writes the result to stdout, both pickled, until
stdin ends with the process that started it. Nothing but this app writes to that pipe. Long jobs have
a worker of their own, which gives way to the short ones.
"""

import atexit
import importlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.errors import UsageError, VramwiseError

COUNT = "VRAMWISE_APP_WORKERS"
"""Environment: how many workers for short jobs; 0 = everything in the app's own process."""
NICER = 5
PROTOCOL = pickle.HIGHEST_PROTOCOL
LONG, SHORT = "long", "short"


class Worker:
    """One process; started when it is first asked, and again after it died."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return what the job returns; raises what it raises, OSError or EOFError if it died."""
        process = self._running()
        assert process.stdin
        assert process.stdout
        try:
            pickle.dump((job.__module__, job.__qualname__, arguments), process.stdin, PROTOCOL)
            process.stdin.flush()
            worked, answer = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self.stop()
            raise
        if not worked:
            message, hint = answer
            raise UsageError(message, hint=hint)
        return answer

    def _running(self) -> "subprocess.Popen[bytes]":
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.workers", self.kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[1],
            )
        return self.process

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Pool:
    """Workers for short jobs and one for long ones; a job whose worker dies is done right here."""

    def __init__(self, count: int) -> None:
        self.workers = [Worker(SHORT) for _ in range(count)] + [Worker(LONG)]
        self.idle: dict[str, queue.SimpleQueue[Worker]] = {
            SHORT: queue.SimpleQueue(),
            LONG: queue.SimpleQueue(),
        }
        for worker in self.workers:
            self.idle[worker.kind].put(worker)
        atexit.register(self.stop)

    def run(self, job: Callable[..., Any], arguments: tuple[Any, ...], *, kind: str = SHORT) -> Any:
        """Return the job's result, after the jobs that were asked for before."""
        worker = self.idle[kind].get()
        try:
            return worker.ask(job, arguments)
        except (OSError, EOFError, pickle.UnpicklingError):
            return job(*arguments)
        finally:
            self.idle[kind].put(worker)

    def stop(self) -> None:
        """End every worker."""
        for worker in self.workers:
            worker.stop()


_pool: Pool | None = None
_making = threading.Lock()


def pool() -> Pool | None:
    """Return the server's workers, made when first asked for; None where there are to be none."""
    global _pool
    count = os.environ.get(COUNT, "")
    wanted = int(count) if count.isdigit() else max(1, (os.cpu_count() or 2) - 1)
    if wanted == 0:
        return None
    with _making:
        if _pool is None:
            _pool = Pool(wanted)
        return _pool


def run(job: Callable[..., Any], *arguments: Any, kind: str = SHORT) -> Any:
    """Return what a job of a module returns, done by a worker where there are any."""
    found = pool()
    return job(*arguments) if found is None else found.run(job, arguments, kind=kind)


def main(kind: str) -> None:
    """Answer until stdin ends."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a job prints is no answer
    if kind == LONG and hasattr(os, "nice"):
        os.nice(NICER)
    while True:
        try:
            module, name, arguments = pickle.load(asked)
        except EOFError:
            return
        try:
            reply = (True, getattr(importlib.import_module(module), name)(*arguments))
        except VramwiseError as error:
            reply = (False, (error.message, error.hint))
        pickle.dump(reply, answers, PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else SHORT)
