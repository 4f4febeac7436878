"""How far measured times are from their predictions: the intervals of a plan's seconds.

data/calibration/speed.json holds, for every kind of phase, the factors between which 85% of measured
times over predicted ones lie; each row was predicted by parameters that its source had no part in
(speed_ratios.csv lists them; planner/accuracy/speed_calibrate.py writes both).
"""

from functools import cache
from typing import NamedTuple

from planner.speed.parameters import document

TRAIN, GENERATE = "train", "generate"


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
    """Return the factors of a kind of phase: train or generate."""
    found = document()["spread"][kind]
    return Spread(found["low"], found["high"], int(found["rows"]), int(found["sources"]))
