"""Reward functions: built in, or from Python files that run.yaml names (which runs that code).

A reward function has TRL's signature: `f(prompts, completions, **columns) -> list[float | None]`, columns
as lists, plus `completion_ids`, `trainer_state`, `log_extra` and `log_metric`; it may be async. None = this
function says nothing about this sample. All of them run in processes of their own (trainer/reward_pool.py).
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import UnknownNameError, UsageError, VramwiseError
from trainer.config import RewardSection
from trainer.data import Prompt
from trainer.reward_functions import BUILT_IN, NEEDED_COLUMNS
from trainer.reward_pool import Ask, Pool
from trainer.reward_worker import Done, Failed, Spec, Values

SAMPLE_LIMIT_S = 10.0
"""Of one completion, where a function is asked about each by itself."""
CALL_LIMIT_S = 300.0
"""Of one call on all completions of a step: a judge over the network may take minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """One reward function as the run uses it."""

    name: str
    weight: float
    worker: int
    """Which process, and which of the functions there."""
    function: int
    per_sample: bool
    limit_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A call that failed: on one completion, or (index None) on all of a step."""

    reward: str
    index: int | None
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Rewards of one rollout."""

    totals: list[float]
    """Weighted sum per completion; NaN where every function was silent, or one failed or returned NaN."""
    by_reward: dict[str, Values]
    seconds: dict[str, float]
    """From the first call to the last answer; functions work at the same time."""
    failures: tuple[Failure, ...]
    bad: str
    """Why the step must be skipped: a function returned NaN or infinity, or failed everywhere; or ""."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Columns that functions logged (log_extra), one value a completion."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of what functions logged (log_metric)."""


class Rewards(Sequence[Reward]):
    """The reward functions of a run, with the processes that they live in."""

    def __init__(self, rewards: Sequence[Reward], groups: Sequence[Sequence[Spec]]) -> None:
        self._rewards = tuple(rewards)
        self.pool = Pool(groups)
        self.worked: set[str] = set()
        """Names of the functions that have given a value."""
        self._end = weakref.finalize(self, self.pool.close)

    def __len__(self) -> int:
        return len(self._rewards)

    def __getitem__(self, index: Any) -> Any:
        return self._rewards[index]

    def __iter__(self) -> Iterator[Reward]:
        return iter(self._rewards)

    def close(self) -> None:
        """End the processes."""
        self._end()


def load_rewards(sections: Sequence[RewardSection], *, root: Path) -> Rewards:
    """Return the reward functions of a run; files count from `root`. Raises UsageError."""
    rewards: list[Reward] = []
    groups: dict[str, list[Spec]] = {}
    for place, section in enumerate(sections):
        spec, key = _spec(section, place, root=root)
        own = groups.setdefault(key, [])
        per_sample = section.per_sample or spec.path is None
        taken = [reward.name for reward in rewards]
        rewards.append(
            Reward(
                name=spec.name if spec.name not in taken else f"{spec.name}_{len(taken)}",
                weight=section.weight,
                worker=list(groups).index(key),
                function=len(own),
                per_sample=per_sample,
                limit_s=section.timeout_s or (SAMPLE_LIMIT_S if per_sample else CALL_LIMIT_S),
            )
        )
        own.append(spec)
    return Rewards(rewards, list(groups.values()))


def _spec(section: RewardSection, place: int, *, root: Path) -> tuple[Spec, str]:
    """Return the function that `section` names, and what shares a process with it."""
    options = dict(section.options)
    if ".py:" not in section.name:
        if section.name not in BUILT_IN:
            raise UnknownNameError(
                "reward", section.name, BUILT_IN, hint="or FILE.py:FUNCTION for your own"
            )
        return Spec(name=section.name, options=options), f"built in {place}"
    file, _, name = section.name.rpartition(":")
    path = (root / Path(file).expanduser()).resolve()
    if not path.is_file():
        raise UsageError(f"train.rewards: no such file: {path}")
    return Spec(name=name, path=path, options=options), str(path)


