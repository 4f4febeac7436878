"""From a recipe's optimizer to an optimizer, and what stands between backward and step.

`ElementwiseOptimizer` covers AdamW, Lion and SGD in every memory format; Adafactor and Muon, which
need whole matrices, are torch's own and want fp32 weights.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from planner.errors import UnsupportedError, UsageError
from planner.run.recipe import Optimizer
from trainer.elementwise_optimizer import (
    ElementwiseOptimizer,
    OptimizerSettings,
    Rule,
    StateFormat,
)
from trainer.parallel.ranks import ALONE, Ranks

_RULE = {
    Optimizer.ADAMW: Rule.ADAMW,
    Optimizer.ADAMW_FUSED: Rule.ADAMW,
    Optimizer.ADAMW_8BIT: Rule.ADAMW,
    Optimizer.PAGED_ADAMW: Rule.ADAMW,
    Optimizer.PAGED_ADAMW_8BIT: Rule.ADAMW,
    Optimizer.LION: Rule.LION,
    Optimizer.LION_8BIT: Rule.LION,
    Optimizer.SGD: Rule.SGD,
    Optimizer.SGD_MOMENTUM: Rule.SGD_MOMENTUM,
}
_INT8 = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT, Optimizer.LION_8BIT)
_PAGED = (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT)


def make_optimizer(
    parameters: Iterable[tuple[str, Tensor]],
    *,
    kind: Optimizer,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    master_weights: bool = False,
    state_format: StateFormat = StateFormat.FP32,
    offload: bool = False,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Return the optimizer `kind` for named trainable parameters.

    master_weights keeps fp32 copies of bf16 or fp16 parameters (right for adapters); without it
    bf16 parameters are rounded stochastically. state_format is that of the moments of the kinds
    not named 8bit. Paged kinds keep their state in pinned host memory always, not only when pressed.
    Tensors of one dimension get no weight decay. Raises UsageError or UnsupportedError.
    """
    groups = _groups(parameters, weight_decay)
    if kind in (Optimizer.ADAFACTOR, Optimizer.MUON):
        return _matrix_optimizer(kind, groups, lr)
    if kind not in _RULE:
        raise UnsupportedError(
            f"optimizer {kind}: is not trained here", hint=f"one of {', '.join(_RULE)}"
        )
    settings = OptimizerSettings(
        rule=_RULE[kind],
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        master_weights=master_weights,
        state_format=StateFormat.INT8 if kind in _INT8 else state_format,
        offload=offload or kind in _PAGED,
        seed=seed,
    )
    return ElementwiseOptimizer(groups, settings)


def _groups(parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Split into decayed (matrices) and not decayed (norms, biases), in the order given."""
    trained = [parameter for _, parameter in parameters if parameter.requires_grad]
    if not trained:
        raise UsageError("optimizer: nothing to train", hint="no parameter requires a gradient")
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _matrix_optimizer(
    kind: Optimizer, groups: list[dict[str, Any]], lr: float
) -> torch.optim.Optimizer:
    parameters = [parameter for group in groups for parameter in group["params"]]
    if any(parameter.dtype != torch.float32 for parameter in parameters):
        raise UnsupportedError(
            f"optimizer {kind}: needs fp32 weights (it would round every update to nearest)",
            hint="use adamw, adamw-8bit or lion, which round stochastically or keep a master copy",
        )
    if kind is Optimizer.ADAFACTOR:
        return torch.optim.Adafactor(groups, lr=lr)
    if any(parameter.dim() != 2 for parameter in parameters):
        raise UnsupportedError(
            "optimizer muon: steps matrices only, and the model trains vectors too",
            hint="train LoRA adapters, or use adamw",
        )
    return torch.optim.Muon(groups, lr=lr)


@torch.no_grad()
def gradient_norm(
    parameters: Sequence[Tensor], *, scale: float = 1.0, ranks: Ranks = ALONE
) -> float:
    """Return the L2 norm of all gradients in fp32, divided by the loss scale `scale`.

    On several ranks `parameters` are each one's shards, and the norm is that of the whole, the same for all.
    inf or nan if any gradient is: the step must be left out then.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm(grads, dtype=torch.float32) if grads else ()
    norm = torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0
    if ranks.several:
        norm = math.sqrt(ranks.sum(norm * norm) / ranks.copies)
    return norm / scale


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return what gradients of norm `norm` are multiplied by so that it is at most max_norm."""
    if max_norm is None or norm <= max_norm:
        return 1.0
    return max_norm / norm


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Dynamic loss scale for fp16: a value; `after_step` returns the next one.

    torch's GradScaler refuses fp16 gradients, which is what fp16 adapters have; here the scale is
    undone in fp32 inside the optimizer step (ElementwiseOptimizer.grad_factor).
    """

    value: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000

    def after_step(self, *, finite: bool) -> "LossScale":
        """Return the scale after a step whose gradients were finite, or not (skipped)."""
        if not finite:
            return replace(self, value=max(1.0, self.value / 2), good_steps=0)
        if self.good_steps + 1 >= self.growth_interval:
            return replace(self, value=self.value * 2, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)


NO_SCALE = LossScale(value=1.0, growth_interval=2**62)
"""For bf16 and fp32: never changes upwards, and 1 is its floor."""


def apply_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    *,
    scale: LossScale,
    max_norm: float | None,
    ranks: Ranks = ALONE,
) -> tuple[float, bool, LossScale]:
    """Step with clipped, unscaled gradients; return (gradient norm, stepped, next scale).

    The step is left out if the norm isn't finite. Gradients are not cleared.
    """
    norm = gradient_norm(parameters, scale=scale.value, ranks=ranks)
    finite = math.isfinite(norm)
    if finite:
        factor = clip_factor(norm, max_norm) / scale.value
        if isinstance(optimizer, ElementwiseOptimizer):
            optimizer.grad_factor = factor
        elif factor != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        optimizer.step()
    return norm, finite, scale.after_step(finite=finite)
