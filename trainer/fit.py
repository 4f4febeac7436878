"""`vramwise train RUN.yaml --fit '24GiB, <6h, <$5'`: choose, confirm, and hold a run to what was promised.

The search is trainer/fit_search.py; a trace of the chosen step confirms it, the rehearsal at step 0 runs it, the
first steps are measured and the estimate is corrected by them; trainer/ladder.py goes on when memory runs out.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.errors import VramwiseError
from planner.models.catalogue import load_catalogue
from planner.models.config_file import read_config
from planner.report.time import dollars, span
from planner.run.recipe import RunFile, Task
from planner.speed.budget import Budget, parse_budget
from planner.speed.cost import SECONDS_PER_HOUR
from planner.speed.time import why_not
from planner.units import format_bytes
from profiler.forecast import Forecast, worth_saying
from trainer.fit_search import Candidate, Search, fitted_run, steps_of
from trainer.foreign import Given
from trainer.say import Say, silent
from trainer.step_size import within_epoch

MEASURED_STEPS = 4
"""The first one warms up; the estimate is corrected by the others."""
TRACE_LIMIT_S = 180.0
NEAR = 0.05
"""A measured step this near its plan is as planned."""


@dataclass
class Fit:
    """What a run promised, and what its steps say of it."""

    budget: Budget
    steps: int
    step_seconds: float | None
    """As planned, then as measured; None = not known."""
    usd_per_hour: float | None
    why_unknown: str = ""
    corrected: bool = False
    over: tuple[str, ...] = ()
    """Limits that the run is going to break, by the last look."""

    def look(self, forecast: Forecast, *, say: Say) -> None:
        """Correct the estimate by the steps so far, and say so."""
        if forecast.seen < MEASURED_STEPS:
            return
        first = not self.corrected
        if not (first or worth_saying(forecast.seen)):
            return
        measured, left = forecast.step_seconds(), forecast.time_left()
        if measured is None or left is None:
            return
        hours = self.steps * measured.seconds / SECONDS_PER_HOUR
        usd = hours * self.usd_per_hour if self.usd_per_hour is not None else None
        values: dict[str, float | None] = {"hours": hours, "dollars": usd}
        over = tuple(
            name
            for name, limit in self.budget.limits().items()
            if (value := values.get(name)) is not None and value > limit
        )
        if not first and over == self.over:
            return
        takes = span(hours * SECONDS_PER_HOUR) + (f", {dollars(usd)}" if usd is not None else "")
        say(f"fit: {self._against(measured.seconds, first=first)}: the run takes {takes}; {self._verdict(over)}")  # fmt: skip
        self.step_seconds, self.corrected, self.over = measured.seconds, True, over

    def _against(self, seconds: float, *, first: bool) -> str:
        if self.step_seconds is None:
            return f"a step takes {span(seconds)} (not planned: {self.why_unknown})"
        off = seconds / self.step_seconds - 1
        whose = "planned" if first else "measured before"
        how = f"as {whose}" if abs(off) < NEAR else f"{off:+.0%} against the {span(self.step_seconds)} {whose}"  # fmt: skip
        return f"a step takes {span(seconds)}, {how}"

    def _verdict(self, over: tuple[str, ...]) -> str:
        if not over:
            return "within the budget" if len(self.budget.limits()) else ""
        return " and ".join(f"over {self.budget.said(name)}" for name in over)


def fit(
    given: Given, text: str, *, price: str | None = None, say: Say = silent
) -> tuple[Given, Fit]:
    """Return the run with settings that meet the budget, and what was promised; raises VramwiseError."""
    budget = parse_budget(text)
    rows, mean_tokens = _data(given)
    per_step = within_epoch(given.run.recipe, given.train, rows, say=silent)
    steps = steps_of(given.train, rows, per_step)
    search = Search(given.run, given.train, budget, steps=steps, prompts=per_step, mean_tokens=mean_tokens, price=price)  # fmt: skip
    fitted = fitted_run(given.run, search, search.best(), root=given.root)
    chosen = fitted.chosen
    say(f"fit: {chosen.settings}: {chosen.takes} as planned")
    for name in chosen.changed_result:
        say(f"fit: {name} changes what is learned: nothing that keeps it has room")
    why = "" if chosen.time is not None else why_not(chosen.plan)
    if why:
        say(f"fit: how long a step takes is not known ({why}); its first steps will say")
    say(f"fit: {confirmed(given.run, search, chosen)}")
    made = Fit(
        budget=budget,
        steps=steps,
        step_seconds=chosen.time.step_seconds if chosen.time is not None else None,
        usd_per_hour=search.usd_per_hour,
        why_unknown=why,
    )
    return replace(given, run=fitted.run, train=fitted.train), made


def confirmed(run: RunFile, search: Search, chosen: Candidate) -> str:
    """Return what a trace of the chosen step says; raises VramwiseError where it does not fit."""
    from profiler.trace import trace
    from trainer.dry_run import subject_for

    machine = search.machine
    try:
        step = subject_for(
            chosen.plan.resolved, chosen.recipe, config_of(run), gpu=machine.gpu, steps=1
        )
        recording = trace(step, time_limit_s=TRACE_LIMIT_S, cpu=machine.cpu)
    except VramwiseError as error:
        return f"not traced: {error.message}"
    room = machine.vram_bytes - machine.context_bytes
    traced = f"{format_bytes(recording.peak_bytes)} in {recording.peak_phase}"
    if recording.peak_bytes > room:
        raise VramwiseError(
            f"--fit: the trace of {chosen.settings} holds {traced}, more than {format_bytes(room)}",
            hint="a smaller budget leaves the plan more room; vramwise trace RUN.yaml says what differs",
        )
    return f"traced: {traced}"


def config_of(run: RunFile) -> dict[str, Any]:
    """Return the config.json of a run's model, where it is on this machine; raises UsageError."""
    path = Path(run.model).expanduser()
    if path.is_dir():
        return read_config(path / "config.json")
    entry = load_catalogue().get(run.model)
    if entry is not None:
        return dict(entry["config"])
    from huggingface_hub import hf_hub_download

    try:
        return read_config(Path(hf_hub_download(run.model, "config.json", revision=run.revision)))
    except Exception as error:  # hub or network: either way there is nothing to trace
        raise VramwiseError(f"no config.json of {run.model}: {str(error).splitlines()[0][:160]}") from None  # fmt: skip


def _data(given: Given) -> tuple[int | None, int | None]:
    """Return (rows of an epoch, tokens of a sample on average); None where the data does not say."""
    from trainer.data import load_samples
    from trainer.model import load_tokenizer
    from trainer.sft import make_order
    from trainer.validation import read_run_examples

    run, train = given.run, given.train
    samples = load_samples(train.dataset, root=given.root)
    if run.recipe.task is not Task.SFT:
        return len(samples), None
    tokenizer = load_tokenizer(run.model, revision=run.revision)
    examples = read_run_examples(samples, run, train, tokenizer)
    _, per_epoch = make_order(examples, run, train)
    if run.recipe.packing:
        return per_epoch, None
    return per_epoch, round(sum(examples.lengths) / max(1, len(examples)))
