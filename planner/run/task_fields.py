"""What only some tasks have: pairs and their negatives, mini-batches, texts embedded one after another."""

from typing import Any, NamedTuple

from planner.errors import UsageError
from planner.run.engine_choices import choose
from planner.run.recipe import Recipe, Task, TeacherPlacement
from planner.run.tasks import TASKS

DEFAULT_TOP_K = 100
"""Log-probabilities of one token that a served teacher sends when nothing is said."""


class Column(NamedTuple):
    """Texts that go through the model in one forward of their own, padded to one length."""

    sequences: int
    tokens: int


_OWN_FIELDS = {
    "teacher": (Task.DISTILL,),
    "teacher_placement": (Task.DISTILL,),
    "teacher_top_k": (Task.DISTILL,),
    "value_model": (Task.PPO,),
    "reward_model": (Task.PPO,),
    "negatives": (Task.EMBED, Task.RERANK),
    "mini_batch": (Task.EMBED,),
}


def refuse_foreign(recipe: Recipe, task: Task) -> None:
    """Raise UsageError for a field that another task's models or rows need."""
    for name, tasks in _OWN_FIELDS.items():
        if getattr(recipe, name) is not None and task not in tasks:
            allowed = " and ".join(str(each) for each in tasks)
            raise UsageError(
                f"{name}: has no effect with task {task}", hint=f"only {allowed} has it"
            )
    if recipe.teacher_top_k and recipe.teacher_placement is not TeacherPlacement.SERVED:
        raise UsageError(
            "teacher_top_k: a teacher on this machine gives its whole distribution",
            hint="teacher_placement: served",
        )


def sequences_of(task: Task, batch: int, negatives: int) -> int:
    """Return the sequences of `batch` samples with their negatives."""
    if task is Task.EMBED:
        return batch * (2 + negatives)
    if task is Task.RERANK:
        return batch * (1 + negatives)
    return batch * TASKS[task].rows


def columns_of(
    task: Task, batch: int, negatives: int, query: int, document: int
) -> tuple[Column, ...]:
    """Return the forwards of one micro-batch of embeddings: queries, positives, then each negative."""
    if task is not Task.EMBED:
        return ()
    return (Column(batch, query or document), *(1 + negatives) * (Column(batch, document),))


def pair_fields(
    recipe: Recipe, task: Task, batch: int, prompt: int, completion: int
) -> dict[str, Any]:
    """Return what the resolved recipe holds of pairs, negatives and mini-batches."""
    negatives = recipe.negatives or 0
    at_once = min(batch, recipe.mini_batch or batch) if task is Task.EMBED else batch
    return {
        "batch": batch,
        "negatives": negatives,
        "at_once": at_once,
        "cached": task is Task.EMBED and recipe.mini_batch is not None,
        "teacher_top_k": recipe.teacher_top_k or DEFAULT_TOP_K,
        "columns": columns_of(task, at_once, negatives, prompt, completion),
    }


def lifecycle_fields(recipe: Recipe, defaults: dict[str, Any], *, trains: bool) -> dict[str, Any]:
    """Return what the resolved recipe holds of evaluation, saving and resuming."""
    evaluation = recipe.evaluation
    return {
        "eval_samples": evaluation.samples if trains else 0,
        "eval_batch": choose(evaluation.batch_size, defaults, "micro_batch_size", 1),
        "eval_logits": evaluation.logits,
        "eval_accumulation": evaluation.accumulation_steps or 0,
        "save": recipe.save if trains else "none",
        "resume": recipe.resume and trains,
    }
