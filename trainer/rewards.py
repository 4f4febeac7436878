"""Reward functions: built in, or from Python files that run.yaml names (which runs that code).

A reward function has TRL's signature: `f(prompts, completions, **columns) -> list[float | None]`, columns
as lists, plus `completion_ids`; it may be async. None = this function says nothing about this sample.
"""

import asyncio
import importlib.util
import inspect
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import MissingExtraError, UnknownNameError, UsageError
from trainer.config import RewardSection
from trainer.data import Prompt

RewardFunction = Callable[..., Any]
Values = list[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """One reward function as the run uses it."""

    name: str
    function: RewardFunction
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A reward function that raised on one sample."""

    reward: str
    index: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Rewards of one rollout."""

    totals: list[float]
    """Weighted sum per completion; NaN where every function was silent or one returned NaN."""
    by_reward: dict[str, Values]
    seconds: dict[str, float]
    failures: tuple[Failure, ...]
    bad: bool
    """A function returned NaN or infinity: the step must be skipped."""


def load_rewards(sections: Sequence[RewardSection], *, root: Path) -> list[Reward]:
    """Return the reward functions of a run; files count from `root`. Raises UsageError."""
    rewards: list[Reward] = []
    for section in sections:
        if ".py:" in section.name:
            function = _from_file(section.name, root=root)
            if section.options:
                options = dict(section.options)
                function = _with_options(function, options)
            name = section.name.rpartition(":")[2]
        else:
            if section.name not in BUILT_IN:
                raise UnknownNameError(
                    "reward", section.name, BUILT_IN, hint="or FILE.py:FUNCTION for your own"
                )
            function = _built_in(section)
            name = section.name
        taken = [reward.name for reward in rewards]
        name = name if name not in taken else f"{name}_{len(taken)}"
        rewards.append(Reward(name=name, function=function, weight=section.weight))
    return rewards


def score(
    rewards: Sequence[Reward],
    *,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
) -> Scores:
    """Return what every reward function says about every completion.

    A function that raises is asked again sample by sample, so that one bad sample costs only itself:
    that sample is silent for this function and reported in `failures`.
    """
    by_reward: dict[str, Values] = {}
    seconds: dict[str, float] = {}
    failures: list[Failure] = []
    arguments = _arguments(prompts, texts, completion_ids)
    for reward in rewards:
        start = time.perf_counter()
        try:
            values = _call(reward, arguments, len(texts))
        except Exception:  # a user's code may raise anything; found out sample by sample
            values = []
            for index in range(len(texts)):
                one = {key: [value[index]] for key, value in arguments.items()}
                try:
                    values += _call(reward, one, 1)
                except Exception as error:  # as above
                    values.append(None)
                    failures.append(
                        Failure(reward=reward.name, index=index, error=repr(error)[:200])
                    )
        by_reward[reward.name] = values
        seconds[reward.name] = time.perf_counter() - start
    totals, bad = _totals(rewards, by_reward, len(texts))
    return Scores(
        totals=totals, by_reward=by_reward, seconds=seconds, failures=tuple(failures), bad=bad
    )


def _totals(
    rewards: Sequence[Reward], by_reward: dict[str, Values], count: int
) -> tuple[list[float], bool]:
    totals, bad = [], False
    for index in range(count):
        said = [
            (reward.weight, value)
            for reward in rewards
            if (value := by_reward[reward.name][index]) is not None
        ]
        bad = bad or any(not math.isfinite(value) for _, value in said)
        totals.append(sum(weight * value for weight, value in said) if said else math.nan)
    return totals, bad


def _arguments(
    prompts: Sequence[Prompt], texts: Sequence[str], completion_ids: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    columns = sorted({column for prompt in prompts for column in prompt.sample})
    arguments: dict[str, list[Any]] = {
        column: [prompt.sample.get(column) for prompt in prompts] for column in columns
    }
    arguments["prompts"] = [
        prompt.sample.get("prompt", prompt.text) if prompt.conversational else prompt.text
        for prompt in prompts
    ]
    arguments["completions"] = [
        [{"role": "assistant", "content": text}] if prompt.conversational else text
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    arguments["completion_ids"] = [list(ids) for ids in completion_ids]
    arguments.pop("prompt", None)
    return arguments


def _call(reward: Reward, arguments: dict[str, list[Any]], count: int) -> Values:
    result = reward.function(**arguments)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    values = [None if value is None else float(value) for value in result]
    if len(values) != count:
        raise ValueError(f"{reward.name} returned {len(values)} values for {count} completions")
    return values


async def _awaited(result: Any) -> Any:
    return await result


def _from_file(reference: str, *, root: Path) -> RewardFunction:
    """Import FILE.py:FUNCTION. This runs the file's code."""
    file, _, name = reference.rpartition(":")
    path = root / Path(file).expanduser()
    if not path.is_file():
        raise UsageError(f"train.rewards: no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises on import
        raise UsageError(f"train.rewards: {path.name} does not import: {error!r}") from None
    function = getattr(module, name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownNameError(f"function in {path.name}", name, defined)
    return function


def _with_options(function: RewardFunction, options: dict[str, Any]) -> RewardFunction:
    return lambda **arguments: function(**arguments, **options)


def _built_in(section: RewardSection) -> RewardFunction:
    try:
        return BUILT_IN[section.name](**section.options)
    except TypeError as error:
        allowed = inspect.signature(BUILT_IN[section.name]).parameters
        raise UsageError(
            f"train.rewards.{section.name}.options: {error.args[0]}",
            hint=f"allowed: {', '.join(allowed) or 'none'}",
        ) from None


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
            # no timeout: it works by signals, which only the main thread may use
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


def check_reward_columns(sections: Sequence[RewardSection], columns: Sequence[str]) -> None:
    """Raise UsageError where a built-in reward reads a column that the data set lacks."""
    for section in sections:
        needed = section.options.get("column", NEEDED_COLUMNS.get(section.name))
        if section.name in NEEDED_COLUMNS and needed not in columns:
            raise UsageError(
                f"train.rewards.{section.name}: reads the column {needed!r}; the data set has "
                f"{', '.join(sorted(columns))}",
                hint="name yours with options: {column: ...}",
            )


def _column(columns: dict[str, Any], name: str) -> list[Any]:
    if name not in columns:
        raise KeyError(f"no column {name!r}")
    return columns[name]


def _trim(text: str, first_line: bool) -> str:
    text = text.strip()
    return text.split("\n", 1)[0].strip() if first_line else text
