"""GRPO, top to bottom: sample, reward, compare within the group, step.

Departures from the paper (arXiv 2402.03300): the importance ratio is against the policy that sampled
(`logp - logp.detach()` while one update is made of a rollout: the gradient flows through it, its value
is 1), the KL term is off unless recipe.beta says otherwise, and the loss's normaliser covers the whole
optimizer step, so micro-batches of any size give the same gradient. `trainer.losses` has the relatives.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.errors import VramwiseError
from planner.recipe import RunFile
from trainer import metrics as report
from trainer.advantages import Scale, group_advantages
from trainer.batching import MicroBatch
from trainer.config import TrainSection
from trainer.data import Order, check_columns, load_samples, tokenize_prompt
from trainer.engines.protocol import Engine
from trainer.losses import LossSettings, LossStats, loss_normaliser, policy_loss
from trainer.preflight import Preflight, prepare
from trainer.rewards import Scores, check_reward_columns, load_rewards, score
from trainer.rollout import (
    Rollout,
    SamplerGap,
    importance_weights,
    sample,
    sampler_log_probs,
    sampling_settings,
    split,
)
from trainer.scoring import hidden_rows, log_probs
from trainer.session import Result, Say, Session, prepare_output, silent
from trainer.stepping import Update

Splitter = Callable[[Sequence[int], int], list[MicroBatch]]
"""(completions, budget in tokens) -> micro-batches"""


def train_grpo(
    run: RunFile,
    train: TrainSection,
    *,
    root: Path,
    resume: bool = False,
    say: Say = silent,
    on_ready: Callable[[Preflight], None] = lambda ready: None,
) -> Result:
    """Train by GRPO as the run file says; return how it ended. Raises VramwiseError.

    `on_ready` is given the prepared run before its first step.
    """
    # everything that can be wrong without a model, first
    samples = load_samples(train.dataset, root=root)
    check_columns(samples, train.dataset, task="grpo")
    check_reward_columns(train.rewards, list(samples[0]))
    rewards = load_rewards(train.rewards, root=root)
    output = prepare_output(run, train, resume=resume)

    ready = prepare(run, train, say=say)
    on_ready(ready)
    policy, stepper = ready.policy, ready.stepper
    order = Order(size=len(samples), seed=train.seed, shuffle=train.dataset.shuffle)
    session = Session(train, output=output, policy=policy, stepper=stepper, order=order)
    if resume:
        session.resume()
    engine = ready.engine
    assert engine is not None
    settings = sampling_settings(
        train.sampling,
        policy.tokenizer,
        num_generations=ready.num_generations,
        max_new_tokens=ready.completion_tokens,
    )
    with session, ready.device:
        for step in session.steps():
            started = time.perf_counter()
            place = order.state()
            prompts = [
                tokenize_prompt(
                    samples[index], policy.tokenizer, train.dataset, limit=ready.prompt_tokens
                )
                for index in order.take(ready.prompts_per_step)
            ]
            with ready.memory("rollout"):
                engine.resume()
                engine.update_weights()
                # seeded by the step: a resumed run draws what the first one would have drawn
                seeded = replace(settings, seed=train.seed + 1_000_003 * (step + 1))
                try:
                    rollout = sample(engine, prompts, seeded, tokenizer=policy.tokenizer)
                except VramwiseError:
                    # an engine that stopped: nothing of this step happened, and a resume repeats it
                    order.restore(place)
                    session.save()
                    raise
                engine.release()
            scores = score(
                rewards,
                prompts=rollout.prompts,
                texts=rollout.texts,
                completion_ids=[completion.token_ids for completion in rollout.completions],
            )
            logged = rollout_metrics(rollout, scores)
            if scores.bad:
                session.skip(step, "a reward is NaN or infinite", logged)
                continue
            advantages = group_advantages(
                torch.tensor(scores.totals),
                num_generations=ready.num_generations,
                scale=Scale(train.loss.scale_rewards),
            )
            logged |= {
                "reward": advantages.reward_mean,
                "reward_std": advantages.reward_std,
                "frac_reward_zero_std": advantages.zero_std_frac,
            }
            updates, stats = learn(
                step, rollout, advantages.values, ready=ready, train=train, engine=engine
            )
            logged |= stats
            logged |= ready.memory.take(ready.planned_bytes)
            logged["seconds"] = time.perf_counter() - started
            logged["tokens_per_second"] = sum(rollout.lengths) / logged["seconds"]
            if train.print_completions:
                _show(session, step, rollout, scores, advantages.values, train.print_completions)
            if updates == 0:
                session.skip(step, "the loss or a gradient is NaN or infinite", logged)
                continue
            session.log(step, logged, line=_line(logged))
    engine.close()
    return session.result()


def learn(
    step: int,
    rollout: Rollout,
    advantages: Tensor,
    *,
    ready: Preflight,
    train: TrainSection,
    engine: Engine,
) -> tuple[int, dict[str, Any]]:
    """Make the updates of one rollout; return (updates that were made, what to log).

    advantages [S], one a completion of the rollout.
    """
    policy = ready.policy
    settings = loss_settings(train, beta=ready.recipe.beta or 0.0, limit=ready.completion_tokens)
    usable = rollout.usable(mask_truncated=train.loss.mask_truncated)
    counted = [index for index, use in enumerate(usable) if use]
    # an advantage of 0 and no KL term: no gradient, so no forward; the normaliser still counts it
    chosen = [index for index in counted if settings.beta or advantages[index]]
    teaching = set(chosen)
    advantages = advantages.to(policy.device)

    def micro_batches(part: Sequence[int], budget: int) -> list[MicroBatch]:
        return split(
            rollout,
            part,
            policy=policy,
            budget_tokens=budget,
            layout=ready.layout,
            share_prefix=train.share_prefix,
        )

    # one update of a rollout: the policy is the one that sampled, old log-probs are the new ones
    off_policy = train.updates_per_rollout * train.num_iterations > 1
    with ready.memory("score"):
        old = score_tokens(chosen, micro_batches, ready=ready, train=train) if off_policy else None
        reference = None
        if settings.beta:
            with policy.reference():
                reference = score_tokens(chosen, micro_batches, ready=ready, train=train)
    corrects = engine.name != "transformers"
    gap = SamplerGap()

    def loss(batch: MicroBatch, normaliser: float) -> tuple[Tensor, LossStats]:
        with ready.memory("forward"):
            hidden = hidden_rows(policy, batch)
        with ready.memory("loss"):
            return head_loss(batch, hidden, normaliser)

    def head_loss(batch: MicroBatch, hidden: Tensor, normaliser: float) -> tuple[Tensor, LossStats]:
        scored = log_probs(policy, batch, hidden, entropy=True, **ready.shape)
        sampler = sampler_log_probs(rollout, batch) if corrects else None
        weights = None
        if sampler is not None:
            basis = scored.logp.detach() if old is None else _gather(old, batch)
            weights = importance_weights(basis, sampler, batch.sequence_ids, section=train.loss)
            gap.add(basis, sampler, cap=train.loss.is_cap)
        return policy_loss(
            scored.logp,
            advantages=advantages[list(batch.indices)],
            sequence_ids=batch.sequence_ids,
            normaliser=normaliser,
            settings=settings,
            old_logp=None if old is None else _gather(old, batch),
            ref_logp=None if reference is None else _gather(reference, batch),
            token_weights=weights,
            entropy=scored.entropy,
        )

    made = 0
    last: Update[LossStats] | None = None
    total: LossStats | None = None
    for _ in range(train.num_iterations):
        for part in _parts(counted, train.updates_per_rollout):
            normaliser = loss_normaliser(
                settings,
                num_sequences=len(part),
                num_tokens=sum(rollout.lengths[index] for index in part),
            )
            part = [index for index in part if index in teaching]
            if not part:
                continue
            last = ready.stepper.run(
                step,
                micro_batches=partial(micro_batches, part),
                loss=partial(loss, normaliser=normaliser),
                longest=max(len(rollout.sequence(index).token_ids) for index in part),
            )
            made += not last.skipped
            for stats in last.stats:
                total = stats if total is None else total + stats
    if last is None or total is None:
        return 1, {"loss": 0.0, "grad_norm": 0.0, "nothing_to_learn": True}
    logged = total.summary() | {"grad_norm": last.grad_norm, "lr": last.lr}
    logged |= {"train_tokens": last.num_tokens, "micro_batches": len(last.stats)}
    logged |= {"budget_tokens": ready.stepper.budget.tokens}
    return made, logged | gap.summary()


@torch.no_grad()
def score_tokens(
    chosen: Sequence[int], micro_batches: Splitter, *, ready: Preflight, train: TrainSection
) -> dict[int, Tensor]:
    """Return completion -> log-probabilities [tokens] under the policy as it is now."""
    scored: dict[int, Tensor] = {}
    for batch in micro_batches(chosen, ready.stepper.budget.tokens):
        logp = log_probs(ready.policy, batch, hidden_rows(ready.policy, batch), **ready.shape).logp
        for place, index in enumerate(batch.indices):
            scored[index] = logp[batch.sequence_ids == place]
    return scored


def loss_settings(train: TrainSection, *, beta: float, limit: int) -> LossSettings:
    """Return the loss of the run; `limit` is the completion length that dr_grpo divides by."""
    return LossSettings(
        loss_type=train.loss.type,  # type: ignore[arg-type]
        epsilon=train.loss.epsilon,
        epsilon_high=train.loss.epsilon_high,
        delta=train.loss.delta,
        beta=beta,
        kl=train.loss.kl,  # type: ignore[arg-type]
        max_completion_length=limit,
        detach_old=train.loss.detach,
    )


def rollout_metrics(rollout: Rollout, scores: Scores) -> dict[str, Any]:
    """Return what a rollout and its rewards say."""
    finished = [completion.finished for completion in rollout.completions]
    logged: dict[str, Any] = report.length_metrics(rollout.lengths, finished)
    logged |= report.reward_metrics(scores.by_reward, scores.seconds)
    if scores.failures:
        logged["reward_failures"] = len(scores.failures)
        first = scores.failures[0]
        logged["reward_failure"] = f"{first.reward} on completion {first.index}: {first.error}"
    return logged


def _line(logged: dict[str, Any]) -> str:
    """Return the step's figures for the progress line."""
    parts = [f"reward {logged['reward']:.3f}", f"length {logged['completions/mean_length']:.1f}"]
    if "entropy" in logged:
        parts += [f"entropy {logged['entropy']:.2f}", f"grad {logged['grad_norm']:.2f}"]
    if logged.get("nothing_to_learn"):
        parts.append("all rewards of every group are equal: nothing to learn")
    if "reward_failure" in logged:
        parts.append(f"{logged['reward_failures']} reward failures: {logged['reward_failure']}")
    return "  ".join([*parts, f"{logged['seconds']:.1f} s"])


def _gather(scored: dict[int, Tensor], batch: MicroBatch) -> Tensor:
    """Return log-probabilities [N] in the order of the batch."""
    return torch.cat([scored[index] for index in batch.indices])


def _parts(chosen: Sequence[int], count: int) -> list[list[int]]:
    """Split completions into `count` runs of about the same size; none is empty."""
    bounds = [round(number * len(chosen) / count) for number in range(count + 1)]
    parts = [list(chosen[low:high]) for low, high in itertools.pairwise(bounds)]
    return [part for part in parts if part]


def _show(
    session: Session, step: int, rollout: Rollout, scores: Scores, advantages: Tensor, rows: int
) -> None:
    columns: dict[str, list[Any]] = {
        "prompt": [prompt.text for prompt in rollout.prompts],
        "completion": rollout.texts,
        **{f"reward {name}": list(values) for name, values in scores.by_reward.items()},
        "reward": scores.totals,
        "advantage": advantages.tolist(),
    }
    report.save_completions(session.output, step, columns)
    if session.progress.console.is_terminal:
        session.progress.say(report.completions_table(columns, rows=rows))
