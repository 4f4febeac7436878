"""The learning half of a GRPO step: reference and old log-probabilities, the loss, the updates.

Shapes: N scored tokens of a micro-batch, S completions of the rollout.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.batching import MicroBatch
from trainer.config import TrainSection
from trainer.engines.protocol import Engine
from trainer.losses import (
    KlEstimator,
    LossSettings,
    LossStats,
    LossType,
    loss_normaliser,
    policy_loss,
)
from trainer.parallel.ranks import ALONE, Ranks
from trainer.preflight import Preflight
from trainer.rollout import Rollout, SamplerGap, importance_weights, sampler_log_probs, split
from trainer.scoring import hidden_rows, log_probs
from trainer.stepping import Update


class PolicyUpdate:
    """Everything that the loss of one rollout's completions needs."""

    def __init__(
        self,
        rollout: Rollout,
        advantages: Tensor,
        *,
        ready: Preflight,
        train: TrainSection,
        engine: Engine,
    ) -> None:
        self.settings = loss_settings(
            train, beta=ready.recipe.beta or 0.0, limit=ready.completion_tokens
        )
        self.rollout = rollout
        self.advantages = advantages.to(ready.policy.device)
        self.gap = SamplerGap()
        usable = rollout.usable(mask_truncated=train.loss.mask_truncated)
        self.counted = [index for index, use in enumerate(usable) if use]
        # an advantage of 0 and no KL term: no gradient, so no forward; the normaliser counts it
        self.teaching = [
            index for index in self.counted if self.settings.beta or float(advantages[index])
        ]
        self._ready = ready
        self._train = train
        # the policy's own samples need no correction, unless penalties or a grammar bent them
        self._corrects = engine.name != "transformers" or train.sampling.off_policy
        self._old: dict[int, Tensor] | None = None
        self._reference: dict[int, Tensor] | None = None

    def score(self) -> None:
        """Score the completions under the reference, and before several updates under the policy.

        One update of a rollout needs no old log-probabilities: they are the new ones, detached.
        """
        if self._train.updates_per_rollout * self._train.num_iterations > 1:
            self._old = self._score_tokens()
        if self.settings.beta:
            with self._ready.policy.reference():
                self._reference = self._score_tokens()

    def micro_batches(self, part: Sequence[int], budget: int) -> Iterator[MicroBatch]:
        """Yield the completions `part` in micro-batches of at most `budget` tokens."""
        return split(
            self.rollout,
            part,
            policy=self._ready.policy,
            budget_tokens=budget,
            layout=self._ready.layout,
            sharing=self._ready.sharing,
        )

    def loss(self, batch: MicroBatch, normaliser: float) -> tuple[Tensor, LossStats]:
        """Return a micro-batch's share of the loss, and its statistics."""
        return self._ready.policy.whole(lambda: self._loss(batch, normaliser))

    def _loss(self, batch: MicroBatch, normaliser: float) -> tuple[Tensor, LossStats]:
        with self._ready.memory("forward"):
            hidden = hidden_rows(self._ready.policy, batch)
        self._ready.memory.loss_until(hidden)
        with self._ready.memory("loss"):
            scored = log_probs(self._ready.policy, batch, hidden, entropy=True, **self._ready.shape)
            if batch.blank:
                return 0.0 * scored.logp.sum(), LossStats.none(scored.logp)
            old = None if self._old is None else _gather(self._old, batch)
            return policy_loss(
                scored.logp,
                advantages=self.advantages[list(batch.indices)],
                sequence_ids=batch.sequence_ids,
                normaliser=normaliser,
                settings=self.settings,
                old_logp=old,
                ref_logp=None if self._reference is None else _gather(self._reference, batch),
                token_weights=self._correction(scored.logp.detach() if old is None else old, batch),
                entropy=scored.entropy,
            )

    def _correction(self, basis: Tensor, batch: MicroBatch) -> Tensor | None:
        """Return token weights [N] for what another engine's kernels sampled differently."""
        sampler = sampler_log_probs(self.rollout, batch) if self._corrects else None
        if sampler is None:
            return None
        self.gap.add(basis, sampler, cap=self._train.loss.is_cap)
        return importance_weights(basis, sampler, batch.sequence_ids, section=self._train.loss)

    def _score_tokens(self) -> dict[int, Tensor]:
        """Return completion -> log-probabilities [tokens] under the policy as it is now."""
        lengths = [len(self.rollout.sequence(index).token_ids) for index in self.teaching]
        longest = self._ready.ranks.max(float(max(lengths, default=1)))
        return self._ready.stepper.in_memory(self._score_once, longest=int(longest))

    @torch.no_grad()
    def _score_once(self, budget: int) -> dict[int, Tensor]:
        ready = self._ready
        scored: dict[int, Tensor] = {}
        for batch in self.micro_batches(self.teaching, budget):
            logp = ready.policy.whole(partial(self._score_batch, batch))
            for place, index in enumerate(batch.indices):
                scored[index] = logp[batch.sequence_ids == place]
            del batch, logp  # before the next one is made
        return scored

    def _score_batch(self, batch: MicroBatch) -> Tensor:
        hidden = hidden_rows(self._ready.policy, batch)
        return log_probs(self._ready.policy, batch, hidden, **self._ready.shape).logp


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
    update = PolicyUpdate(rollout, advantages, ready=ready, train=train, engine=engine)
    with ready.memory("score") if needs_scores(update, train) else nullcontext():
        update.score()
    teaching, counted = set(update.teaching), set(update.counted)
    norms: list[float] = []
    made = 0
    last: Update[LossStats] | None = None
    total: LossStats | None = None
    ranks = ready.ranks
    for _ in range(train.num_iterations):
        for places in _parts(range(rollout.step_completions), train.updates_per_rollout):
            here = set(places)
            chosen = [index for index, place in enumerate(rollout.places) if place in here]
            normaliser = step_normaliser(
                update.settings,
                lengths=rollout.lengths,
                chosen=chosen,
                counted=counted,
                ranks=ranks,
            )
            part = [index for index in chosen if index in teaching]
            longest = max((len(rollout.sequence(index).token_ids) for index in part), default=0)
            longest = int(ranks.max(float(longest)))
            if not longest:  # nobody learns
                continue
            last = ready.stepper.run(
                step,
                micro_batches=partial(update.micro_batches, part),
                loss=partial(update.loss, normaliser=normaliser),
                longest=longest,
            )
            made += not last.skipped
            norms.append(last.grad_norm)
            for stats in last.stats:
                total = stats if total is None else total + stats
    if last is None or total is None:
        return 1, {"loss": 0.0, "grad_norm": 0.0, "nothing_to_learn": True}
    logged = total.over(ranks).summary() | {"grad_norm": sum(norms) / len(norms), "lr": last.lr}
    if len(norms) > 1:
        logged |= {"grad_norm/max": max(norms), "updates": made}
    logged |= {"train_tokens": last.num_tokens, "micro_batches": len(last.stats)}
    logged |= {"budget_tokens": ready.stepper.budget.tokens}
    return made, logged | update.gap.over(ranks).summary()


