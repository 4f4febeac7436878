"""What recorded processes wrote down, read back: journals -> phases, peaks and a timeline."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from profiler.recording import PHASES
from profiler.recording_parts import PhaseRecord


@dataclass(kw_only=True)
class ProcessJournal:
    """One process's journal, complete or as far as it got."""

    pid: int
    rank: int | None = None
    start: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    peaks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Largest `peak` line of every phase."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    follow: dict[str, Any] = field(default_factory=dict)
    """The last summary of a storage follower (`--follow`)."""
    steps: int = 0
    ended: bool = False
    ooms: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """Largest allocated bytes of any phase."""
        return max((line["peak"] for line in self.peaks.values()), default=0)

    def phase_at(self, monotonic_s: float) -> str:
        """Return the phase that the process was in at a moment of the monotonic clock."""
        phase = self.changes[0]["old"] if self.changes else ""
        for change in self.changes:
            if change["t"] > monotonic_s:
                break
            phase = change["new"]
        return phase

    def phases(self) -> tuple[PhaseRecord, ...]:
        """Return the phases in the order of PHASES, each at its own peak."""
        if self.follow.get("phases"):
            found = {each["name"]: self._followed(each) for each in self.follow["phases"]}
            return tuple(found[name] for name in (*PHASES, "other") if name in found)
        return tuple(
            phase_record(name, self.peaks[name])
            for name in (*PHASES, "other")
            if name in self.peaks
        )

    def _followed(self, each: dict[str, Any]) -> PhaseRecord:
        """Return a followed phase; on a GPU what the allocator held beyond tensors is overhead."""
        phase = PhaseRecord(**each)
        allocator = self.peaks.get(phase.name)
        if self.follow.get("device") != "cuda" or allocator is None:
            return phase
        rest = max(0, int(allocator["peak"]) - phase.peak_bytes)
        terms = {**phase.terms_bytes, "overhead": phase.terms_bytes.get("overhead", 0) + rest}
        return replace(
            phase,
            peak_bytes=phase.peak_bytes + rest,
            terms_bytes={term: size for term, size in terms.items() if size},
            reserved_bytes=allocator.get("reserved"),
        )


def read_journals(folder: Path) -> list[ProcessJournal]:
    """Read every journal in `folder`, ranks first; a torn last line is skipped."""
    journals = [_read(path) for path in sorted(folder.glob("process-*.jsonl"))]
    return sorted(
        journals, key=lambda j: (j.rank is None, j.rank if j.rank is not None else 0, -j.peak_bytes)
    )


def _read(path: Path) -> ProcessJournal:
    journal = ProcessJournal(pid=int(path.stem.removeprefix("process-")))
    with path.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:
                journal.errors.append(
                    "a journal line is torn: the process was killed or the disk is full"
                )
                continue
            _take(journal, line)
    return journal


def _take(journal: ProcessJournal, line: dict[str, Any]) -> None:
    match line.get("e"):
        case "start":
            journal.start, journal.rank = line, line.get("rank")
        case "device":
            journal.device = line
        case "peak":
            journal.peaks[line["phase"]] = line
        case "phase":
            journal.changes.append(line)
            journal.steps = max(journal.steps, line.get("step", 0))
        case "s":
            journal.samples.append(line)
            journal.steps = max(journal.steps, line.get("step", 0))
        case "follow":
            journal.follow = line
        case "oom":
            journal.ooms.append(line)
        case "snapshot":
            journal.snapshots.append(line["file"])
        case "error":
            journal.errors.append(f"recording stopped: {line['error']}")
        case "end":
            journal.ended, journal.steps = True, line.get("step", journal.steps)


def phase_record(name: str, line: dict[str, Any]) -> PhaseRecord:
    """Split a phase's peak: what has an owner by name, and the rest, which is activations."""
    peak = int(line["peak"])
    terms = {term: int(size) for term, size in line.get("terms", {}).items()}
    terms["activations"] = terms.get("activations", 0) + max(0, peak - sum(terms.values()))
    return PhaseRecord(
        name=name,
        peak_bytes=peak,
        terms_bytes={term: size for term, size in terms.items() if size},
        reserved_bytes=line.get("reserved"),
    )


TAIL_BYTES = 4096


def last_sample(folder: Path) -> dict[str, Any]:
    """Return the newest sample line of any process, {} before there is one; for the live line."""
    newest: dict[str, Any] = {}
    for path in folder.glob("process-*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            for text in reversed(file.read().splitlines()):
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if line.get("e") == "s":
                    if line["t"] > newest.get("t", 0.0):
                        newest = line
                    break
    return newest
