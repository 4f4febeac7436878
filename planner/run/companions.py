"""The models beside the one that is trained: reference, teacher, critic and judge."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from planner.errors import UsageError
from planner.models.hub import find_model
from planner.models.spec import ModelSpec
from planner.run.recipe import Recipe, Reference, Task, TeacherPlacement
from planner.run.task_model import with_head
from planner.run.tasks import Head

Role = Literal["reference", "teacher", "value", "reward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Companion:
    """One model beside the trained one."""

    role: Role
    name: str
    """Of the model; empty: the trained one's own kind."""
    placement: TeacherPlacement
    trained: bool = False
    spec: ModelSpec = field(repr=False, compare=False)

    @property
    def resident(self) -> bool:
        """Its weights stay on the GPU."""
        return self.placement is TeacherPlacement.RESIDENT


_PLACED = {
    Reference.SEPARATE: TeacherPlacement.RESIDENT,
    Reference.OFFLOADED: TeacherPlacement.OFFLOADED,
}


def companions(
    model: ModelSpec, recipe: Recipe, task: Task, reference: Reference
) -> tuple[Companion, ...]:
    """Return the models that the task needs beside `model`. Raises UsageError for one it cannot use."""
    found = []
    if reference in _PLACED:
        found.append(Companion(role="reference", name="", placement=_PLACED[reference], spec=model))
    if task is Task.DISTILL:
        found.append(_teacher(model, recipe))
    if task is Task.PPO:
        judged = recipe.reward_model or ""
        critic = _scoring(model, recipe.value_model or "", "value_model")
        found.append(
            Companion(
                role="value",
                name=recipe.value_model or "",
                placement=TeacherPlacement.RESIDENT,
                trained=True,
                spec=critic,
            )
        )
        if judged != "none":
            found.append(
                Companion(
                    role="reward",
                    name=judged,
                    placement=TeacherPlacement.RESIDENT,
                    spec=_scoring(model, judged, "reward_model"),
                )
            )
    return tuple(found)


def _scoring(model: ModelSpec, name: str, field_name: str) -> ModelSpec:
    return with_head(_named(name, field_name) if name else model, Head.SCORE)


def _teacher(model: ModelSpec, recipe: Recipe) -> Companion:
    if recipe.teacher is None:
        raise UsageError(
            "teacher: task distill needs one", hint="teacher: qwen3-32b, or --teacher qwen3-32b"
        )
    placement = recipe.teacher_placement or TeacherPlacement.RESIDENT
    spec = _named(recipe.teacher, "teacher")
    if spec.vocab != model.vocab:
        raise UsageError(
            f"teacher: {recipe.teacher} has {spec.vocab:,} tokens, {model.name or 'the model'} "
            f"{model.vocab:,}: their distributions cannot be compared",
            hint="a teacher of the same family and vocabulary size",
        )
    return Companion(role="teacher", name=recipe.teacher, placement=placement, spec=spec)


@lru_cache(maxsize=64)
def _found(name: str) -> ModelSpec:
    return find_model(name)


def _named(name: str, field_name: str) -> ModelSpec:
    """Return a model by name; an error names the recipe's field."""
    try:
        return _found(name)
    except UsageError as error:
        raise UsageError(f"{field_name}: {error.message}", hint=error.hint) from None
