"""What stands behind an answer, a tab each: only the open one is computed and drawn."""

import pyarrow as pa
import streamlit as st

from app import cached, charts, export, inputs, links, sharing
from app.draw import draw
from app.palette import term_words
from app.runs import Run
from app.words import escape, in_app, problem, section
from planner.errors import VramwiseError
from planner.plan import Plan
from planner.run.recipe import Task
from planner.terms.term import Term
from planner.units import format_bytes

AT_PEAK, LARGEST, CURVE, TAKE = "At the peak", "Largest that fit", "Against context", "Take it away"
LIMIT_LABELS = {
    "context": ("Context", "context"),
    "micro_batch_size": ("Batch", "batch"),
    "num_generations": ("Generations", "generations"),
    "lora_rank": ("LoRA rank", "rank"),
}


def show(run: Run, result: Plan) -> None:
    """Show the tabs."""
    names = [AT_PEAK, LARGEST, CURVE, TAKE]
    peak, largest, curve, take = st.tabs(names, key="part", on_change="rerun")
    if peak.open:
        with peak, st.container(key="terms"):
            _peak_table(result)
            _host(result)
    if largest.open:
        with largest:
            _largest(run)
    if curve.open:
        with curve:
            _curve(run, result)
    if take.open:
        with take:
            _exports(run, result)


def _peak_table(result: Plan) -> None:
    """Show the terms alive at the peak with formula and source."""
    phase = result.phase(result.peak_phase)
    section(f"Alive at the peak ({phase.name})")
    terms = sorted(phase.terms, key=lambda term: -term.bytes)
    _terms_table(terms, alt="Terms alive at the peak, each with its size, formula and source.")
    notes = [*(f"Assumed: {note}." for note in result.assumptions)]
    notes += [f"Not modelled: {note}." for note in result.not_modeled]
    if notes:
        st.caption("\n\n".join(escape(in_app(note)) for note in notes))


def _host(result: Plan) -> None:
    """Show what lies in host RAM."""
    if not result.host_terms:
        return
    section(f"Host RAM: {format_bytes(result.host_peak_bytes)}")
    _terms_table(list(result.host_terms), alt="What lies in host RAM.")


def _terms_table(terms: list[Term], *, alt: str) -> None:
    """Show terms as a plain table: long formulas wrap instead of being cut."""
    st.table(
        # not by way of pandas, which would take a tenth of the time of an answer
        pa.table(
            {
                "term": [escape(term_words(t.name)) for t in terms],
                "size": [escape(format_bytes(t.bytes)) for t in terms],
                "formula": [escape(t.formula) for t in terms],
                "source": [escape(t.source) for t in terms],
            }
        ),
        border="horizontal",
        hide_index=True,
        alt=alt,
    )


def _largest(run: Run) -> None:
    """Show the largest context, batch, generations and rank, each usable by one click."""
    st.caption("Each with all else as it is, with room for the allocator's slack.")
    with st.spinner("Looking for the largest that fit ..."):
        found = cached.limits(run)
    with st.container(horizontal=True):
        for name in LIMIT_LABELS:
            if name in found:
                with st.container(border=True, width=190):
                    _limit(name, found[f"{name}_safe"], found[name])


def _limit(name: str, safe: int, bare: int) -> None:
    label, key = LIMIT_LABELS[name]
    st.metric(label, f"{safe:,}" if safe else "none", help=f"Tensors alone: {bare:,}.")
    if safe:
        st.button(f"Use {safe:,}", key=f"use_{key}", on_click=_use, args=(key, safe))


def _use(key: str, value: int) -> None:
    st.session_state[key] = value


def _curve(run: Run, result: Plan) -> None:
    """Show memory against context for frameworks side by side."""
    lines = cached.curve(run)
    if not lines:
        st.caption("No framework can express this run at other lengths.")
        return
    draw(
        charts.context_curve(lines, result.capacity_bytes, now=result.resolved.seq_tokens),
        key="curve_chart",
        alt=f"Peak memory against context length for {', '.join(lines)}; the dashed line is the capacity.",
        figures=[
            {"framework": name, "context": tokens, "peak": format_bytes(size)}
            for name, points in lines.items()
            for tokens, size in points
        ],
        columns=("framework", "context", "peak"),
    )


def _exports(run: Run, result: Plan) -> None:
    """Show run.yaml, the command line, other tools' settings and the link."""
    names = ["run.yaml", "Command line", "Other tools", "Link", "Files and badge"]
    yaml, command, tool, link, files = st.tabs(names, key="export", on_change="rerun")
    if yaml.open:
        with yaml:
            _yaml(run)
    if command.open:
        with command:
            line, left_out = export.command_line(run)
            st.code(line, language="bash", wrap_lines=True)
            if left_out:
                st.caption(escape(in_app(f"Only run.yaml can say: {', '.join(left_out)}.")))
    if tool.open:
        with tool:
            _other_tools(run)
    if link.open:
        with link:
            base = st.context.url or "http://127.0.0.1:8501/"
            st.code(links.link(base, inputs.values()), language=None, wrap_lines=True)
            if st.session_state.get(inputs.UPLOADED) is not None:
                st.caption("Your uploaded model is not in the link: nothing you upload is kept.")
    if files.open:
        with files:
            sharing.show(run, result, inputs.values())


def _yaml(run: Run) -> None:
    left, right = st.columns(2)
    dataset = left.selectbox("Learn from", list(export.DATASETS), key="dataset")
    steps = right.number_input("Steps", 1, 1_000_000, 100, 50, key="steps")
    text, refused = export.run_yaml(run, dataset=dataset, steps=int(steps or 100))
    if refused:
        st.warning(escape(in_app(f"The bundled trainer would refuse this run: {refused}")))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.download_button(
            "Download run.yaml",
            text,
            file_name="run.yaml",
            mime="application/yaml",
            key="download",
            type="primary",
            icon=":material/download:",
            on_click="ignore",
        )
        verb = "plan" if refused else "train"
        st.caption(f"Then, in a terminal: `vramwise {verb} run.yaml`")
    st.code(text, language="yaml")


def _other_tools(run: Run) -> None:
    from planner.exporters import EXPORTERS, export_run

    serves = run.recipe.task is Task.SERVE
    tool = st.selectbox("Tool", [t for t in EXPORTERS if (t == "vllm") is serves], key="tool")
    try:
        exported = export_run(run.file, str(tool))
    except VramwiseError as error:
        problem(error)
        return
    st.code(exported.text, language="yaml", wrap_lines=True)
    st.caption("Start with:")
    st.code(exported.command, language="bash", wrap_lines=True)
    for sentence in exported.left_out:
        st.caption(escape(in_app(f"Not expressed: {sentence}")))
