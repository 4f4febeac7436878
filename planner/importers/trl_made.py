"""A run document while it is made of a TRL config."""

import math
from dataclasses import dataclass, field
from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.importers.trl_values import Fields, put


@dataclass(kw_only=True)
class Made:
    """A run document while it is made."""

    fields: Fields
    document: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Field -> what differs in this file, beyond the table."""
    updates: int = 1
    """Optimizer steps of a rollout; TRL counts those, this trainer rollouts."""
    dialogues_in_full: bool = False

    def train(self, name: str, value: Any) -> None:
        """Set a field of the train section; None leaves the default."""
        if value is not None:
            put(self.document, f"train.{name}", value)

    def steps(self, name: str, target: str, value: float) -> None:
        """Set a number of steps that TRL takes as a count, or below 1 as a share of all."""
        if value >= 1 or value == 0:
            if value != int(value):
                raise UsageError(
                    f"{name}: {value:g} is not allowed", hint="a whole number, or below 1"
                )
            self.train(target, math.ceil(value / self.updates))
        elif self.fields["max_steps"] > 0:
            self.train(target, max(1, math.ceil(value * self.fields["max_steps"] / self.updates)))
        else:
            self.shares[f"train.{target}"] = value


def refused(name: str, value: Any, hint: str) -> UnsupportedError:
    """Return the error for a value that has no place here."""
    return UnsupportedError(f"{name}: {str(value)[:60]} cannot be trained here", hint=hint)


def interval(made: Made, kind: str, count: str, target: str, *, never: tuple[str, ...]) -> None:
    """Put a number of steps between two saves or evaluations."""
    f = made.fields
    word = str(f[kind])
    if word in never:
        made.train(target, 0)
    elif word == "steps":
        made.steps(count, target, f[count] or f["logging_steps"])
    elif word == "epoch" and f["max_steps"] <= 0:
        made.shares[f"train.{target}"] = 1 / f["num_train_epochs"]
    else:
        raise refused(
            kind,
            word,
            f"steps and {count}" + ("" if word != "epoch" else ": max_steps sets no epoch"),
        )
