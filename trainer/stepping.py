"""One optimizer step from micro-batches: accumulate, clip, step; redo it smaller when memory runs out."""

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from planner.errors import VramwiseError
from planner.run.recipe import Optimizer, Recipe
from trainer.batching import MicroBatch
from trainer.config import TrainSection
from trainer.model import Policy
from trainer.optim import NO_SCALE, LossScale, apply_step, make_optimizer
from trainer.phase_memory import PhaseMemory
from trainer.random_states import random_states, set_random_states
from trainer.schedule import learning_rate

SHARD_STRIDE = 1_000_081
"""Between the rounding seeds of two shards of a parameter; its copies round alike."""
T = TypeVar("T")
R = TypeVar("R")


def free_memory() -> None:
    """Give back what no tensor needs any more, before something is tried again smaller."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_run_optimizer(
    policy: Policy, recipe: Recipe, train: TrainSection
) -> torch.optim.Optimizer:
    """Return the optimizer of a settled `recipe` over the policy's trained weights."""
    shard = policy.sharded.ranks.shard_index if policy.sharded is not None else 0
    return make_optimizer(
        policy.stepped(),
        kind=recipe.optimizer or Optimizer.ADAMW,
        lr=train.lr,
        weight_decay=train.weight_decay,
        betas=train.adam_betas,
        eps=train.adam_eps,
        master_weights=bool(recipe.master_weights),
        offload=recipe.optimizer_offload,
        seed=train.seed + SHARD_STRIDE * shard,
    )


@dataclass
class TokenBudget:
    """Tokens of one micro-batch; memory that runs out halves it."""

    tokens: int
    halvings: int = 0

    def halve(self, longest: int) -> None:
        """Halve, but not below the longest sequence; raises VramwiseError when it is there already."""
        if self.tokens <= longest:
            raise VramwiseError(
                f"out of memory with one sequence of {longest} tokens in a micro-batch",
                hint="lower completion_length, or see: vramwise advise RUN.yaml",
            )
        self.tokens = max(longest, self.tokens // 2)
        self.halvings += 1


def in_budget(
    work: Callable[[int], R],
    budget: TokenBudget,
    *,
    longest: int,
    undo: Callable[[], None] = lambda: None,
) -> R:
    """Return `work(tokens)`; when memory runs out the budget is halved and all of it done again.

    `undo` is called in between. Raises VramwiseError when one sequence of `longest` tokens is too much.
    """
    while True:
        done = _attempt(work, budget.tokens)
        if done is not None:
            return done
        undo()
        budget.halve(longest)
        free_memory()


def _attempt(work: Callable[[int], R], tokens: int) -> R | None:
    """Return what `work` does, or None when memory ran out: then no frame holds its tensors."""
    try:
        return work(tokens)
    except torch.OutOfMemoryError:
        return None


@contextmanager
def _no_step_again() -> Iterator[None]:
    """End the run where memory runs out in the step: some weights, or other ranks, have stepped already."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise VramwiseError(
            "out of memory in the optimizer's step",
            hint="optimizer_offload: true, or an 8-bit optimizer; --resume goes on at the last checkpoint",
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(Generic[T]):
    """What one optimizer step did."""

    stats: list[T]
    """One entry a micro-batch, as the loss returned it."""
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    """Tokens the model ran forward, padding included."""
    skipped: bool
    """Loss or gradient was NaN or infinite: weights are as before."""
    scale: float
    """Loss scale of the step."""


class Stepper:
    """Runs optimizer steps; fp16 has a dynamic loss scale."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        train: TrainSection,
        *,
        budget: TokenBudget,
        memory: PhaseMemory,
    ) -> None:
        self.optimizer = optimizer
        self.budget = budget
        self.scale = LossScale() if policy.dtype == torch.float16 else NO_SCALE
        self._policy = policy
        self._parameters = [parameter for _, parameter in policy.stepped()]
        self._train = train
        self._memory = memory

    def run(
        self,
        step: int,
        *,
        micro_batches: Callable[[int], Iterable[MicroBatch]],
        loss: Callable[[MicroBatch], tuple[Tensor, T]],
        longest: int,
    ) -> Update[T]:
        """Do one optimizer step at the learning rate of `step`.

        `micro_batches(budget)` splits the step's work, one at a time; `loss(batch)` returns a
        micro-batch's share of the loss and its statistics, `longest` is the longest sequence in tokens. When memory runs out the
        budget is halved and the whole step done again: half a step's gradients are worth nothing.
        """
        return self.in_memory(
            lambda budget: self._whole(step, micro_batches, loss), longest=longest
        )

    def in_memory(self, work: Callable[[int], R], *, longest: int) -> R:
        """Return `work(budget)`; when memory runs out the budget is halved and all of it done again.

        Raises VramwiseError when one sequence of `longest` tokens is too much already.
        """
        drawn = random_states(self._policy.device)

        def undo() -> None:
            self._clear()
            set_random_states(drawn, self._policy.device)  # dropout drops what it dropped

        return in_budget(work, self.budget, longest=longest, undo=undo)

    def _whole(
        self,
        step: int,
        micro_batches: Callable[[int], Iterable[MicroBatch]],
        loss: Callable[[MicroBatch], tuple[Tensor, T]],
    ) -> Update[T]:
        while True:
            with self._policy.training():
                update = self._accumulate(step, micro_batches, loss)
            # fp16 overflow: the scale is halved by now, and the step is done again
            overflow = update.skipped and update.scale > 1 and math.isfinite(update.loss)
            if not overflow:
                return update

    def _accumulate(
        self,
        step: int,
        micro_batches: Callable[[int], Iterable[MicroBatch]],
        loss: Callable[[MicroBatch], tuple[Tensor, T]],
    ) -> Update[T]:
        self._clear()
        stats: list[T] = []
        total: Tensor | float = 0.0
        num_tokens = 0
        batches = iter(micro_batches(self.budget.tokens))

        def learn() -> tuple[Tensor, T, int] | None:
            for batch in batches:
                share, part = loss(batch)
                with self._memory("backward"):
                    (share * self.scale.value).backward()
                return share.detach(), part, batch.num_tokens
            return None

        while (learnt := self._policy.one_pass(learn)) is not None:
            share, part, tokens = learnt
            total = total + share
            stats.append(part)
            num_tokens += tokens
            del learnt, share  # before the next one is made
        ranks = self._policy.ranks
        if ranks.several:
            total, num_tokens = ranks.sum(float(total)), int(ranks.sum(float(num_tokens)))
        self._policy.take_gradients()
        scale, lr = self.scale, learning_rate(step, self._train)
        norm, stepped = math.nan, False
        if math.isfinite(float(total)):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with self._memory("step"), _no_step_again():
                norm, stepped, self.scale = apply_step(
                    self.optimizer,
                    self._parameters,
                    scale=scale,
                    max_norm=self._train.max_grad_norm,
                    ranks=ranks,
                )
        self._clear()
        return Update(
            stats=stats,
            loss=float(total),
            grad_norm=norm,
            lr=lr,
            num_tokens=num_tokens,
            skipped=not stepped,
            scale=scale.value,
        )

    def _clear(self) -> None:
        self._policy.clear_gradients()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs beside the optimizer."""
        return {
            "budget_tokens": self.budget.tokens,
            "halvings": self.budget.halvings,
            "scale": self.scale.value,
            "good_steps": self.scale.good_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.budget.tokens, self.budget.halvings = state["budget_tokens"], state["halvings"]
        self.scale = replace(self.scale, value=state["scale"], good_steps=state["good_steps"])
