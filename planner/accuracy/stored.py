"""The planner's figure for every published row, kept in data/calibration/predictions.csv.

`make calibrate` writes it beside the ratios, with the same fingerprint. A page that shows the accuracy
reads it in a second instead of planning every run again; with other formulas or rows it is not read.
"""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from planner.accuracy.prediction import NotARun, NotCovered, Prediction
from planner.accuracy.rows import Row
from planner.accuracy.score import Predictor
from planner.datafiles import data_dir

NO_RUN = "no run"
"""Marks the reason of a row that is no run's memory."""


class Stored(NamedTuple):
    """One line: a figure with its interval, or the reason why there is none."""

    layout: str
    id: str
    row_quantity: str
    quantity: str
    value: float = 0.0
    low: float = 0.0
    high: float = 0.0
    planned: bool = False
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Which row."""
        return self.layout, self.id, self.row_quantity


def predictions_path() -> Path:
    """Return the file."""
    return Path(str(data_dir() / "calibration" / "predictions.csv"))


class Recorder:
    """A predictor that remembers what another one said of each row."""

    def __init__(self, predict: Predictor) -> None:
        self.predict = predict
        self.lines: list[Stored] = []

    def __call__(self, row: Row) -> Prediction:
        """Predict a row; raises as the other predictor does."""
        where = row.layout.value, row.id, row.quantity
        try:
            made = self.predict(row)
        except NotARun as reason:
            self.lines.append(Stored(*where, NO_RUN, reason=str(reason)))
            raise
        except NotCovered as reason:
            self.lines.append(Stored(*where, "", reason=str(reason)))
            raise
        value, low, high = (float(f"{figure:.9g}") for figure in (made.value, made.low, made.high))
        self.lines.append(Stored(*where, made.quantity, value, low, high, made.planned))
        return made

    def text(self, fingerprint: str) -> str:
        """Return the file of what was said."""
        stream = io.StringIO()
        stream.write(
            f"# planned for every row; made by `make calibrate` with formulas {fingerprint}\n"
        )
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(Stored._fields)
        writer.writerows((*line[:7], int(line.planned), line.reason) for line in self.lines)
        return stream.getvalue()


def stored_predictor(fingerprint: Callable[[], str]) -> Predictor | None:
    """Return a predictor that reads the file; None when it is of other formulas or rows."""
    path = predictions_path()
    if not path.is_file():
        return None
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    if head.rpartition(" ")[2] != fingerprint():
        return None
    known: dict[tuple[str, str, str], list[Stored]] = {}
    for layout, id_, asked, quantity, *figures, planned, reason in list(csv.reader(lines))[1:]:
        value, low, high = (float(figure) for figure in figures)
        line = Stored(layout, id_, asked, quantity, value, low, high, planned == "1", reason)
        known.setdefault(line.key, []).append(line)

    def predict(row: Row) -> Prediction:
        line = known[row.layout.value, row.id, row.quantity].pop(0)
        if line.reason:
            raise (NotARun if line.quantity == NO_RUN else NotCovered)(line.reason)
        return Prediction(
            line.quantity, line.value, line.low, line.high, planned_before=line.planned
        )

    return predict
