"""The trainer's side of the reward processes: starts them, asks, waits, and kills what takes too long.

One process for each reward file (its functions share the module's globals) and for each built-in reward; all of
them work at once. Everything here happens in the caller's thread.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from planner import errors
from planner.errors import VramwiseError
from trainer.reward_worker import Call, Done, Failed, Loaded, Refused, Spec

BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from trainer.reward_worker import main; main(int(sys.argv[2]))"
)
LOAD_LIMIT_S = 600.0
"""For importing a file: it may load a judge model."""
ASYNC_SLACK_S = 5.0
"""An async call is cancelled in its process first; only if that does not answer is it killed."""
STOP_GRACE_S = 5.0
"""Once the run was asked to stop: schedulers kill 30 s after SIGTERM, and the state is still to be saved."""
TICK_S = 0.2
LOG_BYTES = 1 << 20
"""What rewards print beyond this is dropped."""


class Interrupted(Exception):
    """The run was asked to stop while rewards were still at work."""


@dataclass(slots=True)
class Ask:
    """One call on its way through a process."""

    function: int
    count: int
    arguments: dict[str, list[Any]]
    state: dict[str, Any]
    limit_s: float
    answer: Done | Failed | None = None
    sent_at: float = 0.0
    ended_at: float = 0.0
    deadline: float = 0.0


class Output:
    """What rewards print: kept until there is a file for it, at most LOG_BYTES of it."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._kept = bytearray()
        self._room = LOG_BYTES

    def add(self, data: bytes) -> None:
        """Take what a process printed."""
        self._kept += data[: self._room]
        if self._room and len(data) >= self._room:
            self._kept += b"\n(rewards print more than 1 MiB: the rest is dropped)\n"
        self._room -= min(self._room, len(data))
        if self._path is not None and self._kept:
            with self._path.open("ab") as file:
                file.write(self._kept)
            self._kept.clear()

    def to(self, path: Path) -> None:
        """Write to `path` from now on, and what was kept so far."""
        self._path = path
        self.add(b"")


