"""Published measurements against the planner, as rows that can be filtered and drawn."""

from collections import Counter
from typing import Any

import streamlit as st

from app import jobs, workers
from planner.accuracy.score import (
    Accuracy,
    Scored,
)
from planner.units import format_bytes

WORST = 10
NOT_BYTES = ("tokens", "blocks", "ratio", "concurrency", "x_")


@st.cache_resource(max_entries=1, show_spinner="Planning every published run ...")
def accuracy() -> Accuracy:
    """Return every shipped measurement with the planner's prediction; made once per server.

    The figures are those that were stored when the formulas were last calibrated; with formulas
    changed since, every run is planned again.
    """
    found: Accuracy = workers.run(jobs.accuracy, kind=workers.LONG)
    return found


def quantity_words(quantity: str) -> str:
    """Return a quantity for people: "nvidia smi used peak"."""
    return quantity.replace("_", " ")


def in_bytes(quantity: str) -> bool:
    """Return whether a quantity is a size (others are tokens, blocks or factors)."""
    return not any(word in quantity for word in NOT_BYTES)


def said(quantity: str, value: float) -> str:
    """Return a figure for a person, in the quantity's unit."""
    if in_bytes(quantity):
        return format_bytes(int(value))
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def row(item: Scored) -> dict[str, Any]:
    """Return a scored row as the chart and the table show it."""
    quantity = item.prediction.quantity
    return {
        "id": item.row.id,
        "source": item.row.source,
        "quantity": quantity_words(quantity),
        "measured": item.truth,
        "predicted": item.prediction.value,
        "error": item.error,
        "miss": f"{item.error:+.1%}",
        "inside": "inside the interval" if item.inside else "outside",
        "said": f"{said(quantity, item.truth)} measured, {said(quantity, item.prediction.value)} predicted",
    }


def filtered(result: Accuracy, *, source: str | None, quantity: str | None) -> list[Scored]:
    """Return the scored rows of a source and a quantity; None takes all."""
    return [
        item
        for item in result.scored
        if (source is None or item.row.source == source)
        and (quantity is None or item.prediction.quantity == quantity)
    ]


def worst(items: list[Scored]) -> list[Scored]:
    """Return the rows with the largest relative errors."""
    return sorted(items, key=lambda item: -abs(item.error))[:WORST]


def facts(item: Scored) -> dict[str, str]:
    """Return everything a measurement's row says, empty columns left out."""
    found = item.row.fields.items()
    return {key.replace("_", " "): value for key, value in found if value.strip()}


def source_address(item: Scored) -> str:
    """Return where the figure was published, if the row holds a web address."""
    for value in item.row.fields.values():
        if value.startswith(("https://", "http://")):
            return value.split()[0]
    return ""


def by_quantity(items: list[Scored]) -> list[dict[str, Any]]:
    """Return the statistics of every quantity among some rows, the largest group first."""
    groups = Accuracy(rows=len(items), scored=items).by_quantity()
    return [
        {
            "quantity": quantity_words(name),
            "figures": stats.n,
            "median error": f"{stats.median_abs_error:.1%}",
            "90% within": f"{stats.p90_abs_error:.1%}",
            "bias": f"{stats.bias:+.1%}",
            "in the interval": f"{stats.interval_coverage:.0%}",
        }
        for name, stats in groups.items()
    ]


def reasons(result: Accuracy) -> list[tuple[int, str]]:
    """Return how many figures cannot be expressed for which reason."""
    counts = Counter(uncovered.reason for uncovered in result.not_covered)
    return [(count, why) for why, count in counts.most_common()]
