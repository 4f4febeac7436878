"""Group-relative advantages: rewards -> one number a completion."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to the standard deviation, as GRPO implementations do, so that equal rewards give 0."""


class Scale(StrEnum):
    """What the centred rewards are divided by."""

    GROUP = "group"
    """The standard deviation of the prompt's own completions (GRPO)."""
    BATCH = "batch"
    """The standard deviation of the whole batch."""
    NONE = "none"
    """Nothing (Dr. GRPO): no bias towards prompts that are almost always right or wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Advantages of a batch and what to log about it."""

    values: Tensor
    """[S] fp32, in the order of the rewards."""
    zero_std_frac: float
    """Share of completions in groups whose rewards are all equal: these teach nothing."""
    reward_mean: float
    reward_std: float
    """Mean standard deviation within groups (of the batch with Scale.BATCH)."""


def group_advantages(
    rewards: Tensor, *, num_generations: int, scale: Scale = Scale.GROUP
) -> Advantages:
    """Return rewards minus their group's mean, divided as `scale` says.

    rewards [S], grouped by prompt, S a multiple of num_generations. Standard deviations are
    unbiased (n - 1), 0 for one sample. A NaN reward (a reward function that failed) is left out of
    its group's statistics and gets advantage 0. Raises ValueError if the sizes don't match.
    """
    scale = Scale(scale)
    if rewards.dim() != 1 or rewards.numel() == 0 or rewards.numel() % num_generations:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}: need [S] with S a multiple of "
            f"num_generations={num_generations}"
        )
    groups = rewards.float().reshape(-1, num_generations)
    known = ~groups.isnan()
    mean, group_std = _mean_std(groups, known)
    std = group_std
    if scale is Scale.BATCH:
        _, batch_std = _mean_std(groups.reshape(1, -1), known.reshape(1, -1))
        std = batch_std.expand_as(std)
    centred = torch.where(known, groups - mean, 0.0)
    values = centred if scale is Scale.NONE else centred / (std + STD_EPSILON)
    flat = torch.isclose(group_std, torch.zeros_like(group_std))
    return Advantages(
        values=values.reshape(-1),
        zero_std_frac=flat.float().mean().item(),
        reward_mean=rewards.float().nanmean().item(),
        reward_std=std.mean().item(),
    )


def _mean_std(groups: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased standard deviation [rows, 1] of the known entries of each row."""
    count = known.sum(1, keepdim=True)
    mean = torch.where(known, groups, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(known, groups - mean, 0.0).square().sum(1, keepdim=True)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()
