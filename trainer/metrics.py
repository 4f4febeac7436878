"""What a run says about itself: JSONL, a progress line, completions; trackers are in trainer/reporters.

One JSON object a step in OUTPUT/metrics.jsonl; sampled completions in OUTPUT/completions/*.parquet.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FOLDER = "completions"
CELL_WIDTH = 60


class MetricsLog:
    """Appends one JSON line a step; after a resume, lines of redone steps are dropped first."""

    def __init__(
        self,
        output: Path,
        *,
        first_step: int = 0,
        name: str = METRICS_FILE,
    ) -> None:
        self.path = output / name
        output.mkdir(parents=True, exist_ok=True)
        self._drop_from(first_step)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log one step. NaN and infinity become null: JSON has no word for them."""
        line = json.dumps({"step": step, **{key: finite(value) for key, value in metrics.items()}})
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _drop_from(self, first_step: int) -> None:
        kept = [line for line in read_metrics(self.path) if line["step"] < first_step]
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(part, self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the steps logged at `path`; a line cut by a crash is left out."""
    steps = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                steps.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return steps


def reward_metrics(
    by_reward: Mapping[str, Sequence[float | None]], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return mean, standard deviation and seconds of every reward function."""
    metrics: dict[str, float] = {}
    for name, values in by_reward.items():
        said = [value for value in values if value is not None and math.isfinite(value)]
        average, std = mean_std(said)
        metrics[f"rewards/{name}/mean"] = average
        metrics[f"rewards/{name}/std"] = std
        metrics[f"rewards/{name}/silent_frac"] = 1 - len(said) / max(1, len(values))
        metrics[f"rewards/{name}/seconds"] = seconds[name]
    return metrics


def length_metrics(lengths: Sequence[int], finished: Sequence[bool]) -> dict[str, float]:
    """Return how long completions are and how many were cut at the limit."""
    ended = [length for length, done in zip(lengths, finished, strict=True) if done]
    return {
        "completions/mean_length": sum(lengths) / max(1, len(lengths)),
        "completions/min_length": min(lengths, default=0),
        "completions/max_length": max(lengths, default=0),
        "completions/mean_finished_length": sum(ended) / max(1, len(ended)),
        "completions/truncated_frac": 1 - len(ended) / max(1, len(lengths)),
    }


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of nothing."""
    return mean_std(values)[0]


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and unbiased standard deviation; NaN of nothing, 0 deviation of one."""
    if not values:
        return math.nan, math.nan
    average = sum(values) / len(values)
    if len(values) < 2:
        return average, 0.0
    squares = sum((value - average) ** 2 for value in values)
    return average, math.sqrt(squares / (len(values) - 1))


def save_completions(output: Path, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write one step's completions as Parquet: prompt, completion, rewards, advantage ..."""
    import pyarrow
    import pyarrow.parquet

    folder = output / COMPLETIONS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.parquet"
    table = pyarrow.table({"step": [step] * len(next(iter(columns.values()))), **columns})
    part = path.with_suffix(".part")
    pyarrow.parquet.write_table(table, part)
    os.replace(part, path)
    return path


def completions_table(columns: Mapping[str, Sequence[Any]], *, rows: int) -> Any:
    """Return a rich table of the first `rows` completions."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in list(zip(*columns.values(), strict=True))[:rows]:
        # Text, not str: a completion may hold what looks like rich markup
        table.add_row(*(Text(_cell(value)) for value in row))
    return table


class Progress:
    """A progress bar with the step's figures, on stderr; lines where stderr is no terminal."""

    def __init__(self, total: int, *, done: int = 0, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.console = Console(stderr=True, quiet=quiet)
        self._bar = Bar(
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, step: int, text: str) -> None:
        """Show that `step` steps are done."""
        self._bar.update(self._task, completed=step, description=text)
        if not self.console.is_terminal:
            self.console.print(f"step {step}: {text}", highlight=False, soft_wrap=True)

    def say(self, text: Any) -> None:
        """Print above the bar; text as it is, on one line, whatever looks like markup in it."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=isinstance(text, str))


def finite(value: Any) -> Any:
    """Return `value`, or None for NaN and infinity: JSON has no word for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if len(text) <= CELL_WIDTH else "..." + text[3 - CELL_WIDTH :]
