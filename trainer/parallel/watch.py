"""What ends one rank ends all of them, within a time limit, and one of them says why in one line.

A rank in a collective waits for ranks that will never come: so each says on torchrun's store that it lives, and
what ended it. A thread a rank reads that; it interrupts the work here, and ends the process where that is stuck.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from planner.errors import VramwiseError
from planner.verbs.edge import fail, in_one_line
from trainer.parallel.ranks import Ranks

LAUNCHER = "VRAMWISE_LAUNCHER"
"""Set by `vramwise train --nproc`, another one each time: it tells of the deaths of its own ranks."""
BEAT_S = 1.0
"""Between two signs of life, and two looks at those of others."""
SILENCE_S = 180.0
"""Without a sign of life a rank counts as gone: its machine is lost, or frozen."""
LOOK_S = 5.0
"""How long beats are watched to find who is gone, once a connection broke."""
OWN_WORD_S = 1.5
"""For this rank's own error, which says it better: often all fail alike."""
GRACE_S = 20.0
"""For the work here to stop by itself."""
TOLD_S = 15.0
"""For the rank that speaks to have spoken; torchrun ends it soon after another one has ended."""
GONE_CODE = 1
SIGNAL = signal.SIGRTMIN + 3
CONNECTION_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Why a run ended early."""

    rank: int
    """Whose end it is."""
    message: str
    hint: str | None
    code: int
    gone: bool = False
    """The rank died without a word: killed, or its machine lost."""

    def error(self, ranks: Ranks, host: str) -> VramwiseError:
        """Return what the rank that speaks raises for the end of another."""
        where = f"rank {self.rank} of {ranks.size} on {host}"
        error = VramwiseError(
            f"{where} {self.message}" if self.gone else f"{where}: {self.message}", hint=self.hint
        )
        error.exit_code = self.code
        return error


class OtherRankEnded(BaseException):
    """Raised in the work of a rank when another has ended the run; nothing there takes it for its own error."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs."""

    host: str
    launcher: str


