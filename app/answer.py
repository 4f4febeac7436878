"""The answer of "Will it fit?": verdict, phases, what would lower the peak. Every figure is the plan's."""

import streamlit as st

from app import cached, charts, inputs, live, pins
from app.draw import draw
from app.jobs import Lever
from app.runs import Run
from app.words import MARKS, change_label, escape, in_app, problem, section
from planner.answers import advise
from planner.answers.changes import Change
from planner.plan import Plan
from planner.report import summary
from planner.units import format_bytes

FIRST_LEVERS, MOST_LEVERS = 3, 6
"""How many are seen at once, and how many there are when the others are unfolded."""


def offer_look_up(name: str) -> None:
    """Ask before anything is sent: the hub is only asked when a person wants it."""
    with st.container(border=True):
        section(f"{escape(name)} is not in the catalogue")
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
            st.caption("Its config.json can be uploaded instead: Will it fit?, Start from a file.")


def verdict_card(run: Run, result: Plan) -> None:
    """Show fits, tight or does not fit, why, and the figures behind it."""
    colour, icon, word = MARKS[result.verdict]
    why = in_app(result.why[0].upper() + result.why[1:] + ".")
    with st.container(border=True, key="verdict"):
        st.header(f":{colour}[{icon} {word}]", anchor=False)
        live.say(f"{word}. {why}")
        st.write(escape(why))
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
    section("Phase by phase")
    sizes = ", ".join(f"{p.name} {format_bytes(p.total_bytes)}" for p in result.phases)
    draw(
        charts.phase_bars(result),
        alt=f"GPU memory by phase against {format_bytes(result.capacity_bytes)}: {sizes}.",
        key="phase_chart",
        figures=charts.term_rows(result),
        columns=("phase", "term", "size", "formula", "source"),
    )


def lever_buttons(run: Run, result: Plan) -> None:
    """Show what lowers the peak, each as one button that applies it."""
    section("What would lower it")
    whole = None if result.fits else st.empty()
    levers = cached.levers(run, judged=not result.fits)
    if not levers:
        st.caption("Nothing single lowers the peak of this run.")
    shown = list(enumerate(levers[:MOST_LEVERS]))
    for number, lever in shown[:FIRST_LEVERS]:
        _lever_button(number, lever, run, helps=lever.verdict == "fits")
    if more := shown[FIRST_LEVERS:]:
        with st.expander(f"{len(more)} more"):
            for number, lever in more:
                _lever_button(number, lever, run, helps=lever.verdict == "fits")
    if whole is not None:
        with whole.container():
            _combination_button(run)


def _lever_button(number: int, lever: Lever, run: Run, *, helps: bool) -> None:
    changes = " Changes the result." if lever.change.changes_objective else ""
    then = f" Then: {MARKS[lever.verdict][2].lower()}." if lever.verdict else ""
    st.button(
        f"{change_label(lever.change)}: saves {format_bytes(lever.saved_bytes, digits=1)}",
        key=f"lever_{number}",
        help=in_app(f"{lever.price}.{then}{changes}"),
        icon=":material/check_circle:" if helps else ":material/trending_down:",
        width="stretch",
        on_click=_apply,
        args=(run, [lever.change]),
    )


def _combination_button(run: Run) -> None:
    with st.spinner("Looking for changes that make it fit ..."):
        found = cached.mended(run)
    if found is None:
        st.caption("No combination of up to four of these makes it fit.")
        return
    st.button(
        f"Make it fit: {format_bytes(found.saved_bytes, digits=1)} less",
        key="make_it_fit",
        type="primary",
        help=" + ".join(map(change_label, found.changes)),
        width="stretch",
        icon=":material/auto_fix_high:",
        on_click=_apply,
        args=(run, found.changes),
    )
    st.caption(escape(" + ".join(map(change_label, found.changes))))


def _apply(run: Run, changes: list[Change]) -> None:
    recipe = run.recipe
    for change in changes:
        recipe = advise.apply(recipe, change)
    inputs.set_recipe(recipe, run)
