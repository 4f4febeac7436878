"""Errors per quantity and per source, and the rows that cannot be expressed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from planner.accuracy.notebooks import notebook_of
from planner.accuracy.prediction import NotARun, NotCovered, Prediction
from planner.accuracy.rows import MIN_CONFIDENCE, Row, read_rows
from planner.datafiles import data_dir
from planner.plan import Plan

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
    def width(self) -> float:
        """Width of the predicted interval over the predicted value."""
        prediction = self.prediction
        return (prediction.high - prediction.low) / (abs(prediction.value) or 1)

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
    interval_width: float
    """Median width of the interval over the predicted value."""
    planned: int
    """Rows answered by plan(); the others are arithmetic on a log's own lines."""


class Uncovered(NamedTuple):
    """A row that cannot be expressed, and why."""

    id: str
    reason: str
    source: str = ""


class Verdict(NamedTuple):
    """What a plan said of a run whose end is known."""

    id: str
    source: str
    ran: bool
    """False: it ran out of memory, or its engine refused to start."""
    verdict: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Verdicts of plans against how the runs ended; one a run."""

    rows: tuple[Verdict, ...]

    def count(self, verdict: str, *, ran: bool) -> int:
        """Return how many runs that ended so were given this verdict."""
        return sum(row.ran is ran and row.verdict == verdict for row in self.rows)

    def to_dict(self) -> dict[str, int]:
        """Return the counts of `accuracy --json`."""
        return {
            "ran": sum(row.ran for row in self.rows),
            "oom": sum(not row.ran for row in self.rows),
            "oom_called_fits": self.count("fits", ran=False),
            "ran_called_no": self.count("does not fit", ran=True),
            "ran_called_tight": self.count("tight", ran=True),
        }


@dataclass(slots=True)
class Accuracy:
    """The outcome of scoring some files."""

    rows: int = 0
    """Figures of runs that worked, with enough confidence to be held to them."""
    scored: list[Scored] = field(default_factory=list)
    low_confidence: list[Scored] = field(default_factory=list)
    """Rows below the confidence: scored apart, never in the headline."""
    not_covered: list[Uncovered] = field(default_factory=list)
    elsewhere: list[Uncovered] = field(default_factory=list)
    """Rows that are no run's memory: kernel benchmarks, somebody's estimates."""
    runs: dict[tuple[str, bool], Verdict] = field(default_factory=dict)
    spilled: dict[tuple[str, bool], Uncovered] = field(default_factory=dict)
    """Runs whose tensors were more than their card: no verdict on the card can be judged by them."""

    @property
    def verdicts(self) -> Verdicts:
        """Return the verdicts, one for every run and end."""
        return Verdicts(tuple(row for key, row in self.runs.items() if key not in self.spilled))

    def by_quantity(self) -> dict[str, Statistics]:
        """Return statistics per canonical quantity, largest group first; unsure rows last, apart."""
        sure = _grouped(self.scored, lambda item: item.prediction.quantity)
        unsure = _grouped(
            self.low_confidence, lambda item: f"low_confidence_{item.prediction.quantity}"
        )
        return sure | unsure

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
    """Score every figure of `files`; runs that failed are judged by the plan's verdict alone."""
    if predict is None:
        from planner.accuracy.dispatch import predict_row

        predict = predict_row
    result = Accuracy()
    for path in files:
        for row in read_rows(path):
            _score(row, predict, result)
    return result


def _score(row: Row, predict: Predictor, result: Accuracy) -> None:
    sure = row.confidence >= MIN_CONFIDENCE or notebook_of(row) is not None
    try:
        if row.failed:
            _judge(row, predict(row), result)
            return
        result.rows += sure
        prediction = predict(row)
        truth = prediction.truth if prediction.truth is not None else row.truth()
        if truth is None:
            raise NotCovered("the figure has no value or its unit is not known")
        item = Scored(row, truth, prediction)
        (result.scored if sure else result.low_confidence).append(item)
        if sure:
            _judge(row, item.prediction, result)
            _note_spill(item, result)
    except NotARun as reason:
        result.rows -= sure and not row.failed
        result.elsewhere.append(Uncovered(row.id, str(reason), row.source))
    except NotCovered as reason:
        if sure and not row.failed:
            result.not_covered.append(Uncovered(row.id, str(reason), row.source))
    except Exception as error:  # one row must not cost the report; a test looks for this reason
        why = f"{FAILED}: {type(error).__name__} ({error})"
        result.not_covered.append(Uncovered(row.id, why, row.source))


SPILLED = (
    "its tensors were more than its card holds: Windows' driver moves what is over to host memory"
)


def _note_spill(item: Scored, result: Accuracy) -> None:
    """Keep runs that cannot have stayed in their card: allocated and the context exceed it."""
    plan = item.prediction.plan
    if plan is None or item.prediction.quantity != "peak_allocated":
        return
    if item.truth + plan.machine.context_bytes > plan.machine.vram_bytes:
        row = item.row
        result.spilled[_run_key(row)] = Uncovered(row.id, SPILLED, row.source)


def _run_key(row: Row) -> tuple[str, bool]:
    return f"{row.layout}:{row.run}", not row.failed and not row.refused


def _judge(row: Row, prediction: Prediction, result: Accuracy) -> None:
    """Keep the plan's verdict on the run, once for each run and end."""
    plan = prediction.plan
    if plan is not None and plan.machine.gpu is not None and prediction.judged:
        key = _run_key(row)
        result.runs.setdefault(key, Verdict(row.id, row.source, key[1], plan.verdict, plan))


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
        interval_width=median(item.width for item in items),
        planned=sum(item.prediction.planned for item in items),
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