class Watch:
    """`with Watch(ranks):` around everything that a rank does; for several ranks only."""

    def __init__(self, ranks: Ranks, *, hint: str | None = None, as_json: bool = False) -> None:
        self._ranks = ranks
        self._as_json = as_json
        self._store = own_store()
        self._hint = hint
        self._ending: Ending | None = None
        self._working = True
        self._spoken = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._beats: dict[int, tuple[bytes, float]] = {}
        here = Place(socket.gethostname(), os.environ.get(LAUNCHER, ""))
        self._store.set(f"beat/{ranks.rank}", "0")
        self.places: list[Place] = ranks.gather_objects(here)
        """Of every rank; nobody has a place before all are there."""
        self._thread = threading.Thread(target=self._watch, name="other ranks", daemon=True)

    def __enter__(self) -> "Watch":
        self._before = signal.signal(SIGNAL, self._interrupt)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._working = False
        try:
            if error is None or isinstance(error, SystemExit):
                with suppress(RuntimeError):  # the store may be gone with the rank that held it
                    self._store.set(f"done/{self._ranks.rank}", "1")
            else:
                self._end(error)
        finally:
            self._stop.set()
            self._thread.join(timeout=2 * BEAT_S)
            signal.signal(SIGNAL, self._before)

    def _end(self, error: BaseException) -> None:
        """Decide what this rank ends with: the one that speaks raises the error to be shown."""
        ranks = self._ranks
        own = not isinstance(error, OtherRankEnded) and not is_broken_connection(error)
        if own and os.environ.get("VRAMWISE_DEBUG"):
            traceback.print_exception(error)
        if own:
            self._record(_ending(ranks.rank, error))
        elif self._ending is None:
            self._ending = self._find_ending(error)
        ending = self._ending
        assert ending is not None
        if not self._speaks(ending):
            self._wait_for("told")
            raise SystemExit(ending.code) from None
        with self._lock:
            spoken, self._spoken = self._spoken, True
        self._tell()
        if spoken or self._launcher_says(ending):
            raise SystemExit(ending.code) from None
        if own:
            return  # the error itself, as one process would show it
        raise ending.error(ranks, self.places[ending.rank].host) from None

    def _record(self, ending: Ending) -> None:
        """Write why the run ends, unless another rank did before; keep what counts."""
        text = json.dumps(asdict(ending))
        try:
            self._ending = Ending(**json.loads(self._store.compare_set("ended", "", text)))
        except (RuntimeError, ValueError):  # no store any more: its launcher is gone
            self._ending = ending

    def _find_ending(self, error: BaseException) -> Ending:
        """Return why a connection broke: what another rank wrote, or who shows no life."""
        deadline = time.monotonic() + (LOOK_S if self._ranks.first else LOOK_S + 3 * BEAT_S)
        while time.monotonic() < deadline:
            if (ending := self._read()) is not None:
                return ending
            time.sleep(BEAT_S / 4)
        silent = self._silent_ranks(3 * BEAT_S)
        self._record(
            self._gone(silent[0])
            if silent
            else Ending(rank=self._ranks.rank, message=in_one_line(error), hint=self._hint, code=1)
        )
        assert self._ending is not None
        return self._ending

    def _gone(self, rank: int) -> Ending:
        return Ending(
            rank=rank,
            message="is gone: killed, or its machine is lost",
            hint=self._hint,
            code=GONE_CODE,
            gone=True,
        )

    def _speaks(self, ending: Ending) -> bool:
        """Return whether this rank says it: the first does, or the next where the first one is gone."""
        return self._ranks.rank == (1 if ending.gone and ending.rank == 0 else 0)

    def _launcher_says(self, ending: Ending) -> bool:
        """Return whether this rank's own launcher says it, with the signal that killed the rank."""
        mine, theirs = self.places[self._ranks.rank], self.places[ending.rank]
        return ending.gone and bool(mine.launcher) and mine.launcher == theirs.launcher

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._working:
            raise OtherRankEnded

    def _watch(self) -> None:
        """Show life and look at the others', until the work here is through or the run has ended."""
        beat, lost = 0, None
        while self._ending is None:
            if self._stop.wait(BEAT_S):
                return
            try:
                beat, lost = beat + 1, None
                self._store.set(f"beat/{self._ranks.rank}", str(beat))
                self._ending = self._ending or self._read() or self._miss()
            except RuntimeError:
                lost = lost or time.monotonic()
                if time.monotonic() - lost > SILENCE_S:
                    self._ending = self._stranded()
        if self._stop.wait(OWN_WORD_S):
            return
        self._speak(self._ending)
        if self._working:
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        if not self._stop.wait(GRACE_S):
            # the work waits in C++ for a rank that is not there
            sys.stderr.flush()
            os._exit(self._ending.code)

    def _stranded(self) -> Ending:
        said = "lost the connection to torchrun's store"
        return Ending(rank=self._ranks.rank, message=said, hint=self._hint, code=1)

    def _speak(self, ending: Ending) -> None:
        """Say why the run ends, if that is this rank's to do and its work has not."""
        if not self._speaks(ending):
            return
        with self._lock:
            spoken, self._spoken = self._spoken, True
        if not spoken and not self._launcher_says(ending):
            error = ending.error(self._ranks, self.places[ending.rank].host)
            fail(error.message, error.hint, error.exit_code, as_json=self._as_json)
        self._tell()

    def _read(self) -> Ending | None:
        """Return what another rank wrote of the run's end."""
        if not self._store.check(["ended"]):
            return None
        return Ending(**json.loads(self._store.get("ended")))

    def _miss(self) -> Ending | None:
        """Note a rank that has shown no life for long: the first looks after all, all after the first."""
        silent = self._silent_ranks(SILENCE_S)
        if not silent:
            return None
        self._record(self._gone(silent[0]))
        return self._ending

    def _silent_ranks(self, limit_s: float) -> list[int]:
        """Return the ranks whose beat has not changed for so long, and which are not through."""
        ranks = self._ranks
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        if not ranks.first:
            others = others[:1]
        try:
            values = self._store.multi_get([f"beat/{rank}" for rank in others])
        except RuntimeError:
            return []
        now = time.monotonic()
        for rank, value in zip(others, values, strict=True):
            if self._beats.get(rank, (b"", 0.0))[0] != value:
                self._beats[rank] = (value, now)
        late = [rank for rank in others if now - self._beats[rank][1] > limit_s]
        return [rank for rank in late if not self._store.check([f"done/{rank}"])]

    def _tell(self) -> None:
        with suppress(RuntimeError):
            self._store.set("told", "1")

    def _wait_for(self, key: str) -> None:
        deadline = time.monotonic() + TOLD_S
        with suppress(RuntimeError):
            while time.monotonic() < deadline and not self._store.check([key]):
                time.sleep(BEAT_S / 4)


def own_store() -> Any:
    """Return a connection of our own to the store that torchrun's environment names."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"vramwise/{run}/{again}", store)


def in_unison(ranks: Ranks, what: str, *, wait_s: float = LOOK_S) -> bool:
    """Return whether all ranks say `what` within `wait_s`: only then may they act together again.

    Asked after an error, when nobody knows what the others do: nothing here waits for longer.
    """
    if not ranks.several:
        return True
    try:
        store = own_store()
        key = f"unison/{what}"
        store.add(key, 1)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if store.add(key, 0) >= ranks.size:
                return True
            time.sleep(0.05)
    except RuntimeError:
        pass
    return False


@contextmanager
def watched(ranks: Ranks, *, hint: str | None = None, as_json: bool = False) -> Iterator[None]:
    """Be one of several ranks inside; nothing for a rank that is alone."""
    if not ranks.several:
        yield
        return
    with Watch(ranks, hint=hint, as_json=as_json):
        yield


def _ending(rank: int, error: BaseException) -> Ending:
    if isinstance(error, VramwiseError):
        return Ending(rank=rank, message=error.message, hint=error.hint, code=error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Ending(rank=rank, message="interrupted", hint=None, code=130)
    hint = "this is a bug or a broken installation; VRAMWISE_DEBUG=1 shows where"
    return Ending(rank=rank, message=in_one_line(error), hint=hint, code=1)


def is_broken_connection(error: BaseException) -> bool:
    """Return whether a collective failed: it is never this rank's own fault."""
    if isinstance(error, VramwiseError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error) for word in CONNECTION_WORDS)
