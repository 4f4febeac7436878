"""The parts of "Will it fit?": every figure on them is read from the plan."""

from typing import Any

import pandas as pd
import streamlit as st

from app import charts, export, inputs, knobs, links, pins
from app.draw import draw
from app.runs import Run
from planner.answers import advise
from planner.answers.advise import Advice, Change
from planner.errors import UnknownNameError, VramwiseError
from planner.plan import Plan, plan
from planner.report import summary
from planner.run.framework import frameworks, pick
from planner.run.recipe import Task
from planner.terms.term import Term
from planner.units import format_bytes

MARKS = {
    "fits": ("green", ":material/check_circle:", "Fits"),
    "tight": ("orange", ":material/warning:", "Tight"),
    "does not fit": ("red", ":material/cancel:", "Does not fit"),
}
SIDE_BY_SIDE = ("vramwise", "trl", "unsloth", "hf-trainer")
CURVE_TOKENS = tuple(2**power for power in range(9, 18))
MOST_LEVERS = 6
LIMIT_LABELS = {
    "context": ("Context", "context"),
    "micro_batch_size": ("Batch", "batch"),
    "num_generations": ("Generations", "generations"),
    "lora_rank": ("LoRA rank", "rank"),
}


def problem(error: VramwiseError) -> None:
    """Show what is wrong with the run, with the hint and near matches."""
    st.error(escape(error.message), icon=":material/error:")
    if error.hint:
        st.caption(escape(error.hint))
    if isinstance(error, UnknownNameError) and error.near:
        st.caption("Near: " + ", ".join(map(escape, error.near)))


def escape(text: str) -> str:
    """Return text whose markdown means nothing: errors quote what people typed."""
    return "".join("\\" + char if char in "\\`*_{}[]<>()#+!|$~:" else char for char in text)


def offer_look_up(name: str) -> None:
    """Ask before anything is sent: the hub is only asked when a person wants it."""
    with st.container(border=True):
        st.subheader(f"{name} is not in the catalogue", anchor=False)
        st.write("Its config.json can be read from the Hugging Face hub; no weights are fetched.")
        st.button(
            "Look it up on the Hugging Face hub",
            key="look_up",
            type="primary",
            icon=":material/search:",
            on_click=inputs.look_up,
            args=(name,),
        )
        error = st.session_state.pop("look_up_error", None)
        if error is not None:
            problem(error)


def verdict_card(run: Run, result: Plan) -> None:
    """Show fits, tight or does not fit, why, and the figures behind it."""
    colour, icon, word = MARKS[result.verdict]
    with st.container(border=True, key="verdict"):
        st.subheader(f":{colour}[{icon} {word}]", anchor=False)
        st.write(escape(result.why[0].upper() + result.why[1:] + "."))
        with st.container(horizontal=True):
            _metric("Peak", result.peak_bytes, f"Largest phase: {result.peak_phase}.")
            _metric("Capacity", result.capacity_bytes, "What torch sees, less the CUDA context.")
            _metric("Headroom", result.headroom_bytes, "Capacity less the peak.")
            spread = f"{format_bytes(result.low_bytes, digits=1)} to {format_bytes(result.high_bytes, digits=1)}"
            st.metric(
                "Likely need", spread, help="In torch's pool, the allocator's slack included."
            )
            limit = run.machine.host_ram_bytes
            _metric(
                "Host RAM", result.host_peak_bytes, f"of {format_bytes(limit)}" if limit else None
            )
        st.caption(escape(f"{summary(result)} on {run.machine.label}"))
        st.caption("Change any of it in the sidebar (on a phone: the arrows at the top left).")
        st.button(
            "Add to Compare",
            key="pin",
            icon=":material/keep:",
            type="tertiary",
            on_click=pins.add,
            help="Puts this run on the page Compare, beside others.",
        )


def _metric(label: str, num_bytes: int, help_text: str | None) -> None:
    st.metric(label, format_bytes(num_bytes), help=help_text)


