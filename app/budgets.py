"""The page "Budget": sliders for memory, hours and dollars over the ways to do a run that nothing beats."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import cached
from app.charts import Spec, tips
from app.draw import draw
from app.finding import open_run
from app.palette import RANGE_COLOUR
from app.runs import Run
from app.words import escape, in_app
from planner.answers.frontier import Frontier, Point
from planner.report.frontier import BANDS
from planner.report.time import HOUR, between, dollars, span
from planner.run.runfile import make_recipe
from planner.speed.budget import Budget
from planner.units import GiB, format_bytes

SAMPLES, EPOCHS = 10_000, 1.0
"""The run that the page opens with."""
SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384)
"""GiB of one GPU that the slider stops at."""
STEPS = (1, 2, 3, 5, 7)
ALL = "any"


def show(run: Run) -> None:
    """Show the page for a run."""
    left, right = st.columns(2)
    samples = left.number_input(
        "Samples (or prompts) of the data set", 1, 10**9, SAMPLES, key="budget_samples"
    )
    epochs = right.number_input("Passes over them", 0.01, 1000.0, EPOCHS, 1.0, key="budget_epochs")
    with st.spinner("Planning on every card with a known price ..."):
        found = cached.ways(run, int(samples), float(epochs))
    if not found.points:
        st.info("Nothing that was tried fits. Try a shorter context or a smaller model.")
        return
    budget = _sliders(found.points, priced=found.priced)
    kept = found.within(budget)
    _verdict(found, kept, budget)
    _chart(found, kept)
    rows = kept or [each[0] for each in (found.nearest(budget),) if each is not None]
    _table(rows)
    for note in (*found.notes, *found.left_out):
        st.caption(escape(in_app(note[0].upper() + note[1:])) + ".")


def _sliders(points: Sequence[Point], *, priced: bool) -> Budget:
    """Show what a person has, as far as every way or none is in it, and return it."""
    memory, hours, money = st.columns(3)
    sizes = [size for size in SIZES if size * GiB >= min(p.peak_bytes for p in points) / 2]
    times = stops([p.spent.hours for p in points])
    spent = stops([p.spent.usd_middle or 0.0 for p in points]) if priced else []
    with memory:
        most_gib = _slider("Memory of one GPU", sizes, "budget_gib", lambda x: f"{x:g} GiB")
    with hours:
        most_hours = _slider("Hours", times, "budget_hours", lambda x: span(x * HOUR))
    with money:
        most_usd = _slider("Dollars", spent, "budget_usd", dollars) if spent else None
    return Budget(int(most_gib * GiB) if most_gib else None, most_hours, most_usd)


def stops(values: Sequence[float]) -> list[float]:
    """Return round figures from under the least value to over the largest."""
    low, high = min(values) / 2, max(values)
    every = [float(f"{step}e{power}") for power in range(-4, 8) for step in STEPS]
    kept = [each for each in every if each >= low]
    return kept[: next((n for n, each in enumerate(kept, 1) if each >= high), len(kept))]


def _slider(label: str, stops: Sequence[float], key: str, said: Any) -> float | None:
    options: list[Any] = [*stops, ALL]
    if st.session_state.get(key) not in options:  # another run has other figures
        st.session_state[key] = ALL
    chosen = st.select_slider(
        f"{label}, at most", options, key=key,
        format_func=lambda each: said(each) if isinstance(each, float) else ALL,
    )  # fmt: skip
    return chosen if isinstance(chosen, float) else None


def _verdict(found: Frontier, kept: Sequence[Point], budget: Budget) -> None:
    """Say how many ways are left; where none is, what comes nearest and what binds."""
    limits = ", ".join(budget.said(name).replace("$", "\\$") for name in budget.limits())
    with st.container(key="budget_verdict"):
        if kept:
            best = kept[0]
            st.markdown(
                f"**{len(kept)} of {len(found.points)} ways** that nothing beats "
                + (f"meet {limits}. " if limits else "are shown. ")
                + f"The cheapest: {_words(best)}."
            )
            return
        nearest = found.nearest(budget)
        if nearest is None:
            return
        over = budget.over(nearest[0].values)
        passed = ", ".join(f"{name} by {x - 1:.0%}" for name, x in over.items() if x > 1)
        binding = found.binding(budget)
        why = (
            f"Without the limit on {' or '.join(binding)} the others can be met."
            if binding
            else "At least two limits have to give."
            if len(over) > 1
            else ""
        )
        st.warning(
            f"Nothing meets {limits}. The nearest, {_words(nearest[0])}, passes {passed}. {why}",
            icon=":material/savings:",
        )


def _words(point: Point) -> str:
    money = point.spent.usd_middle
    spent = f", about {dollars(money)}".replace("$", "\\$") if money is not None else ""
    return f"{point.gpus} x {point.gpu}, {span(point.spent.hours * HOUR)}{spent}"


def _rows(points: Sequence[Point], kept: Sequence[Point]) -> list[Spec]:
    inside = {id(point) for point in kept}
    return [
        {
            "gpus": f"{point.gpus} x {point.gpu}",
            "peak": format_bytes(point.peak_bytes, digits=1),
            "hours": point.spent.hours,
            "usd": point.spent.usd_middle,
            "gib": point.peak_bytes / GiB,
            "time": span(point.spent.hours * HOUR),
            "dollars": _money(point),
            "settings": ", ".join(filter(None, (point.layout, point.settings))),
            "memory": band(point.peak_bytes),
            "inside": id(point) in inside,
        }
        for point in points
    ]


def _money(point: Point) -> str:
    low, high = point.spent.usd_low, point.spent.usd_high
    return between(dollars(low), dollars(high)) if low is not None and high is not None else ""


def band(size: int) -> str:
    """Return the name of a size of memory."""
    most = next((limit for limit, _ in BANDS if size <= limit), BANDS[-1][0])
    return f"up to {most // GiB} GiB" if most < BANDS[-1][0] else f"over {BANDS[-2][0] // GiB} GiB"


def scatter(rows: Sequence[Spec], *, priced: bool) -> Spec:
    """Return ways by hours and dollars (memory where no price is known); what a budget leaves out is grey."""
    names = [band(limit) for limit, _ in BANDS]
    scale = {"type": "log", "nice": False, "padding": 18}
    return {
        "height": 380,
        "data": {"values": list(rows)},
        "mark": {"type": "point", "filled": True, "size": 130, "opacity": 0.9},
        "encoding": {
            "x": {"field": "hours", "type": "quantitative", "scale": scale,
                  "axis": {"title": "hours", "format": "~g", "tickCount": 6}},
            "y": {"field": "usd" if priced else "gib", "type": "quantitative", "scale": scale,
                  "axis": {"title": "dollars" if priced else "GiB", "format": "~g", "tickCount": 6,
                           "titlePadding": 4}},
            "shape": {"field": "inside", "type": "nominal", "legend": None,
                      "scale": {"domain": [True, False], "range": ["circle", "cross"]}},
            "color": {
                "condition": {"test": "!datum.inside", "value": RANGE_COLOUR},
                "field": "memory",
                "type": "nominal",
                "scale": {"domain": names, "range": [colour for _, colour in BANDS]},
                "legend": {"title": None, "orient": "top", "columns": 3},
            },
            "tooltip": tips("gpus", "peak", "time", "dollars", "settings"),
        },
    }  # fmt: skip


def _chart(found: Frontier, kept: Sequence[Point]) -> None:
    rows = _rows(found.points, kept)
    axis = "dollars" if found.priced else "memory"
    draw(
        scatter(rows, priced=found.priced),
        key="budget_chart",
        alt=f"{len(rows)} ways by hours and {axis}, coloured by memory of a GPU; crosses are over the budget.",
        figures=rows,
        columns=("gpus", "peak", "time", "dollars", "settings", "inside"),
    )


def _table(points: Sequence[Point]) -> None:
    """Show the ways as a table, and open one as a plan."""
    rows = _rows(points, points)
    columns = ["gpus", "peak", "time", "dollars", "settings"]
    st.dataframe(
        pd.DataFrame(rows)[columns],
        hide_index=True,
        width="stretch",
        key="budget_table",
        alt="Ways to do the run with GPUs, peak, time, dollars and settings, the cheapest first.",
    )
    labels = [f"{row['gpus']}, {row['time']}, {row['settings']}" for row in rows]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox(
            "Pick a way", range(len(labels)), index=None, key="budget_row", placeholder="by name",
            format_func=lambda row: labels[row] if row < len(labels) else "", width=420,
        )  # fmt: skip
        st.button(
            "Open in Will it fit?", key="budget_open", disabled=chosen is None or chosen >= len(points),
            on_click=_open, args=(points[min(chosen or 0, len(points) - 1)],),
        )  # fmt: skip


def _open(point: Point) -> None:
    open_run(
        make_recipe(**point.recipe), model=st.session_state["model"], gpu=point.gpu, gpus=point.gpus
    )
