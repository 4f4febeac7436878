"""The parts about several GPUs: whose memory a plan shows, a bar for each distinct rank, layouts that fit."""

from typing import Any

import pandas as pd
import streamlit as st

from app import cached, charts, inputs
from app.draw import draw
from app.runs import Run
from app.words import in_app, section
from planner.answers.changes import Change, apply
from planner.answers.layouts import FITTING, Tried, laid_out
from planner.plan import Plan
from planner.report import fullest_rank
from planner.run.recipe import Sharding
from planner.units import format_bytes

MOST_ROWS = 12


def ranks(result: Plan) -> None:
    """Say whose memory this is, with a bar for each distinct rank where they differ."""
    gpus = result.resolved.layout.gpus
    if gpus == 1 or not result.ranks:
        return
    talks = ", ".join(f"{group.name} {group.size}" for group, _ in result.communicators.groups)
    held = format_bytes(result.communicators.held.typical)
    said = f"Groups of GPUs that talk: {talks}; their buffers take {held} outside torch."
    if len(result.ranks) == 1:
        st.caption(f"One GPU of {gpus}; all hold the same. {said}")
        return
    fullest, why = fullest_rank(result)
    section("GPU by GPU")
    st.caption(
        f"Shown above: the fullest, GPU {fullest.rank} of {gpus}, {fullest.role}{why}. {said}"
    )
    draw(
        charts.rank_bars(result),
        key="rank_chart",
        alt=f"Peak of every kind of GPU against {format_bytes(result.capacity_bytes)}: "
        + ", ".join(f"{kind.role} {format_bytes(kind.peak_bytes)}" for kind in result.ranks),
        figures=charts.rank_rows(result),
        columns=("rank", "phase", "term", "size"),
    )


def best(run: Run) -> None:
    """Offer the best layout where several GPUs have none: each would hold a copy of everything."""
    if laid_out(run.recipe, run.machine):
        return
    with st.spinner("Looking for a layout ..."):
        found = cached.layouts(run, fitting=1)
    first = found[0] if found and not found[0].why and found[0].plan else None
    st.info(f"{run.machine.num_gpus} GPUs and no layout: this is a whole copy on each of them.")
    if first is None or first.plan is None:
        st.caption("No layout of these GPUs fits this run.")
        return
    does = "Divide it" if first.update.get("sharding") != Sharding.DDP else "Share the work"
    st.button(
        f"{does}: {first.words} ({format_bytes(first.plan.peak_bytes, digits=1)} on each GPU)",
        key="best_layout",
        type="primary",
        icon=":material/call_split:",
        on_click=_use,
        args=(run, first),
    )


def _use(run: Run, tried: Tried) -> None:
    change = Change("layout", tried.update, "", 0)
    inputs.set_recipe(apply(run.recipe, change), run)


def layout_table(run: Run) -> None:
    """Show the layouts that fit a run on several GPUs, and why the others lose."""
    if run.machine.num_gpus == 1 or run.recipe.task.value == "serve":
        return
    section(f"Layouts on {run.machine.label}")
    with st.spinner("Looking for layouts ..."):
        found = cached.layouts(run, fitting=FITTING)[:MOST_ROWS]
    if not any(tried.plan is not None and tried.plan.fits for tried in found):
        st.info("No layout of these GPUs fits this run.")
    st.caption(
        "The same result every time, the least traffic over slow links (other nodes, host memory) first."
    )
    st.dataframe(
        pd.DataFrame([_row(tried) for tried in found]),
        hide_index=True,
        width="stretch",
        key="layout_table",
        alt="Layouts with peak, verdict, traffic and why each loses to the first.",
    )


def _row(tried: Tried) -> dict[str, Any]:
    made = tried.plan
    return {
        "layout": tried.words,
        "framework": tried.framework,
        "on each GPU": format_bytes(made.peak_bytes if made else tried.standing_bytes, digits=1),
        "verdict": made.verdict if made else "does not fit",
        "over slow links": format_bytes(tried.traffic.slow, digits=1),
        "inside a node": format_bytes(tried.traffic.node, digits=1),
        "why not": in_app(tried.why) if tried.why else "the first choice",
    }
