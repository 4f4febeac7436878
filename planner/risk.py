"""The risk that a run ends out of memory, and the intervals of a plan: both read off published runs.

A plan's figure times (truth / plan) of runs that were measured is the distribution of its truth. The
runs are those of the same kind and of frameworks as well known as this one; a group with too few
runs, or runs of too few sources, hands over to its parent. No shape is assumed and nothing is
fitted: data/calibration/ratios.csv holds the ratios with the ids of their rows, and
`vramwise accuracy` checks every source against a distribution that it had no part in.
"""

import csv
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from planner.datafiles import data_dir
from planner.run.recipe import Task
from planner.run.resolved import Resolved

MIN_ROWS, MIN_SOURCES = 30, 3
"""Below either a group is not judged by its own rows."""
TAIL = 0.05
"""low and high leave this share on either side; `fits` allows this risk unless told otherwise."""
EVEN = 0.5
"""From this risk on a run is said not to fit."""
SOURCE_SHARE = 30
"""Rows of one source count as this many at most: one laboratory's machine is one machine."""


class Ratio(NamedTuple):
    """One measured figure over its plan."""

    id: str
    source: str
    kind: str
    """train or generate (rollouts on the training GPU)."""
    family: str
    """The framework's family."""
    quantity: str
    """allocated, reserved, device or static (weights, adapters and states)."""
    ratio: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """Ratios in order with the share of the weight up to each."""

    basis: str
    """Whose runs, in words."""
    rows: int
    sources: int
    ratios: tuple[float, ...]
    shares: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """Return the smallest ratio that at least `share` of the weight does not exceed."""
        return self.ratios[min(len(self.ratios) - 1, bisect_left(self.shares, share))]

    def above(self, ratio: float) -> float:
        """Return the share of the weight of ratios greater than `ratio`."""
        index = bisect_left(self.ratios, ratio)
        while index < len(self.ratios) and self.ratios[index] <= ratio:
            index += 1
        return 1.0 - (self.shares[index - 1] if index else 0.0)


@dataclass(frozen=True, slots=True)
class Risk:
    """How likely the run ends out of memory, and on what that rests."""

    p_oom: float
    basis: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"p_oom": round(self.p_oom, 4), "basis": self.basis}


@cache
def ratios() -> tuple[Ratio, ...]:
    """Return the calibration's rows."""
    text = (data_dir() / "calibration" / "ratios.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(
        Ratio(**{**row, "ratio": float(row["ratio"])})  # type: ignore[arg-type]
        for row in csv.DictReader(lines)
    )


def kind_of(r: Resolved) -> str:
    """Return the kind of run that a plan's risk is read off."""
    return "generate" if r.task is Task.GRPO else "train"


@cache
def distribution(quantity: str, kind: str, family: str) -> Distribution:
    """Return the shipped distribution for a figure of a kind of run under a framework family."""
    return choose(ratios(), quantity, kind, family)


def choose(rows: Sequence[Ratio], quantity: str, kind: str, family: str) -> Distribution:
    """Return the nearest group of `rows` with enough runs of enough sources.

    Nearest first: the family's runs of this kind, runs of this kind, all runs. A family without any
    row was never measured: each source then weighs the same, since how far a framework that nobody
    read can be off is seen between sources.
    """
    known = any(row.family == family for row in rows)
    chosen = [row for row in rows if row.quantity == quantity]
    chosen = chosen or [row for row in rows if row.quantity == "allocated"]
    same = [row for row in chosen if row.kind == kind]
    if not known:
        return _weighed(chosen, f"{family} was never measured: all sources alike", share=1)
    for group, words in (
        ([row for row in same if row.family == family], f"{kind} runs of {family}"),
        (same, f"{kind} runs of measured frameworks"),
    ):
        if len(group) >= MIN_ROWS and len({row.source for row in group}) >= MIN_SOURCES:
            return _weighed(group, words, share=SOURCE_SHARE)
    return _weighed(chosen, "all measured runs", share=SOURCE_SHARE)


def _weighed(rows: Sequence[Ratio], words: str, *, share: int) -> Distribution:
    """Return the rows in order; those of one source weigh as `share` rows at most."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.source] = counts.get(row.source, 0) + 1
    ordered = sorted(rows, key=lambda row: row.ratio)
    weights = [min(1.0, share / counts[row.source]) for row in ordered]
    total, run, shares = sum(weights), 0.0, []
    for weight in weights:
        run += weight
        shares.append(run / total)
    basis = f"{words} ({len(rows)} rows, {len(counts)} sources)"
    return Distribution(
        basis, len(rows), len(counts), tuple(row.ratio for row in ordered), tuple(shares)
    )
