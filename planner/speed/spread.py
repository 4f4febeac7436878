"""How far measured times are from their predictions: the intervals of a plan's seconds.

data/calibration/speed.json holds, for every kind of phase, the factors between which 85% of measured
times over predicted ones lie; each row was predicted by parameters that its source had no part in
(speed_ratios.csv lists them; planner/accuracy/speed_calibrate.py writes both).
"""

from functools import cache
from typing import NamedTuple

from planner.speed.parameters import document

TRAIN, TRAIN_LAUNCHES, TRAIN_SEVERAL = "train", "train, launches", "train, several GPUs"
TRAIN_UNSTATED = "train, lengths estimated"
"""Runs whose samples' lengths nobody states: no plan is one."""
GENERATE, GENERATE_EAGER, GENERATE_SEVERAL = "generate", "generate, eager", "generate, several GPUs"
GRPO = "grpo"
"""Whole steps, rollout and all: nothing is fitted to them."""
KINDS = (
    *(TRAIN, TRAIN_LAUNCHES, TRAIN_SEVERAL, TRAIN_UNSTATED),
    *(GENERATE, GENERATE_EAGER, GENERATE_SEVERAL),
    GRPO,
)


def kind_of(*, trains: bool, gpus: int, launches: bool) -> str:
    """Return the kind of a step by what decides how well it is known."""
    if launches:
        return TRAIN_LAUNCHES if trains else GENERATE_EAGER
    if gpus > 1:
        return TRAIN_SEVERAL if trains else GENERATE_SEVERAL
    return TRAIN if trains else GENERATE


class Spread(NamedTuple):
    """Factors on a predicted time."""

    low: float
    high: float
    rows: int
    sources: int

    @property
    def basis(self) -> str:
        """Return whose runs these are, in words."""
        return f"{self.rows:,} measured runs of {self.sources} sources, each left out in turn"


@cache
def spread(kind: str) -> Spread:
    """Return the factors of a kind of step."""
    found = document()["spread"][kind]
    return Spread(found["low"], found["high"], int(found["rows"]), int(found["sources"]))
