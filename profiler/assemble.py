"""A finished launch -> Recordings: one for the run, and one per rank when there are several."""

import platform
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from planner.errors import VramwiseError
from profiler.journal import ProcessJournal
from profiler.launch import Launch, Sample
from profiler.recording import Recording
from profiler.recording_parts import LiveTensor, PhaseRecord


def recordings(launch: Launch) -> list[Recording]:
    """Return the run's Recording first, then one per rank if several ranks were recorded.

    The run's own is that of the process with the largest peak: on several GPUs the fullest one
    decides whether the run fits.
    """
    told = [journal for journal in launch.journals if journal.peaks]
    ranks = [journal for journal in told if journal.rank is not None]
    main = max(told, key=lambda journal: journal.peak_bytes, default=None)
    whole = _recording(launch, main)
    if len(ranks) < 2:
        return [whole]
    return [whole, *(_recording(launch, journal) for journal in ranks)]


def _recording(launch: Launch, journal: ProcessJournal | None) -> Recording:
    timeline = tuple(_timeline(launch, journal))
    device_peak = _largest(row["device_used_bytes"] for row in timeline)
    host_peak = _largest(row["host_bytes"] for row in timeline)
    common: dict[str, Any] = {
        "subject": shlex.join(launch.command)[:500],
        "environment": _environment(launch, journal),
        "peak_device_bytes": device_peak,
        "host_peak_bytes": host_peak,
        "timeline": timeline,
        "notes": tuple(_notes(launch, journal)),
    }
    if journal is None:
        peak = device_peak or host_peak
        return Recording(
            source="nvml" if device_peak else "host",
            phases=(),
            peak_bytes=peak or 0,
            peak_phase="",
            partial=peak is None
            or launch.interrupted
            or not all(each.ended for each in launch.journals),
            **common,
        )
    phases = _with_driver_view(journal.phases(), timeline)
    top = max(phases, key=lambda phase: phase.peak_bytes)
    return Recording(
        source="torch",
        phases=phases,
        peak_bytes=top.peak_bytes,
        peak_phase=top.name,
        peak_reserved_bytes=_largest(phase.reserved_bytes for phase in phases),
        largest=tuple(LiveTensor(**tensor) for tensor in journal.follow.get("largest", ())),
        partial=not journal.ended,
        **common,
    )


def _with_driver_view(
    phases: tuple[PhaseRecord, ...], timeline: tuple[dict[str, Any], ...]
) -> tuple[PhaseRecord, ...]:
    """Add to each phase the most that the driver and /proc showed during it."""
    return tuple(
        replace(
            phase,
            device_used_bytes=_largest(
                row["device_used_bytes"] for row in timeline if row["phase"] == phase.name
            ),
            host_bytes=_largest(
                row["host_bytes"] for row in timeline if row["phase"] == phase.name
            ),
        )
        for phase in phases
    )


def _timeline(launch: Launch, journal: ProcessJournal | None) -> Iterator[dict[str, Any]]:
    """Merge the outside samples with the process's own, by the clock they share."""
    rows: list[tuple[float, Sample | None, dict[str, Any]]] = [
        (sample.monotonic_s, sample, {}) for sample in launch.samples
    ]
    if journal is not None:
        rows += [(line["t"], None, line) for line in journal.samples]
        rows += [
            (line["t"], None, {"phase": line["old"], "a": line["peak"], "r": None})
            for line in journal.changes
        ]
    rows.sort(key=lambda row: row[0])
    changes = list(journal.changes) if journal else []
    phase = changes[0]["old"] if changes else ""
    for moment_s, sample, line in rows:
        while changes and changes[0]["t"] <= moment_s and sample is not None:
            phase = changes.pop(0)["new"]
        yield {
            "t_s": round(moment_s - launch.started_s, 4),
            "phase": line.get("phase", phase),
            "allocated_bytes": line.get("a"),
            "reserved_bytes": line.get("r"),
            "device_used_bytes": sample.device_used_bytes if sample else None,
            "gpu_used_bytes": sample.gpu_used_bytes if sample else None,
            "host_bytes": sample.host_bytes if sample else None,
        }


def _environment(launch: Launch, journal: ProcessJournal | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "command": shlex.join(launch.command),
        "exit_code": launch.exit_code,
        "elapsed_s": round(launch.elapsed_s, 3),
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "os": platform.platform(),
        "host_ram_bytes": psutil.virtual_memory().total,
        "gpus": [
            {"label": gpu.label, "name": gpu.name, "total_bytes": gpu.total_bytes}
            for gpu in launch.gpus
        ],
        **launch.versions,
    }
    if journal is not None:
        found |= {
            "pid": journal.pid,
            "rank": journal.rank,
            "steps": journal.steps,
            "python": journal.start.get("python"),
            "torch": journal.start.get("torch"),
            "gpu": journal.device.get("name"),
            "gpu_total_bytes": journal.device.get("total"),
            "processes": len(launch.journals),
        }
    return found


def _notes(launch: Launch, journal: ProcessJournal | None) -> Iterator[str]:
    yield from launch.notes
    if launch.interrupted:
        yield "interrupted: the recording ends where the command was stopped"
    if journal is None:
        yield from (error for other in launch.journals for error in other.errors[:3])
        if launch.journals:
            yield "torch was imported, but no model ran: there are no phases"
        else:
            yield "no phases: the command did not import torch, or hooks were off (python -I and -E ignore them)"
        return
    if journal.follow:
        yield followed_note(str(journal.follow.get("device", "cpu")))
    elif not journal.device:
        yield "CPU run: allocated bytes are the C heap in use since torch was imported"
    if not journal.ended:
        yield "partial: the process did not end by itself, the last moments are missing"
    for line in journal.ooms:
        yield f"out of memory on device {line['device']}: {line['requested']} bytes asked, {line['free']} free"
    yield from (f"memory snapshot: journal/{name}" for name in journal.snapshots)
    yield from journal.errors[:3]


def followed_note(device: str) -> str:
    """Say what `--follow` followed, by device type."""
    note = f"every {device} tensor's storage was followed: sizes are exact, times are not"
    if device == "cuda":
        note += "; what the allocator held beyond them is overhead"
    return note


def _largest(values: Any) -> int | None:
    return max((value for value in values if value is not None), default=None)


def save_timeline(recording: Recording, path: Path) -> None:
    """Write the timeline as Parquet; raises VramwiseError if the disk does not take it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        name: [row[name] for row in recording.timeline]
        for name in (recording.timeline[0] if recording.timeline else {})
    }
    types = {"t_s": pa.float64(), "phase": pa.string()}
    table = pa.table(
        {name: pa.array(column, types.get(name, pa.int64())) for name, column in columns.items()}
    )
    temporary = path.with_name(path.name + ".part")
    try:
        pq.write_table(table, temporary)
        temporary.replace(path)
    except OSError as error:
        raise VramwiseError(f"cannot write {path}: {error.strerror or error}") from None
