"""Plan x Recording: the same phases and terms side by side, with the error of every cell."""

from dataclasses import dataclass
from typing import Any

from planner.plan import Plan
from planner.units import format_bytes
from profiler.recording import PHASES, TERMS, Recording

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One term of one phase, planned and measured; None = that side does not know it."""

    phase: str
    term: str
    planned_bytes: int | None
    measured_bytes: int | None

    @property
    def difference_bytes(self) -> int | None:
        """Planned less measured."""
        if self.planned_bytes is None or self.measured_bytes is None:
            return None
        return self.planned_bytes - self.measured_bytes

    @property
    def error(self) -> float | None:
        """Relative error of the plan; None where nothing was measured."""
        difference = self.difference_bytes
        if difference is None or not self.measured_bytes:
            return None
        return difference / self.measured_bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cells, phase totals (term "total") and the peak."""

    cells: tuple[Cell, ...]
    totals: tuple[Cell, ...]
    peak: Cell
    planned_phase: str
    measured_phase: str

    def cell(self, phase: str, term: str) -> Cell:
        """Return one cell."""
        return next(cell for cell in self.cells if (cell.phase, cell.term) == (phase, term))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "schema_version": SCHEMA_VERSION,
            "planned_peak_bytes": self.peak.planned_bytes,
            "measured_peak_bytes": self.peak.measured_bytes,
            "planned_peak_phase": self.planned_phase,
            "measured_peak_phase": self.measured_phase,
            "error": self.peak.error,
            "phases": [_row(cell) for cell in self.totals],
            "terms": [_row(cell) for cell in self.cells],
        }


def compare(plan: Plan, recording: Recording) -> Comparison:
    """Return plan and recording side by side, for every phase that either of them has."""
    planned = {
        phase.name: _sum_terms([(term.name, term.bytes) for term in phase.terms])
        for phase in plan.phases
    }
    measured = {phase.name: dict(phase.terms_bytes) for phase in recording.phases}
    measured_totals = {phase.name: phase.peak_bytes for phase in recording.phases}
    cells: list[Cell] = []
    totals: list[Cell] = []
    for phase in _ordered({*planned, *measured}, PHASES):
        mine, theirs = planned.get(phase), measured.get(phase)
        totals.append(
            Cell(
                phase,
                "total",
                sum(mine.values()) if mine is not None else None,
                measured_totals.get(phase),
            )
        )
        # A recording without terms (NVML, a log) still has its totals.
        for term in _ordered({*(mine or {}), *(theirs or {})}, TERMS):
            cells.append(
                Cell(
                    phase,
                    term,
                    mine.get(term, 0) if mine is not None else None,
                    theirs.get(term, 0) if theirs else None,
                )
            )
    return Comparison(
        tuple(cells),
        tuple(totals),
        Cell("peak", "total", plan.peak_bytes, recording.peak_bytes),
        plan.peak_phase,
        recording.peak_phase,
    )


def to_text(comparison: Comparison) -> str:
    """Return the table for a person."""
    lines = [f"{'phase':10} {'term':12} {'planned':>12} {'measured':>12} {'error':>8}"]
    for total in comparison.totals:
        lines.append(_line(total))
        lines.extend(_line(cell) for cell in comparison.cells if cell.phase == total.phase)
    lines.append(_line(comparison.peak))
    lines.append(
        f"peak phase: planned {comparison.planned_phase}, measured {comparison.measured_phase}"
    )
    return "\n".join(lines)


def _line(cell: Cell) -> str:
    name = cell.phase if cell.term == "total" else ""
    planned = "-" if cell.planned_bytes is None else format_bytes(cell.planned_bytes)
    measured = "-" if cell.measured_bytes is None else format_bytes(cell.measured_bytes)
    error = "" if cell.error is None else f"{cell.error:+.1%}"
    return f"{name:10} {cell.term:12} {planned:>12} {measured:>12} {error:>8}".rstrip()


def _row(cell: Cell) -> dict[str, Any]:
    return {
        "phase": cell.phase,
        "term": cell.term,
        "planned_bytes": cell.planned_bytes,
        "measured_bytes": cell.measured_bytes,
        "error": cell.error,
    }


def _sum_terms(terms: list[tuple[str, int]]) -> dict[str, int]:
    result: dict[str, int] = {}
    for name, size in terms:
        result[name] = result.get(name, 0) + size
    return result


def _ordered(names: set[str], order: tuple[str, ...]) -> list[str]:
    return sorted(
        names, key=lambda name: (order.index(name) if name in order else len(order), name)
    )
