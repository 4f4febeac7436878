"""The processes that a command started, and the host memory that they hold."""

import psutil


class ProcessTree:
    """A root process and everything it starts, also what is reparented after its parent died."""

    def __init__(self, root_pid: int) -> None:
        self._members: dict[int, psutil.Process] = {}
        self._adopt(root_pid)
        self.ever: set[int] = {root_pid}
        """Every PID seen so far."""

    def refresh(self) -> None:
        """Look for new children of every known member and forget the dead."""
        # children(recursive) of the root misses what a dead parent left behind
        parents = _parents()
        known = set(self._members)
        grown = True
        while grown:
            grown = False
            for pid, parent in parents.items():
                if parent in known and pid not in known:
                    known.add(pid)
                    grown = True
        for pid in known - set(self._members):
            self._adopt(pid)
        self._members = {p: m for p, m in self._members.items() if m.is_running()}
        self.ever |= set(self._members)

    @property
    def pids(self) -> set[int]:
        """Members alive at the last refresh."""
        return set(self._members)

    def rss_bytes(self) -> int | None:
        """Return the resident memory of all members; None when all have vanished.

        Pages shared by forked workers count once per process, as in `ps`.
        """
        sizes = [size for member in self._members.values() if (size := _rss(member)) is not None]
        return sum(sizes) if sizes else None

    def _adopt(self, pid: int) -> None:
        try:
            self._members[pid] = psutil.Process(pid)
        except psutil.Error:  # it has gone again already
            return


def _parents() -> dict[int, int]:
    parents = {}
    for process in psutil.process_iter(["ppid"]):
        parents[process.pid] = process.info["ppid"]
    return parents


def _rss(process: psutil.Process) -> int | None:
    try:
        return int(process.memory_info().rss) or None  # a zombie has none to tell
    except psutil.Error:
        return None