def phases(result: Plan) -> None:
    """Show one stacked bar per phase with the capacity line."""
    st.subheader("Phase by phase", anchor=False)
    sizes = ", ".join(f"{p.name} {format_bytes(p.total_bytes)}" for p in result.phases)
    draw(
        charts.phase_bars(result),
        alt=f"GPU memory by phase against {format_bytes(result.capacity_bytes)}: {sizes}.",
        key="phase_chart",
    )


def lever_buttons(run: Run, result: Plan, levers: list[Advice]) -> None:
    """Show what lowers the peak, each as one button that applies it."""
    st.subheader("What would lower it", anchor=False)
    if not result.fits:
        _combination_button(run, result, levers)
    if not levers:
        st.caption("Nothing single lowers the peak of this run.")
    for number, lever in enumerate(levers[:MOST_LEVERS]):
        word = MARKS[lever.plan.verdict][2]
        helps = lever.plan.fits and not result.fits
        changes = " Changes the result." if lever.change.changes_objective else ""
        st.button(
            f"{change_label(lever.change)}: saves {format_bytes(lever.saved_bytes, digits=1)}",
            key=f"lever_{number}",
            help=f"{lever.change.price}. Then: {word.lower()}.{changes}",
            icon=":material/check_circle:" if helps else ":material/trending_down:",
            width="stretch",
            on_click=_apply,
            args=(run, [lever.change]),
        )


def _combination_button(run: Run, result: Plan, levers: list[Advice]) -> None:
    found = advise.combination(run.model, run.recipe, run.machine, levers)
    if found is None:
        st.caption("No combination of up to four of these makes it fit.")
        return
    changes, then = found
    st.button(
        f"Make it fit: {format_bytes(result.peak_bytes - then.peak_bytes, digits=1)} less",
        key="make_it_fit",
        type="primary",
        help=" + ".join(map(change_label, changes)),
        width="stretch",
        icon=":material/auto_fix_high:",
        on_click=_apply,
        args=(run, changes),
    )
    st.caption(escape(" + ".join(map(change_label, changes))))


def change_label(change: Change) -> str:
    """Return a change in the words of the sidebar: "Checkpointing full", "Batch 1"."""
    parts = []
    for path, value in change.update.items():
        knob = knobs.BY_PATH.get(path)
        if knob is None or value is None or value is False:
            continue
        number = isinstance(value, int) and value is not True
        shown = f" {value:,}" if number else f" {value}"
        parts.append(knob.label if value is True else knob.label + shown)
    return ", ".join(parts) or change.name


def _apply(run: Run, changes: list[Change]) -> None:
    recipe = run.recipe
    for change in changes:
        recipe = advise.apply(recipe, change)
    inputs.set_recipe(recipe, run)


def peak_table(result: Plan) -> None:
    """Show the terms alive at the peak with formula and source."""
    phase = result.phase(result.peak_phase)
    st.subheader(f"Alive at the peak ({phase.name})", anchor=False)
    terms = sorted(phase.terms, key=lambda term: -term.bytes)
    _terms_table(terms, alt="Terms alive at the peak, each with its size, formula and source.")
    notes = [*(f"Assumed: {note}." for note in result.assumptions)]
    notes += [f"Not modelled: {note}." for note in result.not_modeled]
    for note in notes:
        st.caption(escape(note))


def curve(run: Run, result: Plan) -> None:
    """Show memory against context for frameworks side by side."""
    st.subheader("Memory against context", anchor=False)
    lines = curve_lines(run)
    if not lines:
        st.caption("No framework can express this run at other lengths.")
        return
    draw(
        charts.context_curve(lines, result.capacity_bytes, now=result.resolved.seq_tokens),
        key="curve_chart",
        alt=f"Peak memory against context length for {', '.join(lines)}; the dashed line is the capacity.",
    )


def curve_lines(run: Run) -> dict[str, list[tuple[int, int]]]:
    """Return (tokens, peak bytes) of every framework that can express the run."""
    own = pick(run.recipe.framework).name
    names = [own, *(name for name in SIDE_BY_SIDE if name != own and name in frameworks())]
    if run.recipe.task is Task.SERVE:
        names = [own]
    lines = {}
    for name in names:
        points = [(n, size) for n in CURVE_TOKENS if (size := _peak(run, name, n)) is not None]
        if points:
            lines[name] = points
    return lines


