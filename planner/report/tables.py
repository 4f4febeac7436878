"""A plan as tables that go elsewhere: CSV for a spreadsheet, Markdown for an issue or a model card."""

import csv
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING

from planner.report.text import verdict_line
from planner.terms.term import TERM_NAMES
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.plan import Plan

COLUMNS = ("where", "phase", "term", "bytes", "formula", "source")


def csv_text(plan: "Plan") -> str:
    """Return every term of every phase, one a row, in bytes; then what lies in host memory."""
    kept = StringIO()
    writer = csv.writer(kept, lineterminator="\n")
    writer.writerow(COLUMNS)
    for phase in plan.phases:
        for term in phase.terms:
            writer.writerow(("gpu", phase.name, term.name, term.bytes, term.formula, term.source))
    for term in plan.host_terms:
        writer.writerow(("host", "", term.name, term.bytes, term.formula, term.source))
    return kept.getvalue()


def markdown(plan: "Plan") -> str:
    """Return the verdict, phases by terms, and the peak's terms with their formulas."""
    names = {term.name for phase in plan.phases for term in phase.terms}
    ordered = [*(name for name in TERM_NAMES if name in names), *sorted(names - {*TERM_NAMES})]
    lines = [f"**{_plain(verdict_line(plan))}**", "", *_rows(["term", *_phases(plan)])]
    for name in ordered:
        sizes = [sum(t.bytes for t in p.terms if t.name == name) for p in plan.phases]
        lines.append(_row([name, *(format_bytes(size) if size else "" for size in sizes)]))
    totals = [f"**{format_bytes(phase.total_bytes)}**" for phase in plan.phases]
    lines += [_row(["**total**", *totals]), "", f"Alive at the peak ({plan.peak_phase}):", ""]
    lines += _rows(["term", "size", "formula"])
    for term in sorted(plan.phase(plan.peak_phase).terms, key=lambda item: -item.bytes):
        lines.append(_row([term.name, format_bytes(term.bytes), term.formula]))
    notes = [f"* assumed: {_plain(note)}" for note in plan.assumptions]
    notes += [f"* not modelled: {_plain(note)}" for note in plan.not_modeled]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _phases(plan: "Plan") -> list[str]:
    return [phase.name for phase in plan.phases]


def _rows(headers: Sequence[str]) -> list[str]:
    return [_row(headers), "|---" * len(headers) + "|"]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell if "**" in cell else _plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Return text that Markdown takes as it is, in a table too."""
    return "".join("\\" + char if char in "\\|`*_<>[]" else char for char in text)
