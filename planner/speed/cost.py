"""Hours, dollars and energy of a run: a step's time times its steps, prices as dated ranges."""

import csv
import re
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.datafiles import data_dir
from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.run.tasks import TASKS
from planner.speed.cards import card_speed
from planner.speed.time import Time

if TYPE_CHECKING:
    from planner.plan import Plan

SECONDS_PER_HOUR = 3600
WATTS_PER_KILOWATT = 1000
MOST_DOLLARS = 100_000
"""An hour of a GPU: more is another unit."""


class Price(NamedTuple):
    """Dollars for one GPU and hour, as a range."""

    low: float
    high: float
    source: str


class Amount(NamedTuple):
    """How much is trained, as somebody asked for it."""

    samples: int | None = None
    epochs: float | None = None
    total_steps: int | None = None
    lengths_known: bool = False
    """The plan's rows are as long as a file of lengths says."""
    longest_completion: int = 0
    """Tokens, where the plan's completions are as long as on average; 0: they all are."""

    @property
    def known(self) -> bool:
        """It says how many steps there are."""
        return self.samples is not None or self.total_steps is not None


class Cost(NamedTuple):
    """What a run takes; None where nobody said how long it is."""

    steps: int | None
    hours: tuple[float, float, float] | None
    """Low, likely, high."""
    price: Price | None
    usd: tuple[float, float] | None
    kilowatt_hours: tuple[float, float] | None
    """At the boards' rated power, so at most."""

    def run_hours(self) -> float | None:
        """Return the likely hours."""
        return self.hours[1] if self.hours else None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of `cost`."""
        found: dict[str, Any] = {"usd_per_hour": None, "usd_per_run": None, "price_source": None}
        if self.price is not None:
            found["usd_per_hour"] = {"low": self.price.low, "high": self.price.high}
            found["price_source"] = self.price.source
        if self.usd is not None:
            found["usd_per_run"] = {"low": round(self.usd[0], 4), "high": round(self.usd[1], 4)}
        if self.kilowatt_hours is not None:
            low, high = self.kilowatt_hours
            found["kilowatt_hours_at_most"] = {"low": round(low, 4), "high": round(high, 4)}
        return found


@cache
def listed_prices() -> dict[str, Price]:
    """Return the dated price ranges of data/prices by card."""
    text = (data_dir() / "prices" / "cloud.csv").read_text(encoding="utf-8")
    found = {}
    for row in csv.DictReader(text.splitlines()):
        dates = " to ".join(dict.fromkeys((row["first_read"], row["last_read"])))
        source = f"read {dates}: {row['source']}"
        found[row["id"]] = Price(float(row["low_usd_h"]), float(row["high_usd_h"]), source)
    return found


_PRICE = re.compile(
    r"^\$? ?(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))? ?(?:usd|\$|dollars?)? ?(?:/ ?(?:gpu-?)?h(?:our|r)?)?$"
)


def parse_price(text: str) -> Price:
    """Return dollars for one GPU and hour: "2.4", "$2.4/h", "2.4-3.1"; UsageError for another unit."""
    match = _PRICE.match(text.strip().lower())
    if match is None:
        raise UsageError(
            f"price: cannot read {text[:40]!r}",
            hint="US dollars for one GPU and hour: 2.4, $2.40/h, or a range like 2.4-3.1",
        )
    low = float(match[1])
    high = float(match[2] or match[1])
    if not 0 <= low <= high <= MOST_DOLLARS:
        raise UsageError(
            f"price: {text[:40]!r} is outside what is allowed",
            hint=f"US dollars for one GPU and hour, from 0 to {MOST_DOLLARS:,}, the lower first",
        )
    return Price(low, high, "--price")


def refuse_amount(amount: Amount) -> None:
    """Refuse amounts that are none."""
    for name, value in (
        ("samples", amount.samples), ("epochs", amount.epochs), ("total-steps", amount.total_steps),
    ):  # fmt: skip
        if value is not None and value <= 0:
            raise UsageError(f"{name}: {value} is not allowed", hint="more than 0")


def steps_of(time: Time, amount: Amount) -> int | None:
    """Return the optimizer steps of a run; UsageError for what contradicts itself."""
    refuse_amount(amount)
    if amount.total_steps is not None:
        return amount.total_steps
    if amount.samples is None:
        if amount.epochs is not None:
            raise UsageError(
                "epochs: of how many samples is not said",
                hint="--samples 7473, or --lengths FILE with one length a sample",
            )
        return None
    return max(1, ceil(amount.samples * (amount.epochs or 1) / time.samples))


def cost_of(time: Time, machine: Machine, amount: Amount, price: str | None) -> Cost:
    """Return what a run takes on its machine."""
    given = parse_price(price) if price is not None else None
    card = machine.gpu.id if machine.gpu is not None else ""
    rate = given or listed_prices().get(card)
    steps = steps_of(time, amount)
    if steps is None:
        return Cost(steps=None, hours=None, price=rate, usd=None, kilowatt_hours=None)
    hours = tuple(
        steps * each / SECONDS_PER_HOUR for each in (time.low, time.step_seconds, time.high)
    )
    low, _, high = hours
    gpus = machine.num_gpus
    speed = card_speed(card) if card else None
    watts = speed.tdp_watts if speed is not None else 0.0
    energy = None
    if watts:
        kilowatts = watts * gpus / WATTS_PER_KILOWATT
        energy = (low * kilowatts, high * kilowatts)
    usd = (low * gpus * rate.low, high * gpus * rate.high) if rate is not None else None
    return Cost(
        steps=steps,
        hours=(hours[0], hours[1], hours[2]),
        price=rate,
        usd=usd,
        kilowatt_hours=energy,
    )


def length_notes(plan: "Plan", amount: Amount) -> list[str]:
    """Return what a run of counted samples takes for granted about their lengths."""
    r = plan.resolved
    if not r.trains or TASKS[r.task].generates or r.packing or amount.samples is None:
        return []
    if amount.lengths_known:
        return [f"rows of {r.seq_tokens:,} tokens on average, as the lengths say"]
    return [f"every sample is {r.seq_tokens:,} tokens long: --lengths FILE says how long they are"]