def _peak(run: Run, framework: str, tokens: int) -> int | None:
    prompt = run.recipe.prompt_length
    update: dict[str, Any] = {"framework": framework, "context": tokens}
    update["prompt_length"] = min(prompt, tokens - 1) if prompt else None
    try:
        return plan(run.model, run.recipe.model_copy(update=update), run.machine).peak_bytes
    except VramwiseError:
        return None


def largest(run: Run, result: Plan) -> None:
    """Show the largest context, batch, generations and rank, each usable by one click."""
    st.subheader("Largest that fit", anchor=False)
    st.caption("Each with all else as it is, with room for the allocator's slack.")
    found = advise.limits(run.model, run.recipe, run.machine, result)
    shown = [name for name in LIMIT_LABELS if name in found]
    for first in range(0, len(shown), 2):
        for column, name in zip(st.columns(2), shown[first : first + 2], strict=False):
            with column.container(border=True):
                _limit(name, found[f"{name}_safe"], found[name])


def _limit(name: str, safe: int, bare: int) -> None:
    label, key = LIMIT_LABELS[name]
    st.metric(label, f"{safe:,}" if safe else "none", help=f"Tensors alone: {bare:,}.")
    if safe:
        st.button(f"Use {safe:,}", key=f"use_{key}", on_click=_use, args=(key, safe))


def _use(key: str, value: int) -> None:
    st.session_state[key] = value


def host(result: Plan) -> None:
    """Show what lies in host RAM."""
    if not result.host_terms:
        return
    st.subheader(f"Host RAM: {format_bytes(result.host_peak_bytes)}", anchor=False)
    _terms_table(list(result.host_terms), alt="What lies in host RAM.")


def _terms_table(terms: list[Term], *, alt: str) -> None:
    """Show terms as a plain table: long formulas wrap instead of being cut."""
    rows = [(t.name, format_bytes(t.bytes), t.formula, t.source) for t in terms]
    st.table(
        pd.DataFrame(
            [tuple(map(escape, row)) for row in rows],
            columns=["term", "size", "formula", "source"],
        ),
        border="horizontal",
        hide_index=True,
        alt=alt,
    )


def exports(run: Run) -> None:
    """Show run.yaml, the command line, other tools' settings and the link."""
    st.subheader("Take it with you", anchor=False)
    yaml_tab, cli_tab, tool_tab, link_tab = st.tabs(
        ["run.yaml", "Command line", "Other tools", "Link"]
    )
    with yaml_tab:
        _yaml(run)
    with cli_tab:
        line, left_out = export.command_line(run)
        st.code(line, language="bash", wrap_lines=True)
        if left_out:
            st.caption(escape(f"Only run.yaml can say: {', '.join(left_out)}."))
    with tool_tab:
        _other_tools(run)
    with link_tab:
        base = st.context.url or "http://127.0.0.1:8501/"
        st.code(links.link(base, inputs.values()), language=None, wrap_lines=True)
        if st.session_state.get(inputs.UPLOADED) is not None:
            st.caption("Your uploaded model is not in the link: nothing you upload is kept.")


def _yaml(run: Run) -> None:
    left, right = st.columns(2)
    dataset = left.selectbox("Learn from", list(export.DATASETS), key="dataset")
    steps = right.number_input("Steps", 1, 1_000_000, 100, 50, key="steps")
    text, refused = export.run_yaml(run, dataset=dataset, steps=int(steps or 100))
    if refused:
        st.warning(escape(f"vramwise train would refuse this run: {refused}"))
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
        st.caption(
            "Then: `vramwise train run.yaml`" if not refused else "Then: `vramwise plan run.yaml`"
        )
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
    st.caption(escape(f"Start with: {exported.command}"))
    for sentence in exported.left_out:
        st.caption(escape(f"Not expressed: {sentence}"))
