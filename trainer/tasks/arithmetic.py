"""Generated arithmetic: verifiable, endless, and it works offline."""

import random
from dataclasses import dataclass
from typing import Any

from planner.errors import UsageError

OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*"}
SEED_OFFSET = 7919
"""Keeps sample seeds apart from the trainer's own seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticSettings:
    """What is asked."""

    operations: tuple[str, ...] = ("add",)
    digits: int = 2
    examples: int = 3
    """Worked examples in front of every question: they show a base model the format."""
    size: int = 4096
    seed: int = 0


class ArithmeticTask:
    """A sequence of samples {"prompt", "answer"}; the same seed gives the same samples."""

    def __init__(self, **options: Any) -> None:
        try:
            settings = ArithmeticSettings(**options)
        except TypeError as error:
            known = ", ".join(ArithmeticSettings.__slots__)
            raise UsageError(f"train.dataset.options: {error.args[0]}", hint=known) from None
        unknown = set(settings.operations) - set(OPERATIONS)
        if unknown or not settings.operations:
            raise UsageError(
                f"train.dataset.options.operations: {sorted(unknown) or 'empty'} is not allowed",
                hint=", ".join(OPERATIONS),
            )
        for name, low, high in (("digits", 1, 9), ("examples", 0, 32), ("size", 1, 10**9)):
            value = getattr(settings, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(
                    f"train.dataset.options.{name}: {value!r} is not allowed",
                    hint=f"a whole number from {low} to {high}",
                )
        self.settings = settings

    def __len__(self) -> int:
        return self.settings.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        draw = random.Random(f"{self.settings.seed + SEED_OFFSET}/{index}")
        lines = []
        for _ in range(self.settings.examples):
            question, answer = self._question(draw)
            lines.append(f"{question} {answer}\n")
        question, answer = self._question(draw)
        # no trailing space: with most vocabularies the space belongs to the answer's first token
        return {"prompt": "".join(lines) + question, "answer": str(answer)}

    def _question(self, draw: random.Random) -> tuple[str, int]:
        operation = draw.choice(self.settings.operations)
        high = 10**self.settings.digits - 1
        left, right = draw.randint(0, high), draw.randint(0, high)
        if operation == "subtract":
            left, right = max(left, right), min(left, right)
        answer = {"add": left + right, "subtract": left - right, "multiply": left * right}[
            operation
        ]
        return f"{left} {OPERATIONS[operation]} {right} =", answer