def step_normaliser(
    settings: LossSettings,
    *,
    lengths: Sequence[int],
    chosen: Sequence[int],
    counted: Collection[int],
    ranks: Ranks = ALONE,
) -> float:
    """Return what the loss of one optimizer step over the completions `chosen` is divided by.

    Those that are masked (not in `counted`) have no tokens, but they are sequences still, as in TRL: a
    mean over sequences, and dr_grpo's constant, are not to grow where others were cut.
    """
    return loss_normaliser(
        settings,
        num_sequences=int(ranks.sum(float(len(chosen)))),
        num_tokens=int(
            ranks.sum(float(sum(lengths[index] for index in chosen if index in counted)))
        ),
    )


def needs_scores(update: PolicyUpdate, train: TrainSection) -> bool:
    """Return whether a rollout has a scoring phase at all."""
    return bool(update.settings.beta) or train.updates_per_rollout * train.num_iterations > 1


def loss_settings(train: TrainSection, *, beta: float, limit: int) -> LossSettings:
    """Return the loss of the run; `limit` is the completion length that dr_grpo divides by."""
    epsilon, high = train.loss.clip
    return LossSettings(
        loss_type=LossType(train.loss.type),
        epsilon=epsilon,
        epsilon_high=high,
        delta=train.loss.delta,
        beta=beta,
        kl=KlEstimator(train.loss.kl),
        max_completion_length=limit,
        detach_old=train.loss.detach,
    )


def _gather(scored: dict[int, Tensor], batch: MicroBatch) -> Tensor:
    """Return log-probabilities [N] in the order of the batch."""
    return torch.cat([scored[index] for index in batch.indices])


def _parts(chosen: Sequence[int], count: int) -> list[list[int]]:
    """Split completions into `count` runs of about the same size; none is empty."""
    bounds = [round(number * len(chosen) / count) for number in range(count + 1)]
    parts = [list(chosen[low:high]) for low, high in itertools.pairwise(bounds)]
    return [part for part in parts if part]
