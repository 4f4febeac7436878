"""GRPO, top to bottom: sample, reward, compare within the group, step.

Departures from the paper (arXiv 2402.03300): the importance ratio is against the policy that sampled
(`logp - logp.detach()` while one update is made of a rollout: the gradient flows through it, its value
is 1), the KL term is off unless recipe.beta says otherwise, and the loss's normaliser covers the whole
optimizer step, so micro-batches of any size give the same gradient. `trainer.losses` has the relatives.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from planner.errors import VramwiseError
from planner.run.recipe import RunFile, Task
from trainer.advantages import Scale, group_advantages
from trainer.callbacks import Callbacks, load_callbacks
from trainer.config import TrainSection
from trainer.data import Order, Samples, check_columns, load_samples
from trainer.engines.protocol import Engine, SamplingSettings
from trainer.evaluation import check_evaluation
from trainer.grpo_report import rollout_metrics, show_completions, step_line
from trainer.model import load_tokenizer
from trainer.outlook import Outlook
from trainer.parallel.ranks import ALONE, Ranks
from trainer.parallel.together import RankFailed, largest, together
from trainer.policy_update import learn
from trainer.preflight import Preflight, longest_prompt, prepare
from trainer.prompt_data import Prompts, read_prompts
from trainer.reward_pool import Interrupted
from trainer.rewards import Rewards, Scores, check_reward_columns, load_rewards, score
from trainer.rollout import Rollout, sample, sampling_settings
from trainer.run_folder import REWARDS_LOG, check_output, run_folder
from trainer.say import Say, silent
from trainer.session import Result, Session
from trainer.trainer_state import trainer_state
from trainer.validation import Validation, load_validation, reward_measure

if TYPE_CHECKING:
    from trainer.fit import Fit

SEED_STRIDE = 1_000_003
"""Between the sampling seeds of two steps; a prime, so that runs of near seeds don't share them."""


def train_grpo(
    run: RunFile,
    train: TrainSection,
    *,
    root: Path,
    resume: bool = False,
    say: Say = silent,
    on_ready: Callable[[Preflight], None] = lambda ready: None,
    ranks: Ranks = ALONE,
    fit: "Fit | None" = None,
) -> Result:
    """Train by GRPO as the run file says; return how it ended. Raises VramwiseError.

    `on_ready` is given the prepared run before its first step. Every rank of `ranks` calls it.
    """
    # everything that can be wrong without a model, first
    callbacks = load_callbacks(train.callbacks, root=root)
    samples = load_samples(train.dataset, root=root)
    check_columns(samples, train.dataset, task="grpo")
    check_reward_columns(train.rewards, list(samples[0]))
    held_out = load_validation(train, samples, root=root, task=Task.GRPO)
    check_output(train, resume=resume)
    prompts = read_prompts(
        samples,
        load_tokenizer(run.model, revision=run.revision),
        train.dataset,
        limit=longest_prompt(run),
        rewards=train.rewards,
    )
    say(prompts.summary())
    if train.loss.type == "gspo" and train.loss.epsilon is None:
        say("gspo clips at {:g} and {:g}, as its paper does".format(*train.loss.clip))
    with closing(load_rewards(train.rewards, root=root)) as rewards:
        check_evaluation(train.evaluation, rewards)
        ready = prepare(
            run,
            train,
            say=say,
            per_epoch=len(samples),
            held_out=len(held_out or ()),
            ranks=ranks,
            fit=fit,
        )
        with run_folder(run, train, resume=resume, ranks=ranks) as output:
            ready.save(output)
            rewards.pool.output.to(output / REWARDS_LOG)
            on_ready(ready)
            return _train(
                ready.train,
                prompts,
                rewards,
                ready,
                held_out,
                callbacks,
                output=output,
                resume=resume,
            )


