"""What a run sends to its trackers, when, and what is said of one that fails.

Figures have the names of metrics.jsonl and evaluations.jsonl, in groups as transformers and TRL make them:
train/, eval/, and memory/ with planned beside measured bytes of every phase.
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.run.runfile import load_run_file
from trainer.preflight import Preflight
from trainer.reporters import make_reporter
from trainer.reporters.courier import (
    FINISH_LIMIT_S,
    START_LIMIT_S,
    STOP_LIMIT_S,
    Courier,
    Muffled,
)
from trainer.reporters.protocol import RunFacts
from trainer.say import Say

TABLE_ROWS = 64
"""Of a step's completions; all of them are in OUTPUT/completions."""


class Reports:
    """The trackers of a run; none without `train.report_to`, and in processes that are not the first."""

    def __init__(self, ready: Preflight, output: Path) -> None:
        train = ready.train
        own = ready.ranks.first and os.environ.get("RANK", "0") == "0"
        names = train.trackers if own else ()
        self._couriers = [Courier(name, make_reporter) for name in names]
        self._ready = ready
        self._output = output
        self._ids: dict[str, str] = {}
        self._there: set[str] = set()
        self._muffled = contextlib.ExitStack()
        self._say: Say = lambda text: None

    def open(self, first_step: int, *, say: Say) -> None:
        """Start all trackers at once and wait for them, for a while; say where each reports to."""
        self._say = say
        if not self._couriers:
            return
        train = self._ready.train
        config = run_config(self._ready, self._output)
        deadline = time.monotonic() + START_LIMIT_S
        stdout: Any = Muffled(sys.stdout)
        self._muffled.enter_context(contextlib.redirect_stdout(stdout))
        for courier in self._couriers:
            courier.start(
                RunFacts(
                    project=train.project,
                    name=train.run_name or self._output.resolve().name,
                    output=self._output,
                    config=config,
                    first_step=first_step,
                    run_id=self._ids.get(courier.name) if first_step else None,
                )
            )
        for courier in self._couriers:
            courier.waits.wait(max(0.0, deadline - time.monotonic()))
        self._settle()
        for courier in self._couriers:
            if courier.name not in self._there:
                say(f"{courier.name}: still starting; the run goes on, what it logs waits for it")
        if first_step == 0 and self._ready.measured is not None:
            self._table(0, "memory/rehearsal", rehearsal_table(self._ready))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send a step's figures; a skipped one has train/skipped."""
        figures = numbers(metrics) | ({"skipped": 1.0} if "skipped" in metrics else {})
        self._log(step, {_grouped(name): value for name, value in figures.items()})

    def evaluation(self, done: int, figures: Mapping[str, Any]) -> None:
        """Send an evaluation's figures."""
        self._log(done, {f"eval/{name}": value for name, value in numbers(figures).items()})

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Send the first completions of a step."""
        self._table(step, "completions", {n: list(v[:TABLE_ROWS]) for n, v in columns.items()})

    def close(self, *, failed: bool, stopped: bool) -> None:
        """End the trackers' runs, and wait for what is under way, for a while."""
        if not self._couriers:
            return
        deadline = time.monotonic() + (STOP_LIMIT_S if stopped else FINISH_LIMIT_S)
        with self._muffled:
            for courier in self._couriers:
                courier.finish(failed=failed)
            for courier in self._couriers:
                courier.join(deadline)
            self._settle(over=True)

    def state(self) -> dict[str, str]:
        """Return each tracker's run, for a resume to go on with."""
        return dict(self._ids)

    def restore(self, ids: Mapping[str, str]) -> None:
        """Go on with these runs; to be called before `open`."""
        self._ids = dict(ids)

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        self._settle()
        for courier in self._couriers:
            courier.log(step, figures)

    def _table(self, step: int, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
        for courier in self._couriers:
            courier.table(step, name, columns)

    def _settle(self, *, over: bool = False) -> None:
        """Say once of each tracker where it reports to, or that it failed, and go on without it."""
        for courier in self._couriers:
            courier.check()
            if courier.failed:
                what_now = "" if over else "; the run goes on without it"
                self._say(f"{courier.name}: {courier.failed}{what_now}")
            elif courier.started is not None and courier.name not in self._there:
                self._there.add(courier.name)
                self._ids[courier.name] = courier.started.run_id
                self._say(f"{courier.name}: {courier.started.where}")
        self._couriers = [courier for courier in self._couriers if not courier.failed]


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what is a number."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def run_config(ready: Preflight, output: Path) -> dict[str, Any]:
    """Return the run file as resolved, and what was planned, for a tracker's page of settings."""
    try:
        document = load_run_file(output / "run.yaml").model_dump(mode="json", exclude_none=True)
    except UsageError:
        document = {}
    planned = ready.plan
    return document | {
        "recipe": ready.recipe.model_dump(mode="json", exclude_none=True),
        "train": ready.train.model_dump(mode="json", exclude_none=True),
        "plan": {
            "peak_bytes": planned.peak_bytes,
            "peak_phase": planned.peak_phase,
            "low_bytes": planned.low_bytes,
            "high_bytes": planned.high_bytes,
            "capacity_bytes": planned.capacity_bytes,
            "host_peak_bytes": planned.host_peak_bytes,
            "verdict": str(planned.verdict),
            "phases": dict(ready.planned_bytes),
        },
        "measured": {"phases": dict(ready.measured_bytes)},
    }


def rehearsal_table(ready: Preflight) -> dict[str, list[Any]]:
    """Return planned beside measured, a row a phase."""
    rows = [
        (name, planned, ready.measured_bytes[name])
        for name, planned in ready.planned_bytes.items()
        if name in ready.measured_bytes
    ]
    return {
        "phase": [row[0] for row in rows],
        "planned_bytes": [row[1] for row in rows],
        "measured_bytes": [row[2] for row in rows],
    }


def _grouped(name: str) -> str:
    return name if name.startswith("memory/") else f"train/{name}"
