"""The built-in reward functions. All of them judge one completion at a time.

This module is imported by the processes that rewards run in, so it imports next to nothing.
"""

import re
from collections.abc import Callable
from typing import Any

from planner.errors import MissingExtraError, UsageError

RewardFunction = Callable[..., Any]


def text_of(completion: Any) -> str:
    """Return the text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def exact(*, column: str = "answer", first_line: bool = True) -> RewardFunction:
    """Give 1 where the completion is the answer, up to space; only its first line by default."""

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [
            float(_trim(text_of(completion), first_line) == str(answer).strip())
            for completion, answer in zip(completions, _column(columns, column), strict=True)
        ]

    return reward


def numeric(*, column: str = "answer") -> RewardFunction:
    """Give 1 where math-verify finds the completion's final answer equal to the column's."""
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError:
        raise MissingExtraError("the reward numeric", "train") from None

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [
            # no timeout of its own: its signals do not reach into one long integer operation, and
            # the process that this runs in is killed when it takes too long
            float(
                verify(
                    parse(str(answer), parsing_timeout=None),
                    parse(text_of(completion), parsing_timeout=None),
                    timeout_seconds=None,
                )
            )
            for completion, answer in zip(completions, _column(columns, column), strict=True)
        ]

    return reward


def format_regex(*, pattern: str, whole: bool = True) -> RewardFunction:
    """Give 1 where the completion matches `pattern`."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UsageError(f"train.rewards.format.options.pattern: {error}") from None

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        match = compiled.fullmatch if whole else compiled.search
        return [float(bool(match(text_of(completion)))) for completion in completions]

    return reward


def length(*, low: int = 0, high: int) -> RewardFunction:
    """Give 1 inside [low, high] tokens, falling to 0 at twice `high`, and to 0 at no tokens."""
    if not 0 <= low <= high or high < 1:
        raise UsageError(f"train.rewards.length.options: need 0 <= low <= high, got {low}, {high}")

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        counts = [len(ids) for ids in completion_ids]
        return [
            min(1.0, count / low if low else 1.0) * min(1.0, max(0.0, 2 - count / high))
            for count in counts
        ]

    return reward


def reasoning_gym() -> RewardFunction:
    """Give the score of the reasoning-gym task that the sample comes from."""
    try:
        from reasoning_gym import get_score_answer_fn
    except ModuleNotFoundError:
        raise MissingExtraError("the reward reasoning-gym", "gym") from None

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [
            float(
                get_score_answer_fn(entry["metadata"]["source_dataset"])(
                    answer=_trim(text_of(completion), False), entry=entry
                )
            )
            for completion, entry in zip(completions, _column(columns, "entry"), strict=True)
        ]

    return reward


BUILT_IN: dict[str, Callable[..., RewardFunction]] = {
    "exact": exact,
    "numeric": numeric,
    "format": format_regex,
    "length": length,
    "reasoning-gym": reasoning_gym,
}
NEEDED_COLUMNS = {"exact": "answer", "numeric": "answer", "reasoning-gym": "entry"}


def _column(columns: dict[str, Any], name: str) -> list[Any]:
    if name not in columns:
        raise KeyError(f"no column {name!r}")
    return columns[name]


def _trim(text: str, first_line: bool) -> str:
    text = text.strip()
    return text.split("\n", 1)[0].strip() if first_line else text