def score(
    rewards: Rewards,
    *,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    state: dict[str, Any] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Scores:
    """Return what every reward function says about every completion.

    A function is called once for all completions, unless it is one that judges each by itself (built
    in, or `per_sample: true`). A call that raises, takes too long or returns something else than one
    number a completion has failed: it is never asked again about a part, for what it says may depend on all.
    `state`: what functions see as trainer_state. Raises VramwiseError for a function that fails on all
    completions of a step and has never given a value, and Interrupted where `stopping` cuts it short.
    """
    arguments = _arguments(prompts, texts, completion_ids)
    asks = [_asks(reward, arguments, len(texts), state or {}) for reward in rewards]
    by_worker: list[list[Ask]] = [[] for _ in {reward.worker for reward in rewards}]
    for reward, own in zip(rewards, asks, strict=True):
        by_worker[reward.worker] += own
    rewards.pool.run(by_worker, stopping=stopping)
    by_reward: dict[str, Values] = {}
    seconds: dict[str, float] = {}
    failures: list[Failure] = []
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    bad = ""
    for reward, own in zip(rewards, asks, strict=True):
        values, failed = _read(reward, own, extra, metrics)
        by_reward[reward.name] = values
        seconds[reward.name] = max(ask.ended_at for ask in own) - min(ask.sent_at for ask in own)
        failures += failed
        if failed and len(failed) == len(own):
            bad = bad or _failed_everywhere(rewards, reward, own, failed[0])
        else:
            rewards.worked.add(reward.name)
        if any(value is not None and not math.isfinite(value) for value in values):
            bad = bad or f"the reward {reward.name} is NaN or infinite"
    return Scores(
        totals=_totals(rewards, by_reward, failures, len(texts)),
        by_reward=by_reward,
        seconds=seconds,
        failures=tuple(failures),
        bad=bad,
        extra=extra,
        metrics={name: sum(values) / len(values) for name, values in metrics.items()},
    )


def _asks(
    reward: Reward, arguments: dict[str, list[Any]], count: int, state: dict[str, Any]
) -> list[Ask]:
    if not reward.per_sample:
        return [Ask(reward.function, count, arguments, state, reward.limit_s)]
    return [
        Ask(
            reward.function,
            1,
            {key: [value[index]] for key, value in arguments.items()},
            state,
            reward.limit_s,
        )
        for index in range(count)
    ]


def _read(
    reward: Reward,
    asks: Sequence[Ask],
    extra: dict[str, list[Any]],
    metrics: dict[str, list[float]],
) -> tuple[Values, list[Failure]]:
    """Return (values, failures) of a function's calls, and add what it logged."""
    values: Values = []
    failed: list[Failure] = []
    for ask in asks:
        answer = ask.answer
        if isinstance(answer, Done):
            for key in answer.extra:
                extra.setdefault(key, [None] * len(values))
            for name, logged in answer.metrics.items():
                metrics.setdefault(name, []).extend(logged)
        else:
            assert isinstance(answer, Failed)
            index = len(values) if reward.per_sample else None
            failed.append(Failure(reward=reward.name, index=index, error=answer.error))
        said = answer.extra if isinstance(answer, Done) else {}
        if reward.per_sample or said:
            for key, column in extra.items():
                if len(column) == len(values):
                    column += said.get(key, [None] * ask.count)
        values += answer.values if isinstance(answer, Done) else [None] * ask.count
    return values, failed


def _failed_everywhere(
    rewards: Rewards, reward: Reward, asks: Sequence[Ask], first: Failure
) -> str:
    """Return why the step is skipped, or raise: such a function may never have worked."""
    said = f"the reward {reward.name} failed on every completion: {first.error}"
    answers = [ask.answer for ask in asks]
    if reward.name in rewards.worked and not any(
        isinstance(answer, Failed) and answer.is_shape for answer in answers
    ):
        return said
    hint = "one number or None for each completion, in their order"
    if "no answer within" in first.error:
        hint = "raise its timeout_s, or make it faster"
    raise VramwiseError(f"train.rewards: {said}", hint=hint)


def _totals(
    rewards: Sequence[Reward],
    by_reward: dict[str, Values],
    failures: Sequence[Failure],
    count: int,
) -> list[float]:
    unknown = {failure.index for failure in failures}
    totals = []
    for index in range(count):
        said = [
            reward.weight * value
            for reward in rewards
            if (value := by_reward[reward.name][index]) is not None
        ]
        # a total that lacks what one function would have said compares with nothing
        known = said and index not in unknown and None not in unknown
        totals.append(sum(said) if known else math.nan)
    return totals


def _arguments(
    prompts: Sequence[Prompt], texts: Sequence[str], completion_ids: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    """Return the keyword arguments of reward functions, as TRL 1.16 makes them.

    Conversational prompts are their messages, completions then one assistant message.
    """
    taken = ("prompt", "completion", "completion_ids", "prompts", "completions")
    columns = sorted({column for prompt in prompts for column in prompt.sample} - {*taken})
    arguments: dict[str, list[Any]] = {
        column: [prompt.sample.get(column) for prompt in prompts] for column in columns
    }
    arguments["prompts"] = [
        prompt.text if prompt.messages is None else prompt.messages for prompt in prompts
    ]
    arguments["completions"] = [
        [{"role": "assistant", "content": text}] if prompt.conversational else text
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    arguments["completion_ids"] = [list(ids) for ids in completion_ids]
    return arguments


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
