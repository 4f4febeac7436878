"""Why plan and recording differ: the largest cell, its formula, and what was really alive."""

from dataclasses import replace

from planner.phases import Phase
from planner.plan import Plan
from planner.units import format_bytes
from profiler.compare import Cell, Comparison
from profiler.recording import Recording

NO_DIFFERENCE = 0.01
"""Below 1% of the measured peak a difference is not worth words."""


def as_measured(plan: Plan, recording: Recording) -> Plan:
    """Return `plan` in the recording's terms.

    A CPU run has no cuBLAS workspace and no CUDA context, so the overhead term would only show
    up as an error of the plan. A recording of totals tells what has an owner from the rest; so
    the plan's logits, cache and workspace join its activations.
    """
    if recording.source != "torch":
        return plan
    phases = plan.phases
    if not recording.environment.get("gpu"):
        phases = tuple(_without_overhead(phase) for phase in phases)
    if not recording.largest:
        phases = tuple(_owned_and_rest(phase) for phase in phases)
    if phases is plan.phases:
        return plan
    peak = max(phases, key=lambda phase: phase.total_bytes)
    return replace(plan, phases=phases, peak_phase=peak.name, peak_bytes=peak.total_bytes)


def _without_overhead(phase: Phase) -> Phase:
    terms = tuple(term for term in phase.terms if term.name != "overhead")
    return replace(phase, terms=terms, total_bytes=sum(term.bytes for term in terms))


OWNED = ("weights", "adapters", "gradients", "optimizer")


def _owned_and_rest(phase: Phase) -> Phase:
    terms = tuple(
        term if term.name in OWNED else replace(term, name="activations") for term in phase.terms
    )
    return replace(phase, terms=terms)


def as_planned(recording: Recording) -> Recording:
    """Return `recording` without what is no tensor: the libraries in a CPU process's heap."""
    if recording.environment.get("gpu") or recording.source != "torch" or recording.largest:
        return recording
    phases = tuple(
        replace(
            phase,
            peak_bytes=phase.peak_bytes - phase.terms_bytes.get("overhead", 0),
            terms_bytes={k: v for k, v in phase.terms_bytes.items() if k != "overhead"},
        )
        for phase in recording.phases
    )
    top = max(phases, key=lambda phase: phase.peak_bytes, default=None)
    return replace(
        recording,
        phases=phases,
        peak_bytes=top.peak_bytes if top else recording.peak_bytes,
        peak_phase=top.name if top else "",
    )


def largest_difference(comparison: Comparison) -> Cell | None:
    """Return the term of the measured peak phase that the plan misses by most bytes."""
    phase = comparison.measured_phase or comparison.planned_phase
    cells = [c for c in comparison.cells if c.phase == phase and c.difference_bytes]
    return max(cells, key=lambda c: abs(c.difference_bytes or 0), default=None)


def _what_a_cpu_does_otherwise(cell: Cell, plan: Plan) -> list[str]:
    """Return why a CPU run differs from the GPU run that was planned, where that is known."""
    if (cell.phase, cell.term) == ("step", "optimizer"):
        return [
            "  on a CPU torch updates one tensor at a time; on a GPU all at once (foreach), with "
            "temporaries for all"
        ]
    if cell.term == "logits" and plan.resolved.switches.trace_step == "trl":
        # trl/trainer/utils.py, _fused_forward: `compact = _use_triton(device)`
        return [
            "  on a CPU TRL scores every position in torch ops with whole-tile temporaries; on a "
            "GPU only completion tokens, in place (Triton)"
        ]
    return []


def explain(comparison: Comparison, plan: Plan, recording: Recording) -> list[str]:
    """Return lines that say what the largest difference is and what stands behind both sides."""
    cell = largest_difference(comparison)
    measured = comparison.peak.measured_bytes or 0
    if cell is None or abs(cell.difference_bytes or 0) < NO_DIFFERENCE * max(measured, 1):
        return ["no term of the peak phase is off by more than 1% of the peak"]
    assert cell.difference_bytes is not None
    side = "more" if cell.difference_bytes > 0 else "less"
    lines = [
        f"largest difference: {cell.term} in {cell.phase}: planned "
        f"{format_bytes(abs(cell.difference_bytes))} {side} than measured"
    ]
    planned = [
        term
        for phase in plan.phases
        if phase.name == cell.phase
        for term in phase.terms
        if term.name == cell.term
    ]
    lines += [f"  planned: {format_bytes(term.bytes)} = {term.formula}" for term in planned]
    if not planned:
        lines.append("  planned: nothing of this term in this phase")
    alive = [tensor for tensor in recording.largest if tensor.term == cell.term][:3]
    for tensor in alive:
        shape = " x ".join(map(str, tensor.shape))
        where = tensor.module or tensor.op
        lines.append(f"  measured: {format_bytes(tensor.bytes)}, {shape} {tensor.dtype}, {where}")
    if not alive and not recording.largest:
        lines.append(
            "  measured: as a total only; `record(follow=True)` or a snapshot tells the tensors"
        )
    if not recording.environment.get("gpu") and recording.source != "trace":
        lines += _what_a_cpu_does_otherwise(cell, plan)
    if comparison.planned_phase != comparison.measured_phase and comparison.measured_phase:
        lines.append(
            f"  the plan has its peak in {comparison.planned_phase}, the run in "
            f"{comparison.measured_phase}: compare their totals first"
        )
    return lines
