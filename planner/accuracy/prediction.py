"""What the planner says about one row, or the reason why it cannot say anything."""

from dataclasses import dataclass


class NotCovered(Exception):
    """The row cannot be expressed; the message is the reason, for people."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted figure with its interval, in the row's unit (bytes, tokens, blocks, x)."""

    quantity: str
    """Canonical name, so that the same kind of figure is scored together."""
    value: float
    low: float
    high: float


def around(quantity: str, value: float, low: float, high: float) -> Prediction:
    """Return a prediction with an interval given by two factors, for example 0.95 and 1.1."""
    first, last = sorted((value * low, value * high))
    return Prediction(quantity, value, first, last)
