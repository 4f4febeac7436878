"""Errors per quantity and per source, and the rows that cannot be expressed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from planner.accuracy.prediction import NotCovered, Prediction
from planner.accuracy.rows import MIN_CONFIDENCE, Row, read_rows
from planner.datafiles import data_dir

FAILED = "the planner failed on it"
Predictor = Callable[[Row], Prediction]


@dataclass(frozen=True, slots=True)
class Scored:
    """A row with its prediction."""

    row: Row
    truth: float
    prediction: Prediction

    @property
    def error(self) -> float:
        """Relative error, signed: positive when the planner says too much."""
        if self.truth == 0:
            # a zero is printed rounded: right when the prediction rounds to it as well
            return 0.0 if self.prediction.low <= 0 else 1.0
        return (self.prediction.value - self.truth) / abs(self.truth)

    @property
    def inside(self) -> bool:
        """The published value lies in the predicted interval."""
        return self.prediction.low <= self.truth <= self.prediction.high


@dataclass(frozen=True, slots=True)
class Statistics:
    """Errors of one group of rows, as fractions of the published value."""

    n: int
    median_abs_error: float
    p90_abs_error: float
    bias: float
    """Median signed error."""
    interval_coverage: float


class Uncovered(NamedTuple):
    """A row that cannot be expressed, and why."""

    id: str
    reason: str
    source: str = ""


@dataclass(slots=True)
class Accuracy:
    """The outcome of scoring some files."""

    rows: int = 0
    """Rows with enough confidence whose run did not fail."""
    scored: list[Scored] = field(default_factory=list)
    not_covered: list[Uncovered] = field(default_factory=list)

    def by_quantity(self) -> dict[str, Statistics]:
        """Return statistics per canonical quantity, largest group first."""
        return _grouped(self.scored, lambda item: item.prediction.quantity)

    def by_source(self) -> dict[str, dict[str, Statistics]]:
        """Return statistics per source and quantity."""
        sources = _split(self.scored, lambda item: item.row.source)
        return {
            source: _grouped(items, lambda item: item.prediction.quantity)
            for source, items in sources.items()
        }

    @property
    def interval_coverage(self) -> float:
        """Share of all scored rows whose published value lies in the interval."""
        return sum(item.inside for item in self.scored) / max(1, len(self.scored))


def measurement_files() -> list[Path]:
    """Return the shipped measurement files."""
    folder = Path(str(data_dir() / "measurements"))
    return sorted(folder.glob("*.csv"))


def score_files(files: Iterable[Path], *, predict: Predictor | None = None) -> Accuracy:
    """Score every row of `files` that has enough confidence and whose run did not fail."""
    if predict is None:
        from planner.accuracy.dispatch import predict_row

        predict = predict_row
    result = Accuracy()
    for path in files:
        for row in read_rows(path):
            if row.confidence >= MIN_CONFIDENCE and not row.failed:
                result.rows += 1
                _score(row, predict, result)
    return result


def _score(row: Row, predict: Predictor, result: Accuracy) -> None:
    try:
        truth = row.truth()
        if truth is None:
            raise NotCovered("the figure has no value or its unit is not known")
        result.scored.append(Scored(row, truth, predict(row)))
    except NotCovered as reason:
        result.not_covered.append(Uncovered(row.id, str(reason), row.source))
    except Exception as error:  # one row must not cost the report; a test looks for this reason
        why = f"{FAILED}: {type(error).__name__} ({error})"
        result.not_covered.append(Uncovered(row.id, why, row.source))


def summarise(items: list[Scored]) -> Statistics:
    """Return the statistics of a non-empty group."""
    errors = sorted(abs(item.error) for item in items)
    rank = min(len(errors) - 1, int(0.9 * len(errors)))
    return Statistics(
        n=len(items),
        median_abs_error=median(errors),
        p90_abs_error=errors[rank],
        bias=median(item.error for item in items),
        interval_coverage=sum(item.inside for item in items) / len(items),
    )


def _split(items: list[Scored], key: Callable[[Scored], str]) -> dict[str, list[Scored]]:
    groups: dict[str, list[Scored]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _grouped(items: list[Scored], key: Callable[[Scored], str]) -> dict[str, Statistics]:
    groups = _split(items, key)
    ordered = sorted(groups, key=lambda name: (-len(groups[name]), name))
    return {name: summarise(groups[name]) for name in ordered}
