"""One optimizer step from micro-batches: accumulate, clip, step; redo it smaller when memory runs out."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from planner.errors import UnsupportedError, VramwiseError
from planner.recipe import Method, Optimizer, Recipe
from trainer.batching import MicroBatch
from trainer.config import Schedule, TrainSection
from trainer.model import Policy
from trainer.optim import ElementwiseOptimizer, OptimizerSettings, Rule, StateFormat
from trainer.phase_memory import PhaseMemory

T = TypeVar("T")
FIRST_LOSS_SCALE = 2.0**16
GROW_AFTER = 200
"""Steps without overflow before the loss scale doubles."""
RULES = {
    Optimizer.ADAMW: (Rule.ADAMW, StateFormat.FP32),
    Optimizer.ADAMW_FUSED: (Rule.ADAMW, StateFormat.FP32),
    Optimizer.ADAMW_8BIT: (Rule.ADAMW, StateFormat.INT8),
    Optimizer.PAGED_ADAMW: (Rule.ADAMW, StateFormat.FP32),
    Optimizer.PAGED_ADAMW_8BIT: (Rule.ADAMW, StateFormat.INT8),
    Optimizer.LION: (Rule.LION, StateFormat.FP32),
    Optimizer.LION_8BIT: (Rule.LION, StateFormat.INT8),
    Optimizer.SGD: (Rule.SGD, StateFormat.FP32),
    Optimizer.SGD_MOMENTUM: (Rule.SGD_MOMENTUM, StateFormat.FP32),
}
PAGED = (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT)


def make_optimizer(policy: Policy, recipe: Recipe, train: TrainSection) -> ElementwiseOptimizer:
    """Return the optimizer of `recipe` over the policy's trained weights.

    Adapters in half precision have an fp32 master unless the recipe says otherwise; full training in
    bf16 rounds stochastically instead. Paged optimizers keep their state in pinned host memory.
    """
    name = recipe.optimizer or Optimizer.ADAMW
    if name not in RULES:
        raise UnsupportedError(
            f"recipe.optimizer: the trainer has no {name}", hint=f"one of {', '.join(RULES)}"
        )
    rule, state_format = RULES[name]
    master = recipe.master_weights
    if master is None:
        master = recipe.method is not Method.FULL or policy.dtype == torch.float16
    settings = OptimizerSettings(
        rule=rule,
        lr=train.lr,
        betas=train.adam_betas,
        weight_decay=train.weight_decay,
        master_weights=master,
        state_format=state_format,
        offload=recipe.optimizer_offload or name in PAGED,
        seed=train.seed,
    )
    parameters = [parameter for _, parameter in policy.trainable()]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return ElementwiseOptimizer(groups, settings)


def learning_rate(step: int, train: TrainSection) -> float:
    """Return the rate of `step` (from 0): linear warm-up, then the schedule down to 0 at `steps`."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    match train.schedule:
        case Schedule.CONSTANT:
            return train.lr
        case Schedule.LINEAR:
            return train.lr * (1 - done)
        case Schedule.COSINE:
            return train.lr * 0.5 * (1 + math.cos(math.pi * done))


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


class Stepper:
    """Runs optimizer steps. `scale` is the fp16 loss scale, 1 in other dtypes."""

    def __init__(
        self,
        policy: Policy,
        optimizer: ElementwiseOptimizer,
        train: TrainSection,
        *,
        budget: TokenBudget,
        memory: PhaseMemory,
    ) -> None:
        self.optimizer = optimizer
        self.budget = budget
        self.scale = FIRST_LOSS_SCALE if policy.dtype == torch.float16 else 1.0
        self._parameters = [parameter for _, parameter in policy.trainable()]
        self._train = train
        self._memory = memory
        self._good_steps = 0

    def run(
        self,
        step: int,
        *,
        micro_batches: Callable[[int], Sequence[MicroBatch]],
        loss: Callable[[MicroBatch], tuple[Tensor, T]],
        longest: int,
    ) -> Update[T]:
        """Do one optimizer step at the learning rate of `step`.

        `micro_batches(budget)` splits the step's work, `loss(batch)` returns a micro-batch's share of the
        loss and its statistics, `longest` is the longest sequence in tokens. When memory runs out the
        budget is halved and the whole step done again: half a step's gradients are worth nothing.
        """
        while True:
            update = self._attempt(step, micro_batches, loss)
            if isinstance(update, Update):
                return update
            self.budget.halve(longest)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _attempt(
        self,
        step: int,
        micro_batches: Callable[[int], Sequence[MicroBatch]],
        loss: Callable[[MicroBatch], tuple[Tensor, T]],
    ) -> Update[T] | None:
        """Return the update, or None when memory ran out: then no frame holds its tensors."""
        try:
            while True:
                update = self._accumulate(step, micro_batches, loss)
                overflow = update.skipped and self.scale > 1 and math.isfinite(update.loss)
                if not overflow:
                    return update
                self.scale /= 2
                self._good_steps = 0
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad(set_to_none=True)
            return None

    def _accumulate(
        self,
        step: int,
        micro_batches: Callable[[int], Sequence[MicroBatch]],
        loss: Callable[[MicroBatch], tuple[Tensor, T]],
    ) -> Update[T]:
        self.optimizer.zero_grad(set_to_none=True)
        stats: list[T] = []
        total: Tensor | float = 0.0
        num_tokens = 0
        for batch in micro_batches(self.budget.tokens):
            with self._memory("forward"):
                share, part = loss(batch)
            with self._memory("backward"):
                (share * self.scale).backward()
            total = total + share.detach()
            stats.append(part)
            num_tokens += batch.num_tokens
            del share
        with self._memory("step"):
            norm = self._grad_norm()
            skipped = not (math.isfinite(norm) and math.isfinite(float(total)))
            lr = learning_rate(step, self._train)
            if not skipped:
                self._apply(norm, lr)
            self.optimizer.zero_grad(set_to_none=True)
        return Update(
            stats=stats,
            loss=float(total),
            grad_norm=norm,
            lr=lr,
            num_tokens=num_tokens,
            skipped=skipped,
        )

    def _apply(self, norm: float, lr: float) -> None:
        clip = min(1.0, self._train.max_grad_norm / (norm + 1e-6))
        # the factor goes into the optimizer's fp32 arithmetic, not into the half-precision gradients
        self.optimizer.grad_factor = clip / self.scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._good_steps += 1
        if self.scale > 1 and self._good_steps % GROW_AFTER == 0:
            self.scale = min(self.scale * 2, FIRST_LOSS_SCALE)

    @torch.no_grad()
    def _grad_norm(self) -> float:
        """Return the 2-norm of all gradients, without the loss scale."""
        norms = [
            torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            for parameter in self._parameters
            if parameter.grad is not None
        ]
        if not norms:
            return 0.0
        return float(torch.linalg.vector_norm(torch.stack(norms))) / self.scale

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs beside the optimizer."""
        return {
            "budget_tokens": self.budget.tokens,
            "halvings": self.budget.halvings,
            "scale": self.scale,
            "good_steps": self._good_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.budget.tokens, self.budget.halvings = state["budget_tokens"], state["halvings"]
        self.scale, self._good_steps = state["scale"], state["good_steps"]
