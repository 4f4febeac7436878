"""The learning rate of every step: warm-up, then one of transformers' schedules, with a floor.

After the warm-up it is what `transformers.get_scheduler` gives; the warm-up itself is a step ahead of
transformers', whose first step has a rate of 0 and changes nothing.
"""

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from planner.errors import UsageError

if TYPE_CHECKING:
    from trainer.config import TrainSection

DECAY_RATIO = 0.1
"""wsd: the share of a run that decays when nothing is said."""


class Schedule(StrEnum):
    """Learning rate over the run, after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"
    """Warm-up, stable, decay: constant until the last `decay_steps`."""


class Decay(StrEnum):
    """The shape of wsd's decay, in transformers' words."""

    LINEAR = "linear"
    COSINE = "cosine"
    ONE_SQRT = "1-sqrt"


def learning_rate(step: int, train: "TrainSection") -> float:
    """Return the rate of `step`, counted from 0."""
    warmup = warmup_of(train)
    if step < warmup:
        return train.lr * (step + 1) / warmup
    if train.schedule is Schedule.CONSTANT:
        return train.lr
    decay = decay_of(train) if train.schedule is Schedule.WSD else max(1, train.steps - warmup)
    done = (step - (train.steps - decay)) / decay
    lowest = floor_of(train)
    return lowest + (train.lr - lowest) * _left(done, train)


def _left(done: float, train: "TrainSection") -> float:
    """Return the share of the rate above the floor that is left after `done` of the decay."""
    done = min(1.0, done)
    if done <= 0:
        return 1.0
    shape = train.decay_type.value if train.schedule is Schedule.WSD else train.schedule.value
    if shape == "linear":
        return 1.0 - done
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - math.sqrt(done)


def warmup_of(train: "TrainSection") -> int:
    """Return the steps of the warm-up; a ratio is rounded up, as transformers does."""
    if train.warmup_ratio is None:
        return train.warmup_steps
    return math.ceil(train.steps * train.warmup_ratio)


def decay_of(train: "TrainSection") -> int:
    """Return the steps of wsd's decay."""
    if train.decay_steps is not None:
        return train.decay_steps
    ratio = DECAY_RATIO if train.decay_ratio is None else train.decay_ratio
    return max(1, math.ceil(train.steps * ratio))


def floor_of(train: "TrainSection") -> float:
    """Return the rate that a schedule ends at."""
    if train.min_lr is not None:
        return train.min_lr
    return train.lr * (train.min_lr_ratio or 0.0)


def check_schedule(train: Any) -> None:
    """Raise UsageError for settings that contradict each other or that the schedule doesn't read."""
    given = train.model_fields_set
    for name, other in (("warmup_ratio", "warmup_steps"), ("min_lr_ratio", "min_lr"), ("decay_ratio", "decay_steps")):  # fmt: skip
        if (
            getattr(train, name) is not None
            and other in given
            and getattr(train, other) is not None
        ):
            raise UsageError(
                f"train.{name}: {getattr(train, name):g} and {other}: {getattr(train, other):g} "
                "contradict each other",
                hint="give one of them",
            )
    unread = {
        "decay_steps": train.schedule is not Schedule.WSD,
        "decay_ratio": train.schedule is not Schedule.WSD,
        "decay_type": train.schedule is not Schedule.WSD,
        "min_lr": train.schedule is Schedule.CONSTANT,
        "min_lr_ratio": train.schedule is Schedule.CONSTANT,
    }
    for name, useless in unread.items():
        if useless and name in given and getattr(train, name) is not None:
            needed = "wsd" if name.startswith("decay") else "linear, cosine or wsd"
            raise UsageError(
                f"train.{name}: {getattr(train, name)} has no effect with schedule {train.schedule}",
                hint=f"schedule: {needed}",
            )
    if train.min_lr is not None and train.min_lr > train.lr:
        raise UsageError(
            f"train.min_lr: {train.min_lr:g} is above lr = {train.lr:g}",
            hint=f"at most {train.lr:g}",
        )


def check_steps(train: Any) -> None:
    """Raise UsageError where warm-up and decay don't fit into the steps of the run."""
    name = "warmup_steps" if train.warmup_ratio is None else "warmup_ratio"
    warmup = warmup_of(train)
    if warmup >= train.steps:
        raise UsageError(
            f"train.{name}: {getattr(train, name)} is not allowed: the warm-up would take all "
            f"{train.steps} steps",
            hint=f"below steps = {train.steps}",
        )
    if train.schedule is Schedule.WSD and warmup + decay_of(train) > train.steps:
        raise UsageError(
            f"train.decay_steps: {decay_of(train)} after a warm-up of {warmup} are more than "
            f"steps = {train.steps}",
            hint=f"at most {train.steps - warmup}",
        )
