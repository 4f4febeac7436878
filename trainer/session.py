"""What both algorithms share around their steps: log, checkpoints, stopping."""

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from planner.errors import VramwiseError
from trainer import checkpoint as checkpoints
from trainer.callbacks import Callbacks, Run
from trainer.config import TrainSection
from trainer.data import Order
from trainer.evaluation import line_of
from trainer.metrics import METRICS_FILE, MetricsLog, Progress
from trainer.model import Policy
from trainer.outlook import Outlook
from trainer.parallel.ranks import ALONE, Ranks
from trainer.parallel.watch import in_unison, is_broken_connection
from trainer.preflight import Preflight
from trainer.push import EverySave
from trainer.reporters.reports import Reports
from trainer.room import check_before
from trainer.run_folder import replaced
from trainer.say import Say as Say  # trainer.demo takes it from here
from trainer.stepping import Stepper
from trainer.validation import Validation


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a run ended."""

    output: Path
    steps: int
    """Steps done, those before a resume included."""
    stopped_by: int | None
    """Signal number; None = ran to its end."""
    bad_steps: int
    seconds: float
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Of the steps done in this process."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Of this process, each with the number of steps done before it."""
    best_step: int | None = None
    """Steps done at the best evaluation; None without one."""
    exhausted: bool = False
    """Ended early: no evaluation was better for `evaluation.patience` times."""
    stop_reason: str | None = None
    """Ended early: what the callback that asked for it said."""


