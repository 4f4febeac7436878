"""One reporter on a thread of its own: no step waits for it, and what it raises ends it alone."""

import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from trainer.reporters.protocol import Reporter, RunFacts, Started, Table

START_LIMIT_S = 30.0
"""What the first step waits; a tracker that is slower to start gets what was logged when it is there."""
GIVE_UP_S = 600.0
"""Of a start: a database that is made, a network that comes and goes."""
CALL_LIMIT_S = 120.0
"""Of one call: a tracker that takes longer is stuck, and what waits for it would pile up."""
FINISH_LIMIT_S = 30.0
STOP_LIMIT_S = 5.0
"""After SIGTERM, once the state is saved."""
MAX_ERROR_CHARACTERS = 200
THREAD = "report to "


class Courier:
    """Carries what a run says to one reporter, in order."""

    def __init__(self, name: str, make: Callable[[str], Reporter]) -> None:
        self.name = name
        self.started: Started | None = None
        self.failed = ""
        """Why the reporter was dropped; "" while it works."""
        self.waits = threading.Event()
        """Set when it has started, or has failed to."""
        self._make = make
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"{THREAD}{name}", daemon=True)

    def start(self, facts: RunFacts) -> None:
        """Start the reporter; `waits` is set when it is there."""

        def job() -> None:
            self._reporter = self._make(self.name)
            self.started = self._reporter.start(facts)
            self.waits.set()

        self._jobs.put(job)
        self._thread.start()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Have figures logged."""
        self._send(lambda: self._reporter.log(step, figures))

    def table(self, step: int, name: str, columns: Table) -> None:
        """Have a table logged."""
        self._send(lambda: self._reporter.table(step, name, columns))

    def finish(self, *, failed: bool) -> None:
        """Have the run ended; `join` waits for that."""
        self._send(lambda: self._reporter.finish(failed=failed))
        self._jobs.put(None)

    def join(self, deadline: float) -> None:
        """Wait until everything is done, or until `deadline` of time.monotonic."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self.failed:
            left = max(0, self._jobs.qsize() - 2)  # less finish, and the end of the queue
            self.failed = f"not done in time; about {left} entries are not sent"

    def check(self) -> None:
        """Give the reporter up if it has been at one call for too long."""
        since = self._busy_since
        limit = GIVE_UP_S if self.started is None else CALL_LIMIT_S
        if not self.failed and since is not None and time.monotonic() - since > limit:
            self.failed = f"no answer within {limit:g} s"

    def _send(self, job: Callable[[], None]) -> None:
        if not self.failed:
            self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self.failed:
            self._busy_since = time.monotonic()
            try:
                job()
            except BaseException as error:  # SystemExit too: a tracker must not end a run
                self.failed = self.failed or one_line(error)
                self.waits.set()
            self._busy_since = None


class Muffled:
    """A stdout that swallows what trackers print: it is for a verb's answer."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what is not of a courier's thread."""
        if threading.current_thread().name.startswith(THREAD):
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def one_line(error: BaseException) -> str:
    """Return an error as one short line; a package that is not installed with what installs it."""
    if isinstance(error, ModuleNotFoundError):
        extra = "trackio" if error.name == "trackio" else "reporters"
        return f'{error.name} is not installed: pip install "vramwise[{extra}]"'
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:MAX_ERROR_CHARACTERS].removesuffix(": ")
