"""Analysis of a snapshot -> text for a terminal and a JSON document."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.units import format_bytes
from profiler.report import shown
from profiler.snapshot_analysis import Analysis, Fragmentation
from profiler.snapshot_replay import Trial, trials

TOP = 15
MANY_SPLITS = 0.1
"""Unusable free memory above this share of reserved is worth a sentence."""


def document(analysis: Analysis) -> dict[str, Any]:
    """Return the JSON document of `profile snapshot`."""
    snapshot = analysis.snapshot
    return {
        "format": snapshot.format,
        "device": snapshot.device,
        "peak_bytes": analysis.peak_bytes,
        "from_history": analysis.from_history,
        "terms_bytes": analysis.terms_bytes(),
        "places_bytes": dict(list(analysis.places_bytes().items())[:TOP]),
        "fragmentation": asdict(analysis.fragmentation),
        "ooms": [
            {"requested_bytes": event.bytes, "free_bytes": event.free_bytes}
            for event in snapshot.ooms
        ],
        "replay": [asdict(trial) for trial in trials(snapshot)],
        "largest": [
            {"bytes": block.bytes, "term": block.owner.term, "where": block.owner.where}
            for block in analysis.at_peak[:TOP]
        ],
    }


def terminal(analysis: Analysis) -> Group:
    """Return what `profile snapshot` prints."""
    snapshot = analysis.snapshot
    moment = "peak of the history" if analysis.from_history else "moment of the dump"
    head = Text(
        f"GPU {snapshot.device}, {snapshot.format}: {len(snapshot.segments)} segments, "
        f"{len(snapshot.events)} events"
    )
    peak = Text(f"{moment}: {format_bytes(analysis.peak_bytes)} allocated", style="bold")
    parts: list[Any] = [head, peak, _shares(analysis)]
    parts += [Text(), Text("Largest allocations", style="bold"), _largest(analysis), Text()]
    parts += [Text("Fragmentation at the dump", style="bold"), _fragments(analysis.fragmentation)]
    parts += [Text(line) for line in findings(analysis)]
    replayed = trials(snapshot)
    if replayed:
        heading = "The same allocations under other settings (PYTORCH_ALLOC_CONF)"
        parts += [Text(), Text(heading, style="bold"), _trials(replayed)]
    return Group(*parts)


def findings(analysis: Analysis) -> list[str]:
    """Return what is worth a sentence."""
    found, parts = [], analysis.fragmentation
    for event in analysis.snapshot.ooms:
        free = shown(event.free_bytes)
        found.append(f"out of memory: {format_bytes(event.bytes)} asked, {free} free on the device")
        if parts.free_bytes >= event.bytes > parts.largest_free_bytes:
            found.append(
                f"  {format_bytes(parts.free_bytes)} were free inside torch's pool, the largest piece "
                f"{format_bytes(parts.largest_free_bytes)}: fragmentation, not a lack of memory"
            )
    if parts.reserved_bytes and parts.split_bytes > MANY_SPLITS * parts.reserved_bytes:
        share = parts.split_bytes / parts.reserved_bytes
        advice = (
            ""
            if parts.expandable
            else "; PYTORCH_ALLOC_CONF=expandable_segments:True avoids most of it"
        )
        found.append(
            f"{share:.0%} of the reserved memory is in pieces between live tensors{advice}"
        )
    return found


def _shares(analysis: Analysis) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("term", "bytes", "share", "blocks"):
        table.add_column(column, justify="left" if column == "term" else "right")
    counts = Counter(block.owner.term for block in analysis.at_peak)
    for term, size in analysis.terms_bytes().items():
        share = size / max(1, analysis.peak_bytes)
        table.add_row(term, format_bytes(size), f"{share:.1%}", str(counts[term]))
    return table


def _largest(analysis: Analysis) -> Table:
    """One row per line of code, so that 32 equal layers are one row and not 32."""
    rows: dict[tuple[str, str, int], int] = {}
    for block in analysis.at_peak:
        key = (block.owner.term, block.owner.where, block.bytes)
        rows[key] = rows.get(key, 0) + 1
    ordered = sorted(rows.items(), key=lambda row: -row[0][2] * row[1])[:TOP]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("total", "each", "blocks", "term", "allocated at"):
        table.add_column(
            column, justify="right" if column in ("total", "each", "blocks") else "left"
        )
    for (term, where, size), count in ordered:
        table.add_row(format_bytes(size * count), format_bytes(size), str(count), term, where)
    return table


def _trials(replayed: list[Trial]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("setting")
    table.add_column("reserved at most", justify="right")
    table.add_column("would it have fitted?")
    answers = {None: "nothing ran out", True: "yes", False: "no"}
    for trial in replayed:
        table.add_row(trial.setting, format_bytes(trial.peak_reserved_bytes), answers[trial.fits])
    return table


def _fragments(parts: Fragmentation) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = {
        "reserved from the driver": parts.reserved_bytes,
        "allocated to tensors": parts.allocated_bytes,
        "of that, rounding": parts.rounding_bytes,
        "free in the pool": parts.free_bytes,
        "  between live tensors": parts.split_bytes,
        "  in whole segments": parts.releasable_bytes,
        "  largest piece": parts.largest_free_bytes,
        "private pools": parts.private_bytes,
    }
    for name, size in rows.items():
        table.add_row(Text(name, style="dim"), Text(shown(size), justify="right"))
    return table
