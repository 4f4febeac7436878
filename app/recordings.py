"""Uploaded measurements: a Recording, a run's metrics, a vLLM log or a torch snapshot, read safely."""

import io
import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.importers.pasted import decode
from profiler.recording import Recording

TYPES = ("json", "jsonl", "log", "txt", "pickle", "pkl")
MAX_UPLOAD_MIB = 200
MAX_JSON_BYTES = 64 << 20
MAX_STEPS = 100_000
MAX_POINTS = 1500
"""Points of a timeline that are drawn; more do not fit on a screen."""
TIMELINE = {
    "device_used_bytes": "driver: this run",
    "reserved_bytes": "torch reserved",
    "allocated_bytes": "torch allocated",
    "host_bytes": "host memory",
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a file holds: a recording, or the metrics of a run's steps."""

    name: str
    recording: Recording | None = None
    steps: tuple[dict[str, float], ...] = ()
    findings: tuple[str, ...] = field(default=())
    """Sentences about a snapshot: what ran out, how fragmented the pool is."""


def read(name: str, content: bytes) -> Measured:
    """Return what an uploaded file holds; raises UsageError naming what is wrong."""
    shown = name[:80]
    if not content:
        raise UsageError(f"{shown}: the file is empty")
    start = content[:64].lstrip()
    if content[:1] == b"\x80":
        return _snapshot(shown, content)
    if name.lower().endswith(".jsonl"):
        return _steps(shown, content)
    if start.startswith(b"{"):
        return _json(shown, content)
    if name.lower().endswith((".log", ".txt")):
        from profiler.vllm_log import read_vllm_log

        return Measured(name=shown, recording=read_vllm_log(io.BytesIO(content)))
    raise UsageError(
        f"{shown}: not a recording, metrics, vLLM log or torch snapshot",
        hint="recording.json, metrics.jsonl, a start-up log, or a file of torch.cuda.memory._dump_snapshot()",
    )


def _json(name: str, content: bytes) -> Measured:
    if len(content) > MAX_JSON_BYTES:
        raise UsageError(f"{name}: larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: not JSON, or cut short ({str(error)[:80]})") from None
    if isinstance(document, dict) and "phases" in document and "source" not in document:
        raise UsageError(
            f"{name}: this is a plan, not a recording", hint="open it on the page Compare"
        )
    if isinstance(document, dict) and "step" in document:
        return _steps(name, content)
    return Measured(name=name, recording=Recording.from_dict(document, label=name))


def _steps(name: str, content: bytes) -> Measured:
    """Read metrics.jsonl: one object a step; a line cut by a crash is left out."""
    if len(content) > MAX_JSON_BYTES:
        raise UsageError(f"{name}: larger than {MAX_JSON_BYTES >> 20} MiB")
    steps = []
    for line in decode(content).splitlines()[:MAX_STEPS]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and _is_number(row.get("step")):
            numbers = {str(k)[:120]: float(v) for k, v in row.items() if _is_number(v)}
            steps.append(numbers)
    if not steps:
        raise UsageError(
            f"{name}: no line is a step", hint="metrics.jsonl of a run's output folder"
        )
    return Measured(name=name, steps=tuple(steps))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _snapshot(name: str, content: bytes) -> Measured:
    """Read a torch snapshot through the restricted reader, from a file that is gone at once."""
    from profiler.snapshot import read_snapshot
    from profiler.snapshot_analysis import analyse, to_recording
    from profiler.snapshot_report import findings

    with tempfile.TemporaryDirectory(prefix="vramwise-") as folder:
        path = Path(folder) / "snapshot.pickle"
        path.write_bytes(content)
        analysis = analyse(read_snapshot(path))
    recording = to_recording(analysis, subject=name)
    return Measured(name=name, recording=recording, findings=tuple(findings(analysis)))


def timeline_points(recording: Recording) -> list[dict[str, Any]]:
    """Return the timeline as rows of seconds, series, bytes and phase, thinned to what can be seen."""
    rows = [row for row in recording.timeline if _is_number(row.get("t_s"))]
    stride = max(1, len(rows) // MAX_POINTS)
    return [
        {"t_s": float(row["t_s"]), "series": label, "bytes": int(row[key]), "phase": _phase(row)}
        for row in rows[::stride]
        for key, label in TIMELINE.items()
        if _is_number(row.get(key)) and row[key] >= 0
    ]


def _phase(row: dict[str, Any]) -> str:
    return str(row.get("phase") or "")[:40]


def spans(recording: Recording) -> list[tuple[float, float, str]]:
    """Return (start, end, phase) of the timeline, neighbours of one phase joined."""
    from dataclasses import replace

    from profiler.report import phase_spans

    rows = [
        {"t_s": float(row["t_s"]), "phase": _phase(row)}
        for row in recording.timeline
        if _is_number(row.get("t_s"))
    ]
    return phase_spans(replace(recording, timeline=tuple(rows)))


def running_total(recording: Recording) -> list[dict[str, Any]]:
    """Return the bytes alive after each allocation of a trace, as rows like a timeline's.

    "t_s" is the number of the event: a trace has no clock.
    """
    total, rows = 0, []
    for number, event in enumerate(recording.events):
        total += event.bytes if event.kind == "alloc" else -event.bytes
        rows.append({"t_s": number, "series": "alive", "bytes": total, "phase": event.phase[:40]})
    return _peaks_kept(rows)


def _peaks_kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most MAX_POINTS rows; of each stretch the highest, so that no peak gets lost."""
    stride = max(1, -(-len(rows) // MAX_POINTS))
    return [
        max(rows[first : first + stride], key=lambda row: row["bytes"])
        for first in range(0, len(rows), stride)
    ]


def step_series(steps: tuple[dict[str, float], ...], kind: str) -> list[dict[str, Any]]:
    """Return a metric of every step as rows: kind "memory" (by phase) or a metric's name."""
    rows = []
    for step in steps:
        for key, value in step.items():
            parts = key.split("/")
            if kind == "memory" and len(parts) == 3 and parts[0] == "memory":
                what = parts[2].removesuffix("_bytes")
                rows.append({"step": step["step"], "phase": parts[1], "kind": what, "bytes": value})
            elif key == kind:
                rows.append({"step": step["step"], "value": value})
    return rows
