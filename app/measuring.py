"""The parts of "Recording": figures, timeline, phases, planned beside measured, largest tensors."""

from typing import Any

import pandas as pd
import streamlit as st

from app import cached, charts, inputs, recordings, time_charts
from app.draw import draw
from app.palette import term_words
from app.recordings import Measured
from app.words import escape, in_app, problem, section
from planner.errors import VramwiseError
from planner.importers.pasted import decode
from planner.plan import Plan, plan
from planner.run.recipe import RunFile
from planner.run.runfile import machine_of, parse_yaml, validate
from planner.terms.term import TERM_NAMES
from planner.units import format_bytes, to_gib
from profiler.compare import Cell, compare
from profiler.explain import as_measured, explain
from profiler.recording import Recording
from profiler.report import summary

KEY = "measured"
"""Session key: (id of the uploaded file, what was read from it)."""
MAX_RUN_MIB = 1
MOST_TENSORS = 50
PLOTTED = ("reward", "loss", "kl", "entropy", "grad_norm", "tokens_per_second", "seconds")


def uploaded() -> Measured | None:
    """Show the uploader and return what the file holds; read once, dropped with the file."""
    file = st.file_uploader(
        "A recording.json, a run's metrics.jsonl, a vLLM start-up log, or a torch memory snapshot",
        type=list(recordings.TYPES),
        key="recording_file",
        max_upload_size=recordings.MAX_UPLOAD_MIB,
        help="Snapshots go through a reader that takes plain data only; nothing in a file is run or kept.",
    )
    if file is None:
        st.session_state.pop(KEY, None)
        return None
    known = st.session_state.get(KEY)
    if known is None or known[0] != file.file_id:
        try:
            known = (file.file_id, recordings.read(file.name, file.getvalue()))
        except VramwiseError as error:
            st.session_state.pop(KEY, None)
            problem(error)
            return None
        st.session_state[KEY] = known
    found: Measured = known[1]
    return found


def headline(recording: Recording) -> None:
    """Show the figures that head every report."""
    with st.container(border=True):
        with st.container(horizontal=True):
            for name, value in summary(recording).items():
                if name != "command":
                    st.metric(name.capitalize(), value)
        st.caption(escape(f"{recording.source}: {recording.subject[:300]}"))
    for note in recording.notes[:20]:
        st.caption(escape(in_app(note)))


def timeline(recording: Recording) -> None:
    """Show memory over time, or over the allocations of a trace."""
    points = recordings.timeline_points(recording)
    title, axis = "Memory over time", "seconds"
    if not points and recording.events:
        points = recordings.running_total(recording)
        title, axis = "Memory over the allocations", "allocation or free"
    if not points:
        return
    section(title)
    shades = [
        {"start": start, "end": end, "phase": phase}
        for start, end, phase in recordings.spans(recording)
    ]
    rows = [
        {**row, "gib": to_gib(row["bytes"]), "size": format_bytes(row["bytes"])} for row in points
    ]
    draw(
        time_charts.timeline(rows, shades, axis=axis),
        key="timeline_chart",
        alt=f"{title}; the highest point is {format_bytes(max(row['bytes'] for row in points))}.",
        figures=[{**row, axis: row["t_s"]} for row in rows],
        columns=(axis, "series", "size", "phase"),
    )


def phase_bars(recording: Recording) -> None:
    """Show what each phase held at its peak."""
    if not recording.phases:
        return
    section("What each phase held at its peak")
    rows = []
    for phase in recording.phases:
        known = dict(phase.terms_bytes) or {"unknown": phase.peak_bytes}
        rows += [_term_row(phase.name, name, size) for name, size in known.items() if size]
    sizes = ", ".join(f"{p.name} {format_bytes(p.peak_bytes)}" for p in recording.phases)
    draw(
        charts.side_by_side(rows, None, order=[phase.name for phase in recording.phases]),
        key="recorded_phases",
        alt=f"Measured memory by phase and term: {sizes}.",
        figures=[{**row, "phase": row["run"]} for row in rows],
        columns=("phase", "term", "size"),
    )


def _term_row(run: str, term: str, num_bytes: int) -> dict[str, Any]:
    name = term if term in TERM_NAMES else "unknown"
    order = TERM_NAMES.index(name) if name in TERM_NAMES else 99
    return {
        "run": run,
        "term": term_words(name),
        "gib": to_gib(num_bytes),
        "size": format_bytes(num_bytes),
        "formula": "measured",
        "order": order,
    }


