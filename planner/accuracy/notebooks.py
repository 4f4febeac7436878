"""What Unsloth's notebooks say beside the figures: release, base model, data set, printed lengths.

Their `max_seq_length` is a cap. data/measurements/notebooks.json holds, for every notebook with a
figure, what its cells print, and for every data set a median and a longest length with where they
come from. A run's steps then have sequences of many lengths, which its allocator saw one after the
other: `step_lengths` draws them at equal steps of the distribution, in a fixed shuffled order.
"""

import json
from dataclasses import dataclass
from functools import cache
from math import exp, log
from statistics import NormalDist
from typing import Any

from planner.accuracy.rows import Row
from planner.datafiles import data_dir

SOURCE = "unsloth-notebooks"
STEPS = 6
"""Steps that a run is replayed with; in expandable segments 48 hold what 6 do."""
SHUFFLE = 5
"""Coprime with STEPS: every draw once, long after short and short after long."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Tokens of a sample."""

    median: int | None
    """None: nearly all samples reach the cap."""
    longest: int | None
    """Of a run's few hundred samples; None: it reaches the cap."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Notebook:
    """What one notebook prints."""

    release: str
    model: str
    steps: int
    trained: int
    """Trainable parameters, as printed."""
    data: str = ""
    image: tuple[int, int] | None = None
    """Width and height of a sample's image."""
    context: int = 0
    """Tokens of a sample where they are printed; 0: the row's cap."""
    tiled_mlp: bool = False
    attention: str = ""
    """Where the code has no flash kernel for the model on that card."""
    not_a_run: str = ""
    """Why the printed figures belong to another notebook's run."""


@cache
def _document() -> dict[str, Any]:
    text = (data_dir() / "measurements" / "notebooks.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


@cache
def _notebook(path: str) -> Notebook | None:
    found = _document()["notebooks"].get(path)
    if found is None:
        return None
    image = found.get("image")
    return Notebook(**{**found, "image": tuple(image) if image else None})


def notebook_of(row: Row) -> Notebook | None:
    """Return what is known of the notebook a row was read from; None for other rows."""
    return _notebook(row["path"]) if row["source_family"] == SOURCE else None


def data_set(name: str) -> DataSet | None:
    """Return the lengths of a data set's samples, or None where none are known."""
    found = _document()["data"].get(name)
    return DataSet(**found) if found else None


def step_lengths(
    data: DataSet, cap: int, batch: int, samples: int, chance: float
) -> tuple[int, ...]:
    """Return the longest sample of the micro-batches of a run's steps.

    `chance`: how likely the run's longest sample is no longer than the longest drawn here.
    """
    if data.median is None:
        return (cap, cap)
    at_most = min(cap, data.longest or cap)
    if data.longest is None:
        top = cap
    else:
        top = min(cap, int(quantile(data, chance ** (1 / max(1, samples)), samples)))
    drawn = [
        min(at_most, int(quantile(data, ((k + 0.5) / STEPS) ** (1 / batch), samples)))
        for k in range(STEPS)
    ]
    shuffled = [drawn[k * SHUFFLE % STEPS] for k in range(STEPS)]
    return (*(min(length, top) for length in shuffled), top)


def quantile(data: DataSet, share: float, samples: int) -> float:
    """Return a quantile of the log-normal whose largest of `samples` is the longest as a median."""
    assert data.median is not None
    longest = data.longest or 8 * data.median
    most = NormalDist().inv_cdf(0.5 ** (1 / max(2, samples)))
    spread = log(longest / data.median) / most
    return data.median * exp(spread * NormalDist().inv_cdf(share))
