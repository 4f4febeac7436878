"""What a plan says about one row, or the reason why it cannot say anything."""

from dataclasses import dataclass

from planner.plan import Plan


class NotCovered(Exception):
    """The row cannot be expressed; the message is the reason, for people."""


class NotARun(Exception):
    """The row is no run's memory: a kernel benchmark (benchmarks/laws) or somebody's estimate."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure of a plan with its interval, in the row's unit (bytes, tokens, blocks, x)."""

    quantity: str
    """Canonical name, so that the same kind of figure is scored together. "log_": arithmetic on the
    log's own lines, no prediction of a run."""
    value: float
    low: float
    high: float
    plan: Plan | None = None
    """The plan the figure was read from."""
    planned_before: bool = False
    """It was read from a plan that is not kept."""
    truth: float | None = None
    """The row's figure in the prediction's unit, where the file has another."""
    judged: bool = True
    """The plan is of the row's run, so that its verdict is; not where lengths are caps alone."""

    @property
    def planned(self) -> bool:
        """The figure comes from plan()."""
        return self.plan is not None or self.planned_before


def around(
    quantity: str, value: float, low: float, high: float, plan: Plan | None = None
) -> Prediction:
    """Return a prediction with an interval given by two factors, for example 0.95 and 1.1."""
    first, last = sorted((value * low, value * high))
    return Prediction(quantity, value, first, last, plan)
