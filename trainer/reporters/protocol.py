"""What a tracker has to do, and what it is told about a run."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROJECT = "vramwise"
STEP = "train/global_step"
"""The horizontal axis, by the name that transformers' own callbacks give it."""
Table = Mapping[str, Sequence[Any]]
"""Column -> values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What a tracker is told when a run starts."""

    project: str | None
    """None = the tool's own environment variable, or vramwise."""
    name: str
    output: Path
    config: dict[str, Any]
    """The run file with every default filled in, and the plan's figures; nested."""
    first_step: int = 0
    run_id: str | None = None
    """Of the run to go on with, as `start` returned it; None = a new one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A tracker is ready."""

    run_id: str
    where: str
    """Where to look, in a few words."""


def project_of(facts: RunFacts, variable: str) -> str:
    """Return the project: as the run file says, else as the tool's environment variable does."""
    return facts.project or os.environ.get(variable) or PROJECT


class Reporter(Protocol):
    """One tracker. Whatever a method raises drops the tracker, not the run."""

    def start(self, facts: RunFacts) -> Started:
        """Begin a run, or go on with `facts.run_id`."""
        ...

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of `step`; NaN and infinity may be among them."""
        ...

    def table(self, step: int, name: str, columns: Table) -> None:
        """Take a table, such as a step's completions."""
        ...

    def finish(self, *, failed: bool) -> None:
        """End the run; everything sent so far is to be kept."""
        ...


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"recipe": {"beta": 0}} as {"recipe.beta": 0}."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            made |= flat(value, f"{prefix}{key}.")
        else:
            made[f"{prefix}{key}"] = value
    return made


def plain(value: Any) -> Any:
    """Return a table's cell as a number, text or None."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    return str(value)


def rows_of(columns: Table) -> list[list[Any]]:
    """Return a table's rows, of plain values."""
    return [[plain(value) for value in row] for row in zip(*columns.values(), strict=True)]


def markdown(columns: Table) -> str:
    """Return a table as Markdown; what would end a cell or a row is escaped."""

    def line(cells: Sequence[Any]) -> str:
        texts = [str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells]
        return f"| {' | '.join(texts)} |"

    rows = [line(list(columns)), line(["---"] * len(columns))]
    return "\n".join([*rows, *(line(row) for row in rows_of(columns))])
