"""What each task is to memory: rows of a sample, what stands on the hidden states, whose habits it shares."""

from enum import StrEnum
from typing import NamedTuple

from planner.run.recipe import Recipe, Task


class Head(StrEnum):
    """What a task makes of the last hidden states."""

    VOCABULARY = "vocabulary"
    SCORE = "score"
    """One number a token: a linear [1, hidden] in place of the vocabulary's."""
    NONE = "none"
    """The hidden states are the answer."""


class TaskLaw(NamedTuple):
    """One task."""

    relative: Task
    """Whose defaults, switches and laws of a framework hold where it states none of its own."""
    head: Head = Head.VOCABULARY
    rows: int = 1
    """Sequences of one sample in a forward with a graph; chosen and rejected are two."""
    reference: bool = False
    """Its loss compares with a reference model."""
    generates: bool = False
    """Completions are made during training."""
    unit: str = "sequences"
    """What a micro-batch counts."""


TASKS: dict[Task, TaskLaw] = {
    Task.SFT: TaskLaw(Task.SFT),
    Task.GRPO: TaskLaw(Task.GRPO, reference=True, generates=True),
    Task.DPO: TaskLaw(Task.DPO, rows=2, reference=True, unit="pairs"),
    Task.KTO: TaskLaw(Task.DPO, reference=True),
    Task.ORPO: TaskLaw(Task.DPO, rows=2, unit="pairs"),
    Task.SIMPO: TaskLaw(Task.DPO, rows=2, unit="pairs"),
    Task.REWARD: TaskLaw(Task.DPO, Head.SCORE, rows=2, unit="pairs"),
    Task.PPO: TaskLaw(Task.GRPO, reference=True, generates=True),
    Task.DISTILL: TaskLaw(Task.SFT),
    Task.EMBED: TaskLaw(Task.SFT, Head.NONE, unit="pairs"),
    Task.RERANK: TaskLaw(Task.SFT, Head.SCORE, unit="queries"),
    Task.SERVE: TaskLaw(Task.SERVE),
}
PREFERENCE = (Task.DPO, Task.KTO)
"""Tasks whose reference is asked for every micro-batch, beside the policy."""
DEFAULT_BETA = {Task.DPO: 0.1, Task.KTO: 0.1, Task.PPO: 0.05}
"""KL weights where a framework states none: DPOConfig, KTOConfig (beta), PPOConfig (kl_coef) of TRL."""
_OWN_WORD = {
    "kto": Task.KTO,
    "orpo": Task.ORPO,
    "simpo": Task.SIMPO,
    "cpo": Task.ORPO,
}
"""Algorithms of `task: dpo` that are tasks of their own; CPO too has pairs, their likelihood, no reference."""


def planned_task(recipe: Recipe) -> Task:
    """Return the task that is planned: an algorithm of pairs may be another task by its own word."""
    if recipe.task is Task.DPO and recipe.algorithm is not None:
        return _OWN_WORD.get(recipe.algorithm.lower(), Task.DPO)
    return recipe.task