def _train(
    train: TrainSection,
    prompts: Prompts,
    rewards: Rewards,
    ready: Preflight,
    held_out: Samples | None,
    callbacks: Callbacks,
    *,
    output: Path,
    resume: bool,
) -> Result:
    policy, engine = ready.policy, ready.engine
    assert engine is not None
    order = Order(size=len(prompts), seed=train.seed, shuffle=train.dataset.shuffle)
    session = Session(
        train,
        output=output,
        policy=policy,
        stepper=ready.stepper,
        order=order,
        ranks=ready.ranks,
    )
    if held_out is not None:
        session.validation = Validation(
            ready,
            output,
            reward_measure(
                held_out,
                rewards,
                ready,
                state=lambda done: trainer_state(session, ready, step=done, prompts=len(prompts)),
            ),
        )
    session.equip(ready, callbacks)
    if resume:
        session.resume()
    session.outlook = Outlook(ready, done=session.first_step)
    settings = sampling_settings(
        train.sampling,
        policy.tokenizer,
        num_generations=ready.num_generations,
        max_new_tokens=ready.completion_tokens,
    )
    grpo = Grpo(train, prompts, order, rewards, ready, engine, settings, session)
    with session, ready.device, closing(engine):
        for step in session.steps():
            grpo.step(step)
    return session.result()


@dataclass(frozen=True, slots=True)
class Grpo:
    """The pieces of a run, and its step."""

    train: TrainSection
    prompts: Prompts
    order: Order
    rewards: Rewards
    ready: Preflight
    engine: Engine
    settings: SamplingSettings
    session: Session

    def step(self, step: int) -> None:
        """Sample completions, reward them, compare each with its group, learn; log all of it."""
        started = time.perf_counter()
        ranks = self.ready.ranks
        rollout = self.roll_out(step)
        scores = together(ranks, lambda: self.judge(step, rollout))
        if ranks.any(scores is None) or scores is None:
            self.session.abandon()
            return
        logged = rollout_metrics(rollout, scores, ranks)
        if bad := next(filter(None, ranks.gather_objects(scores.bad)), ""):
            self.session.skip(step, bad, logged)
            return
        every = ranks.gather_objects(scores.totals)
        advantages = group_advantages(
            torch.tensor([total for own in every for total in own]),
            num_generations=self.ready.num_generations,
            scale=Scale(self.train.loss.scale_rewards),
        )
        values = advantages.values.split([len(own) for own in every])[ranks.rank]
        logged |= {
            "reward": advantages.reward_mean,
            "reward_std": advantages.reward_std,
            "frac_reward_zero_std": advantages.zero_std_frac,
        }
        updates, stats = learn(
            step,
            rollout,
            values,
            ready=self.ready,
            train=self.train,
            engine=self.engine,
        )
        logged |= stats
        logged |= largest(ranks, self.ready.memory.take(self.ready.planned_bytes))
        logged["seconds"] = time.perf_counter() - started
        sampled = ranks.sum(float(sum(rollout.lengths)))
        logged["tokens_per_second"] = sampled / logged["seconds"]
        if self.train.print_completions:
            rows = self.train.print_completions
            show_completions(self.session, step, rollout, scores, values, rows)
        if updates == 0:
            self.session.skip(step, "the loss or a gradient is NaN or infinite", logged)
        else:
            self.session.log(step, logged, line=step_line(logged))

    def judge(self, step: int, rollout: Rollout) -> Scores | None:
        """Return what the rewards say about this rank's completions; None where a signal cut them short."""
        try:
            return score(
                self.rewards,
                prompts=rollout.prompts,
                texts=rollout.texts,
                completion_ids=[completion.token_ids for completion in rollout.completions],
                state=self.state(step),
                stopping=lambda: self.session.stop_asked,
            )
        except Interrupted:
            return None

    def state(self, step: int) -> dict[str, Any]:
        """Return what reward functions see as trainer_state."""
        return trainer_state(self.session, self.ready, step=step, prompts=len(self.prompts))

    def roll_out(self, step: int) -> Rollout:
        """Return completions of the next prompts under the weights as they are now."""
        place = self.order.state()
        prompts = self.prompts.take(self.order, self.ready.prompts_per_step)
        tokenizer = self.ready.policy.tokenizer
        # seeded by the step, and by the prompt's place in it: a resumed run draws what the first one would have
        # drawn, and any number of ranks the same
        ranks = self.ready.ranks
        seeded = replace(self.settings, seed=self.train.seed + SEED_STRIDE * (step + 1))
        with self.ready.memory("rollout"):
            self.engine.resume()
            self.engine.update_weights()
            try:
                rollout = together(
                    ranks,
                    lambda: sample(self.engine, prompts, seeded, tokenizer=tokenizer, ranks=ranks),
                )
            except RankFailed:
                raise
            except VramwiseError:
                # an engine that stopped: nothing of this step happened, and a resume repeats it
                self.order.restore(place)
                self.session.save()
                raise
            self.engine.release()
        return rollout
