"""Evaluation while a run goes on: when, what is kept of the best, and when to stop.

OUTPUT/evaluations.jsonl has a line an evaluation; OUTPUT/checkpoints/best holds the best weights.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.run.recipe import RunFile, Task
from trainer import checkpoint as checkpoints
from trainer.config import DatasetSection, TrainSection
from trainer.data import Samples, check_columns, load_samples, tokenize_prompt
from trainer.evaluation import check_metric, measure_loss, measure_rewards, refuse_overlap
from trainer.metrics import MetricsLog
from trainer.model import Policy
from trainer.parallel.ranks import ALONE, Ranks
from trainer.preflight import Preflight, longest_sequence
from trainer.rewards import Rewards, check_reward_columns
from trainer.rollout import sampling_settings
from trainer.say import Say, silent
from trainer.sft_data import Examples, read_examples

EVALUATIONS_FILE = "evaluations.jsonl"
BEST = "best"
SMALLER_IS_BETTER = ("loss", "perplexity")
Figures = dict[str, float]


def load_validation(train: TrainSection, training: Samples, *, root: Path, task: Task) -> Any:
    """Return the held-out samples, or None without any; refuses a row that is trained on."""
    if train.validation is None:
        return None
    try:
        held_out = load_samples(train.validation, root=root)
        check_columns(held_out, train.validation, task=str(task))
    except UsageError as error:
        message = error.message.replace("train.dataset", "train.validation")
        raise UsageError(message, hint=error.hint) from None
    refuse_overlap(training, train.dataset, held_out, train.validation)
    if task is Task.GRPO:
        check_reward_columns(train.rewards, list(held_out[0]))
    return held_out


def read_held_out(held_out: Samples, run: RunFile, train: TrainSection, tokenizer: Any) -> Examples:
    """Return the held-out SFT samples as tokens."""
    assert train.validation is not None
    check_metric(train.evaluation, SMALLER_IS_BETTER)
    return read_run_examples(held_out, run, train, tokenizer, section=train.validation)


def read_run_examples(
    samples: Samples,
    run: RunFile,
    train: TrainSection,
    tokenizer: Any,
    *,
    section: DatasetSection | None = None,
    say: Say = silent,
) -> Examples:
    """Return SFT samples as the run file cuts and scores them, by the columns of `section` or train.dataset.

    Raises UsageError for a row that cannot be understood, or when none is left.
    """
    return read_examples(
        samples,
        tokenizer,
        section or train.dataset,
        limit=longest_sequence(run),
        loss_on=train.loss_on,
        say=say,
    )


def reward_measure(
    held_out: Samples,
    rewards: Rewards,
    ready: Preflight,
    *,
    state: Callable[[int], dict[str, Any]],
) -> Callable[[int], Figures]:
    """Return a function that samples and judges the held-out prompts under the weights as they are.

    `state(steps done)`: what reward functions see as trainer_state.
    """
    train, policy, engine = ready.train, ready.policy, ready.engine
    assert engine is not None
    assert train.validation is not None
    settings = replace(
        sampling_settings(
            train.evaluation.sampling or train.sampling,
            policy.tokenizer,
            num_generations=train.evaluation.generations,
            max_new_tokens=ready.completion_tokens,
        ),
        # the same draws at every evaluation: what changes is the policy
        seed=train.seed,
    )
    section = train.validation
    prompts = [
        tokenize_prompt(held_out[row], policy.tokenizer, section, limit=ready.prompt_tokens)
        for row in range(len(held_out))
    ]

    def measure(done: int) -> Figures:
        with ready.memory("evaluation"):
            engine.resume()
            engine.update_weights()
            try:
                return measure_rewards(
                    engine,
                    prompts,
                    settings,
                    tokenizer=policy.tokenizer,
                    rewards=rewards,
                    section=train.evaluation,
                    state=state(done),
                    ranks=ready.ranks,
                ).figures
            finally:
                engine.release()

    return measure


def loss_measure(examples: Examples, ready: Preflight) -> Callable[[int], Figures]:
    """Return a function that takes the loss on the held-out examples."""

    def measure(done: int) -> Figures:
        with ready.memory("evaluation"):
            return measure_loss(
                ready.policy,
                [examples[index] for index in range(len(examples))],
                budget_tokens=ready.stepper.budget.tokens,
                layout=ready.layout,
                chunk_rows=ready.recipe.loss_chunk_rows,
            )

    return measure


class Validation:
    """Evaluates when it is time, keeps the best weights and says when nothing gets better any more."""

    def __init__(self, ready: Preflight, output: Path, measure: Callable[[int], Figures]) -> None:
        self._train = ready.train
        self._ready = ready
        self._measure = measure
        self._output = output
        self.best: float | None = None
        self.best_step: int | None = None
        self.without_gain = 0
        default = "reward" if ready.recipe.task is Task.GRPO else "loss"
        self.metric = ready.train.evaluation.metric or default
        self.history: list[dict[str, Any]] = []
        self._log: MetricsLog | None = None

    def open(self, first_step: int) -> None:
        """Open the log, on the first rank; lines of steps that will be redone are dropped."""
        self._log = MetricsLog(self._output, first_step=first_step + 1, name=EVALUATIONS_FILE)

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()

    def due(self, done: int) -> bool:
        """Return whether to evaluate after `done` steps."""
        if done == 0:
            return self._train.evaluation.on_start
        every = self._train.eval_every
        return done == self._train.steps or bool(every and done % every == 0)

    def run(self, done: int) -> Figures:
        """Evaluate after `done` steps; log it, and keep the weights if they are the best so far."""
        started = time.perf_counter()
        # the first rank's, should rewards differ that each has all of: what follows is decided alike
        figures = self._ready.ranks.broadcast_object(self._measure(done))
        value = figures.get(self.metric, math.nan)  # a reward that was silent everywhere
        sign = -1 if self.metric in SMALLER_IS_BETTER else 1
        gain = math.inf if self.best is None else sign * (value - self.best)
        if math.isfinite(value) and gain > self._train.evaluation.min_delta:
            self.best, self.best_step, self.without_gain = value, done, 0
            if self._train.evaluation.save_best:
                save_best(
                    self._output,
                    self._ready.policy,
                    step=done,
                    figures=figures,
                    ranks=self._ready.ranks,
                )
        else:
            self.without_gain += 1
        figures = {**figures, "best": self.best if self.best is not None else math.nan}
        figures["seconds"] = time.perf_counter() - started
        self.history.append({"step": done, **figures})
        if self._log is not None:
            self._log.write(done, figures)
        return figures

    @property
    def exhausted(self) -> bool:
        """Whether `patience` evaluations in a row brought nothing better."""
        patience = self._train.evaluation.patience
        return patience is not None and self.without_gain >= patience

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "without_gain": self.without_gain,
            "metric": self.metric,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; another metric starts anew."""
        if state.get("metric") == self.metric:
            self.best, self.best_step = state["best"], state["best_step"]
            self.without_gain = state["without_gain"]


def save_best(
    output: Path, policy: Policy, *, step: int, figures: Figures, ranks: Ranks = ALONE
) -> Path:
    """Write the weights to OUTPUT/checkpoints/best, whole or not at all; the best before goes."""
    folder = output / checkpoints.FOLDER
    partial, final = folder / f"{checkpoints.PARTIAL}{BEST}-{os.getpid()}", folder / BEST
    if ranks.first:
        partial.mkdir(parents=True)
    checkpoints.write_weights(policy, partial, ranks=ranks)
    if ranks.first:
        document = {"step": step, "figures": {k: v for k, v in figures.items() if math.isfinite(v)}}
        (partial / "evaluation.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        checkpoints.drop(final)
        partial.rename(final)
    return final