def planned_run() -> tuple[str, Plan] | None:
    """Show what to compare with, and return its name and plan."""
    choice = st.segmented_control(
        "Planned beside measured",
        ["not now", "the run of Will it fit?", "a run.yaml"],
        default="not now",
        required=True,
        key="compare_with",
    )
    try:
        if choice == "the run of Will it fit?":
            run = inputs.run_from_state()
            return run.model.name, cached.plan_of(run)
        if choice == "a run.yaml":
            return _plan_of_file()
    except VramwiseError as error:
        problem(error)
    return None


def _plan_of_file() -> tuple[str, Plan] | None:
    file = st.file_uploader(
        "run.yaml", type=["yaml", "yml"], key="planned_file", max_upload_size=MAX_RUN_MIB
    )
    if file is None:
        return None
    document = parse_yaml(decode(file.getvalue()), label=file.name[:60])
    run = validate(RunFile, document, label=file.name[:60])
    _, model = inputs.named(run.model)
    return run.model, plan(model, run.recipe, machine_of(run.machine))


def beside(name: str, planned: Plan, recording: Recording) -> None:
    """Show planned | measured, phase by phase and term by term, and what stands behind it."""
    planned = as_measured(planned, recording)
    result = compare(planned, recording)
    section(f"{escape(name)}: planned beside measured")
    rows = [_cell(cell) for total in result.totals for cell in _of_phase(total, result.cells)]
    st.dataframe(
        pd.DataFrame([*rows, _cell(result.peak)]),
        hide_index=True,
        width="stretch",
        key="beside_table",
        alt="Planned and measured memory by phase and term, with the error.",
    )
    for line in explain(result, planned, recording):
        st.caption(escape(in_app(line)))


def _of_phase(total: Cell, cells: tuple[Cell, ...]) -> list[Cell]:
    return [total, *(cell for cell in cells if cell.phase == total.phase)]


def _cell(cell: Cell) -> dict[str, str]:
    def shown(size: int | None) -> str:
        return "-" if size is None else format_bytes(size)

    return {
        "phase": cell.phase,
        "term": term_words(cell.term),
        "planned": shown(cell.planned_bytes),
        "measured": shown(cell.measured_bytes),
        "error": "" if cell.error is None else f"{cell.error:+.1%}",
    }


def largest(recording: Recording) -> None:
    """Show the largest tensors alive at the peak."""
    if not recording.largest:
        return
    section("Largest at the peak")
    rows = [
        {
            "size": format_bytes(tensor.bytes),
            "shape": " x ".join(map(str, tensor.shape)),
            "dtype": tensor.dtype,
            "term": term_words(tensor.term),
            "where": tensor.module or tensor.op,
            "since": tensor.phase,
        }
        for tensor in recording.largest[:MOST_TENSORS]
    ]
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        width="stretch",
        key="largest_table",
        alt="The largest tensors alive at the peak.",
    )


def steps(found: Measured) -> None:
    """Show a run's metrics: memory by phase, planned and measured, and the training curves."""
    last = found.steps[-1]
    with st.container(horizontal=True, border=True):
        st.metric("Steps", f"{len(found.steps):,}")
        for name in PLOTTED:
            if name in last:
                st.metric(name.replace("_", " ").capitalize(), f"{last[name]:.4g}")
    memory = recordings.step_series(found.steps, "memory")
    if memory:
        section("Memory by phase")
        rows = [
            {**row, "gib": to_gib(row["bytes"]), "size": format_bytes(int(row["bytes"]))}
            for row in memory
        ]
        kinds = sorted({row["kind"] for row in rows})
        draw(
            time_charts.step_memory(rows),
            key="step_memory",
            alt=f"Memory by phase over the steps: {', '.join(kinds)}.",
            figures=rows,
            columns=("step", "phase", "kind", "size"),
        )
    names = [name for name in PLOTTED if name in last]
    for first in range(0, len(names), 2):
        for column, name in zip(st.columns(2), names[first : first + 2], strict=False):
            values = recordings.step_series(found.steps, name)
            with column:
                draw(
                    time_charts.line(values, title=name.replace("_", " ")),
                    key=f"step_{name}",
                    alt=f"{name} over {len(values)} steps.",
                    figures=values,
                    columns=("step", "value"),
                )