class Session:
    """Iterates over the run's steps; saves at the end of one when it is time, asked or over.

    Use as a context manager. `steps()` yields the step to do; `log` or `skip` ends it. Of several ranks
    the first writes, reports and calls callbacks, and what it is asked for all of them do.
    """

    def __init__(
        self,
        train: TrainSection,
        *,
        output: Path,
        policy: Policy,
        stepper: Stepper,
        order: Order,
        ranks: Ranks = ALONE,
    ) -> None:
        self.output = output
        self.ranks = ranks
        self.first_step = 0
        self.bad_steps = 0
        self.metrics: list[dict[str, Any]] = []
        self._train = train
        self._policy = policy
        self._stepper = stepper
        self._order = order
        self._done = 0
        self._bad_in_a_row = 0
        self._bad_reason = ""
        self._abandoned = False
        self._place = order.state()
        self._saved_step = -1
        self._stop_reason: str | None = None
        self._started = time.monotonic()
        self._stop = checkpoints.StopSignal(repeats=ranks.several)
        self.validation: Validation | None = None
        """Evaluates held-out samples; set before the first step."""
        self.callbacks = Callbacks()
        self.reports: Reports | None = None
        self.tokens_seen = 0
        """Trained on, padding included, those before a resume too."""
        self.outlook: Outlook | None = None
        """Forecasts time and memory; set before the first step."""

    def equip(self, ready: Preflight, callbacks: Callbacks) -> None:
        """Report to the run's trackers and call its callbacks; before `resume`. Raises VramwiseError."""
        check_before(ready, self.output)
        self.reports = Reports(ready, self.output)
        if not self.ranks.first:
            return
        self.callbacks = callbacks
        callbacks.run = Run(
            output=self.output,
            train=self._train,
            recipe=ready.recipe,
            model=self._policy.model,
            tokenizer=self._policy.tokenizer,
            optimizer=self._stepper.optimizer,
            max_steps=self._train.steps,
            can_evaluate=self.validation is not None,
        )
        push = self._train.push_to_hub
        if push is not None and push.strategy == "every_save":
            callbacks.add(EverySave(push, say=lambda text: self.progress.say(text)))

    def resume(self) -> None:
        """Restore the newest checkpoint in the output folder."""
        newest = checkpoints.latest(self.output)
        state = checkpoints.restore(
            newest,
            policy=self._policy,
            optimizer=self._stepper.optimizer,
            ranks=self.ranks,
            seed=self._train.seed,
        )
        self._order.restore(state["order"])
        self._stepper.restore(state["stepper"])
        self.bad_steps = state["bad_steps"]
        if self.validation is not None and state.get("evaluation"):
            self.validation.restore(state["evaluation"])
        if self.reports is not None:
            self.reports.restore(state.get("reports", {}))
        self.tokens_seen = state.get("tokens_seen", 0)
        self.first_step = self._done = self._saved_step = state["step"]

    def __enter__(self) -> "Session":
        if not self.first_step:  # a resumed run has its generators' state from the checkpoint
            torch.manual_seed(checkpoints.rank_seed(self._train.seed, self.ranks.rank))
        first = self.ranks.first
        self.log_file = MetricsLog(self.output, first_step=self.first_step) if first else None
        self.progress = Progress(self._train.steps, done=self.first_step, quiet=not first)
        if self.validation is not None and first:
            self.validation.open(self.first_step)
        self.progress.__enter__()
        self._stop.__enter__()
        if self.reports is not None:
            self.reports.open(self.first_step, say=self.progress.say)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, Exception):
                self._rescue(error)
            if self.reports is not None:
                self.reports.close(failed=error is not None, stopped=self.stop_asked)
        finally:
            self._stop.__exit__(kind, error, trace)
            self.progress.__exit__(kind, error, trace)
            if self.log_file is not None:
                self.log_file.close()
            if self.validation is not None:
                self.validation.close()

    def _rescue(self, error: Exception) -> None:
        """Save the steps done before the one that failed, whatever ended it."""
        saved = ""
        if self._done > 0 and self._all_out(error):
            self._order.restore(self._place)
            try:
                self.save(tell=False)
                saved = f"; step {self._done} is saved in {self.output}"
            except Exception as second:  # the error that ended the run is the one to be told
                saved = f"; the state could not be saved: {str(second)[:200]}"
        if isinstance(error, torch.OutOfMemoryError):
            raise VramwiseError(
                f"out of memory in step {self._done}{saved}",
                hint="lower micro_batch_tokens or completion_length, or see: vramwise advise RUN.yaml; "
                "then go on with: vramwise train RUN.yaml --resume",
            ) from None

    def _all_out(self, error: Exception) -> bool:
        """Return whether all ranks have left the step by an error, and can save what was before it.

        After an error of one alone the others wait for it in the midst of the step, if they are there.
        """
        if self.ranks.several and is_broken_connection(error):
            return False
        kind = "told" if isinstance(error, VramwiseError) else type(error).__name__
        return in_unison(self.ranks, f"{self._done} {kind}")

    def steps(self) -> Iterator[int]:
        """Yield the steps to do, from 0; ends early on a signal, with everything saved."""
        self._tell("on_train_begin")
        yield from self._steps()
        self._tell("on_train_end")

    def _steps(self) -> Iterator[int]:
        if self.first_step == 0:
            self._evaluate()
        for step in range(self.first_step, self._train.steps):
            self._place = self._order.state()
            yield step
            if self._abandoned:
                self._order.restore(self._place)
                self.save()
                return
            self._done = step + 1
            self._place = self._order.state()  # what fails from here on has nothing to redo
            if step == self.first_step and self.ranks.first:
                shutil.rmtree(replaced(self.output), ignore_errors=True)
            self._tell("on_step_end", step, dict(self.metrics[-1]))
            exhausted = self._evaluate(asked=self.callbacks.evaluation_asked)
            due = self._train.save_every and self._done % self._train.save_every == 0
            save, why = self.ranks.broadcast_object(self.callbacks.take())
            over = exhausted or why is not None or self._stopped_all()
            if due or save or over or self._done == self._train.steps:
                self.save()
            if why is not None:
                self._stop_reason = why
                self.progress.say(f"stopped after {self._done} steps: {why}")
            if over:
                return
            if self._bad_in_a_row >= self._train.max_bad_steps:
                self.save()
                raise VramwiseError(
                    f"stopped at step {step}: {self._bad_in_a_row} steps in a row were skipped, the last "
                    f"because {self._bad_reason}",
                    hint=f"state is saved in {self.output}; look at {METRICS_FILE} and the rewards",
                )

    def log(self, step: int, metrics: Mapping[str, Any], *, line: str) -> None:
        """Record a step that went well."""
        self._bad_in_a_row = 0
        self._write(step, metrics, line)

    def skip(self, step: int, reason: str, metrics: Mapping[str, Any]) -> None:
        """Record a step that changed nothing because of a NaN, or of a reward that failed."""
        self._bad_reason = reason
        self._bad_in_a_row += 1
        self.bad_steps += 1
        self._write(step, {**metrics, "skipped": reason}, f"skipped: {reason}")

    @property
    def stop_asked(self) -> bool:
        """Whether SIGTERM or SIGINT came to this rank."""
        return self._stop.received is not None

    def _stopped_all(self) -> bool:
        """Return whether SIGTERM or SIGINT came to any rank: then it came to all."""
        signal = int(self.ranks.max(float(self._stop.received or 0)))
        self._stop.received = self._stop.received or signal or None
        return signal > 0

    def abandon(self) -> None:
        """Leave the step under way undone: a resume does it again."""
        self._abandoned = True

    def save(self, *, tell: bool = True) -> None:
        """Write a checkpoint of the steps done, unless it is there; callbacks hear of it if `tell`."""
        if self._saved_step == self._done:
            return
        state = {
            "order": self._order.state(),
            "stepper": self._stepper.state(),
            "bad_steps": self.bad_steps,
            "tokens_seen": self.tokens_seen,
        }
        if self.reports is not None:
            state["reports"] = self.reports.state()
        if self.validation is not None:
            state["evaluation"] = self.validation.state()
        saved = checkpoints.save(
            self.output,
            step=self._done,
            policy=self._policy,
            optimizer=self._stepper.optimizer,
            state=state,
            keep=self._train.keep_checkpoints,
            ranks=self.ranks,
        )
        self._saved_step = self._done
        if tell:
            self._tell("on_save", self._done, saved.path)

    def result(self) -> Result:
        """Return how the run ended."""
        return Result(
            output=self.output,
            steps=self._done,
            stopped_by=self._stop.received,
            bad_steps=self.bad_steps,
            seconds=time.monotonic() - self._started,
            metrics=self.metrics,
            evaluations=self.validation.history if self.validation else [],
            best_step=self.validation.best_step if self.validation else None,
            exhausted=bool(self.validation and self.validation.exhausted),
            stop_reason=self._stop_reason
            or (self.callbacks.run.stop_reason if self.callbacks.run else None),
        )

    def _evaluate(self, *, asked: bool = False) -> bool:
        """Evaluate if it is time; return whether the run has stopped getting better."""
        if self.validation is None:
            return False
        if not (self.ranks.broadcast_object(asked) or self.validation.due(self._done)):
            return False
        if self._stopped_all():
            return False
        figures = self.validation.run(self._done)
        self.progress.say(f"evaluation after {self._done} steps: {line_of(figures)}")
        if self.reports is not None:
            self.reports.evaluation(self._done, figures)
        self._tell("on_evaluate", self._done, figures)
        return self.validation.exhausted

    def _write(self, step: int, metrics: Mapping[str, Any], line: str) -> None:
        self.tokens_seen += metrics.get("train_tokens", 0)
        if self.outlook is not None:
            metrics = {**metrics, **self.outlook.step(step, metrics, say=self.progress.say)}
        if self.log_file is not None:
            self.log_file.write(step, metrics)
        if self.reports is not None:
            self.reports.step(step, metrics)
        self.metrics.append({"step": step, **metrics})
        self.progress.step(step + 1, line)

    def _tell(self, event: str, *arguments: Any) -> None:
        """Call the callbacks' method of that name."""
        if self.callbacks.run is not None:
            self.callbacks.run.step = self._done
        self.callbacks(event, *arguments)
