"""`vramwise train RUN.yaml --fit '24GiB, <6h, <$5'`: choose, confirm, and hold a run to what was promised.

The search is trainer/fit_search.py; a trace of the chosen step confirms it, the rehearsal at step 0 runs it, the
first steps are measured and the estimate is corrected by them; trainer/ladder.py goes on when memory runs out.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.catalogue import load_catalogue
from planner.models.config_file import read_config
from planner.report.time import dollars, span
from planner.run.recipe import Recipe, RunFile, Task
from planner.run.resolved import Resolved
from planner.speed.budget import Budget, parse_budget
from planner.speed.cost import SECONDS_PER_HOUR
from planner.speed.time import why_not
from planner.units import format_bytes
from profiler.forecast import Forecast, worth_saying
from profiler.recording import Recording
from trainer.fit_search import Candidate, Search, fitted_run, machine_within, steps_of
from trainer.foreign import Given
from trainer.parallel.agree import check_world
from trainer.parallel.ranks import ALONE, Ranks
from trainer.parallel.together import together
from trainer.say import Say, silent
from trainer.sft_data import Examples
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
    """Of all GPUs."""
    why_unknown: str = ""
    corrected: bool = False
    over: tuple[str, ...] = ()
    """Limits that the run is going to break, by the last look."""
    examples: Examples | None = None
    """Of SFT, as read for the search: the run need not read them again."""

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
    given: Given,
    text: str,
    *,
    price: str | None = None,
    say: Say = silent,
    ranks: Ranks = ALONE,
    gpus: int | None = None,
) -> tuple[Given, Fit]:
    """Return the run with settings that meet the budget, and what was promised; raises VramwiseError.

    All ranks call it: each reads the data, the first chooses for what every one of them has. `gpus`: of a run
    that is only looked at, where they are not this process's ranks.
    """
    budget = parse_budget(text)
    if gpus is None:
        check_world(given.run, ranks)
    examples, rows, mean_tokens = _data(given, say)
    machine = machine_within(given.run, given.train, budget, ranks=ranks, gpus=gpus)
    per_step = within_epoch(given.run.recipe, given.train, rows, say=silent, ranks=machine.num_gpus)
    steps = steps_of(given.train, rows, per_step)

    def choose() -> tuple[Given, Fit]:
        search = Search(
            given.run,
            given.train,
            budget,
            steps=steps,
            prompts=per_step,
            mean_tokens=mean_tokens,
            price=price,
            machine=machine,
        )
        return _chosen(given, search, say=say, apart=ranks.several)

    made = together(ranks, lambda: choose() if ranks.first else None)
    told = ranks.broadcast_object(made)
    assert told is not None
    chosen, promised = told
    return chosen, replace(promised, examples=examples)


def _chosen(given: Given, search: Search, *, say: Say, apart: bool) -> tuple[Given, Fit]:
    """Return the best that a search finds, confirmed by its trace: in a process of its own if `apart`."""
    fitted = fitted_run(given.run, search, search.best(), root=given.root)
    chosen = fitted.chosen
    say(f"fit: {chosen.settings}: {chosen.takes} as planned")
    for name in chosen.changed_result:
        say(f"fit: {name} changes what is learned: nothing that keeps it has room")
    why = "" if chosen.time is not None else why_not(chosen.plan)
    if why:
        say(f"fit: how long a step takes is not known ({why}); its first steps will say")
    say(f"fit: {confirmed(given.run, search.machine, chosen, apart=apart)}")
    made = Fit(
        budget=search.budget,
        steps=search.steps,
        step_seconds=chosen.time.step_seconds if chosen.time is not None else None,
        usd_per_hour=search.usd_per_hour,
        why_unknown=why,
    )
    return replace(given, run=fitted.run, train=fitted.train), made


def confirmed(run: RunFile, machine: Machine, chosen: Candidate, *, apart: bool = False) -> str:
    """Return what a trace of the chosen step says; raises VramwiseError where it does not fit.

    `apart`: this process is one of several ranks, and a trace needs a group of ranks that are not there.
    """
    traced = (config_of(run), machine, chosen.plan.resolved, chosen.recipe)
    try:
        if apart:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                recording = pool.submit(_traced, *traced).result()
        else:
            recording = _traced(*traced)
    except VramwiseError as error:
        return f"not traced: {error.message}"
    room = machine.vram_bytes - machine.context_bytes
    held = f"{format_bytes(recording.peak_bytes)} in {recording.peak_phase}"
    if recording.peak_bytes > room:
        raise VramwiseError(
            f"--fit: the trace of {chosen.settings} holds {held}, more than {format_bytes(room)}",
            hint="a smaller budget leaves the plan more room; vramwise trace RUN.yaml says what differs",
        )
    return f"traced: {held}"


def _traced(
    config: dict[str, Any], machine: Machine, resolved: Resolved, recipe: Recipe
) -> Recording:
    """Return the trace of one step of one GPU."""
    from profiler.trace import trace
    from trainer.dry_run import subject_for

    step = subject_for(resolved, recipe, config, gpu=machine.gpu, steps=1)
    return trace(step, time_limit_s=TRACE_LIMIT_S, cpu=machine.cpu)


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


def _data(given: Given, say: Say) -> tuple[Examples | None, int | None, int | None]:
    """Return (SFT's samples, rows of an epoch, tokens of a sample on average); None where the data does not say."""
    from trainer.data import load_samples
    from trainer.model import load_tokenizer
    from trainer.sft import make_order
    from trainer.validation import read_run_examples

    run, train = given.run, given.train
    samples = load_samples(train.dataset, root=given.root)
    if run.recipe.task is not Task.SFT:
        return None, len(samples), None
    tokenizer = load_tokenizer(run.model, revision=run.revision)
    examples = read_run_examples(samples, run, train, tokenizer, say=say)
    _, per_epoch = make_order(examples, run, train)
    if run.recipe.packing:
        return examples, per_epoch, None
    return examples, per_epoch, round(sum(examples.lengths) / max(1, len(examples)))
