"""What a planned run takes in time and money, as one row of a list.

Where nobody said how long a run is, rows say what a million tokens take: settings whose steps hold
different numbers of samples are compared by it.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from math import sqrt
from typing import Any

from planner.plan import Plan
from planner.speed.cost import (
    SECONDS_PER_HOUR,
    Amount,
    Price,
    cost_of,
    length_notes,
    listed_prices,
)
from planner.speed.time import time_of

MILLION = 1_000_000
PER_RUN, PER_TOKENS = "the run", "a million tokens"
Spending = Callable[[Plan], "Spent | None"]
"""Says what a plan takes; None where the card's speed is not known."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Time and money of one row."""

    step_seconds: float
    tokens_per_s: float
    bound_by: str
    of: str
    """What hours and dollars are of: the run, or a million tokens."""
    hours: float
    hours_low: float
    hours_high: float
    usd_low: float | None
    usd_high: float | None
    usd_middle: float | None
    """The likely hours at the middle (geometric) of the price's range: what rows are ordered by."""
    assumed: tuple[str, ...] = ()

    @property
    def usd_a_million(self) -> float | None:
        """Return the middle price of a million tokens, however long the run is."""
        if self.usd_middle is None:
            return None
        return self.usd_middle * MILLION / (self.tokens_per_s * SECONDS_PER_HOUR * self.hours)

    def rounded(self) -> dict[str, Any]:
        """Return the JSON form."""
        figures = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: float(f"{each:.6g}") if isinstance(each, float) else each
            for name, each in figures.items()
        }


NO_AMOUNT = Amount()


def spent(plan: Plan, amount: Amount = NO_AMOUNT, price: str | None = None) -> Spent | None:
    """Return what a plan's run takes; None where its card's speed is not known."""
    time = time_of(plan, longest=amount.longest_completion)
    if time is None or not time.step_seconds or not time.tokens:
        return None
    cost = cost_of(time, plan.machine, amount, price)
    if cost.steps is None:
        steps, of = MILLION / time.tokens, PER_TOKENS
    else:
        steps, of = float(cost.steps), PER_RUN
    low, likely, high = (
        steps * each / SECONDS_PER_HOUR for each in (time.low, time.step_seconds, time.high)
    )
    rate, gpus = cost.price, plan.machine.num_gpus
    return Spent(
        step_seconds=time.step_seconds,
        tokens_per_s=time.tokens_per_s,
        bound_by=time.bound_by,
        of=of,
        hours=likely,
        hours_low=low,
        hours_high=high,
        usd_low=low * gpus * rate.low if rate else None,
        usd_high=high * gpus * rate.high if rate else None,
        usd_middle=likely * gpus * middle(rate) if rate else None,
        assumed=(*length_notes(plan, amount), *time.notes),
    )


def middle(price: Price) -> float:
    """Return the price that a range is compared by: as many times its low end as its high end is it."""
    return sqrt(price.low * price.high)


def order(row: Spent | None) -> tuple[int, float]:
    """Return the key of a row: dollars, then hours of cards without a price, then unknown speeds."""
    if row is None:
        return 2, 0.0
    return (0, row.usd_middle) if row.usd_middle is not None else (1, row.hours)


RULE = (
    "the cheapest first: likely hours at the middle (geometric) of the listed prices; cards without a "
    "listed price after them, the fastest first; then cards whose speed is not known, the smallest first"
)


def priced_cards() -> tuple[str, ...]:
    """Return the cards with a listed price."""
    return tuple(listed_prices())


def csv_of(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> str:
    """Return rows as CSV with those columns; what a row does not know is empty."""
    kept = StringIO()
    writer = csv.writer(kept, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if row.get(name) is None else row[name] for name in columns])
    return kept.getvalue()