class Worker:
    """One reward process, and the calls that it has to answer."""

    def __init__(self, specs: Sequence[Spec], output: Output) -> None:
        self.specs = list(specs)
        self.refused: Refused | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: Loaded | None = None
        self._output = output
        self._waiting: list[Ask] = []
        self._in_flight: dict[int, Ask] = {}
        self._number = 0
        self._start()

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come, the first (are the functions there?) included."""
        loading = self._process is not None and self._loaded is None
        return bool(self._waiting or self._in_flight or loading)

    @property
    def channels(self) -> list[Any]:
        """Return what `multiprocessing.connection.wait` may wait for."""
        return [self._channel, self._printed] if self._process else []

    def ask(self, asks: Sequence[Ask]) -> None:
        """Put calls in line."""
        self._waiting += asks

    def tend(self, now: float) -> None:
        """Read what came, kill what is late, and send what may be sent."""
        if self._process is not None:
            self._drain()
            try:
                while self._process is not None and self._channel.poll():
                    self._take(self._channel.recv())
            except (EOFError, OSError):
                self._died()
        self._expire(now)
        self._feed(now)

    def kill(self) -> None:
        """End the process and all that it started; calls under way are asked again when it is up."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._drain()
        self._channel.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        self._waiting = [*self._in_flight.values(), *self._waiting]
        self._in_flight = {}

    def _start(self) -> None:
        """Start the process, which then loads its functions."""
        self._loaded = None
        self._channel, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # a group of its own: what a reward starts is killed with it, and Ctrl-C is not for it
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._printed = self._process.stdout.fileno()
        os.set_blocking(self._printed, False)
        self._deadline = time.monotonic() + LOAD_LIMIT_S
        self._send(self.specs)

    def _feed(self, now: float) -> None:
        """Send calls: async ones at once, any other when none of them is under way."""
        if self._process is None and self._waiting:
            self._start()
        if self._loaded is None:
            return
        is_async = self._loaded.is_async
        blocked = any(not is_async[ask.function] for ask in self._in_flight.values())
        held = []
        # async ones first: they go on while the main thread over there is busy with another
        for ask in sorted(self._waiting, key=lambda ask: not is_async[ask.function]):
            alone = not is_async[ask.function]
            if alone and blocked:
                held.append(ask)
                continue
            blocked = blocked or alone
            self._number += 1
            self._in_flight[self._number] = ask
            ask.sent_at = ask.sent_at or now
            ask.deadline = now + ask.limit_s + (0 if alone else ASYNC_SLACK_S)
            self._send(
                Call(
                    number=self._number,
                    function=ask.function,
                    count=ask.count,
                    arguments=ask.arguments,
                    state=ask.state,
                    limit_s=ask.limit_s,
                )
            )
        self._waiting = held

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # it died: the next reading sees that
            self._channel.send(message)

    def _take(self, message: Any) -> None:
        if isinstance(message, Loaded):
            self._loaded = message
        elif isinstance(message, Refused):
            self.refused = message
            self.kill()
        else:
            ask = self._in_flight.pop(message.number)
            ask.answer, ask.ended_at = message, time.monotonic()

    def _expire(self, now: float) -> None:
        if self._process is not None and self._loaded is None and now > self._deadline:
            self._give_up([], f"not imported within {LOAD_LIMIT_S:g} s")
        late = [ask for ask in self._in_flight.values() if now > ask.deadline]
        if late:
            self._give_up(late, "")

    def _died(self) -> None:
        """Blame the call that the main thread had, or all if it had none; the others are asked again."""
        assert self._process is not None
        code = self._process.wait()
        reason = f"exit code {code}"
        if code < 0:
            reason = f"signal {signal.Signals(-code).name}"
        blamed = list(self._in_flight.values())
        if self._loaded is not None:
            is_async = self._loaded.is_async
            blamed = [ask for ask in blamed if not is_async[ask.function]] or blamed
        self._give_up(blamed, f"its process ended ({reason})")

    def _give_up(self, blamed: list[Ask], reason: str) -> None:
        """Kill the process; `blamed` have failed. A process that does not even load fails them all."""
        loaded = self._loaded is not None
        self.kill()
        if not loaded:
            blamed = self._waiting
            said = f"train.rewards: {', '.join(spec.name for spec in self.specs)}: {reason}"
            self.refused = Refused(kind="UsageError", message=said, hint=None)
        for ask in blamed:
            said = reason or f"no answer within {ask.limit_s:g} s"
            ask.answer, ask.ended_at = Failed(number=0, error=said), time.monotonic()
        self._waiting = [ask for ask in self._waiting if ask.answer is None]

    def _drain(self) -> None:
        while self._process is not None:
            try:
                data = os.read(self._printed, 1 << 16)
            except BlockingIOError:
                return
            self._output.add(data)
            if not data:
                return


class Pool:
    """All reward processes of a run."""

    def __init__(self, groups: Sequence[Sequence[Spec]]) -> None:
        """Start a process for each group and wait until its functions are loaded.

        Raises the UsageError or MissingExtraError that loading ended with.
        """
        self.output = Output()
        self._workers: list[Worker] = []
        try:
            self._workers += [Worker(specs, self.output) for specs in groups]
            self._wait(lambda: False)
            for worker in self._workers:
                if worker.refused is not None:
                    raise _error(worker.refused)
        except BaseException:
            self.close()
            raise

    def run(self, asks: Sequence[Sequence[Ask]], *, stopping: Callable[[], bool]) -> None:
        """Have each process answer its calls; raises Interrupted when `stopping` says so and they go on."""
        for worker, own in zip(self._workers, asks, strict=True):
            worker.ask(own)
        self._wait(stopping)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _wait(self, stopping: Callable[[], bool]) -> None:
        give_up_at: float | None = None
        while busy := [worker for worker in self._workers if worker.busy]:
            now = time.monotonic()
            for worker in busy:
                worker.tend(now)
            if give_up_at is None and stopping():
                give_up_at = now + STOP_GRACE_S
            if give_up_at is not None and now > give_up_at:
                self.close()
                raise Interrupted
            channels = [channel for worker in busy if worker.busy for channel in worker.channels]
            if channels:
                wait(channels, timeout=TICK_S)


def _error(refused: Refused) -> VramwiseError:
    """Return the error of another process as it was raised there."""
    kind = getattr(errors, refused.kind)
    error = kind.__new__(kind, refused.message)
    VramwiseError.__init__(error, refused.message, hint=refused.hint)
    return error
