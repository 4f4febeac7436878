"""A model as a task trains it: with the vocabulary's head, with a head of one number, or without."""

from dataclasses import replace

from planner.models.spec import ModelSpec, ModuleKind, ModuleSpec
from planner.run.recipe import Task
from planner.run.tasks import TASKS, Head

SCORE = "score"
"""The head's name in transformers' sequence classifiers of decoders."""

_MADE: dict[tuple[int, Head], tuple[ModelSpec, ModelSpec]] = {}


def task_model(model: ModelSpec, task: Task) -> ModelSpec:
    """Return the model that `task` trains; the same object where nothing differs."""
    return with_head(model, TASKS[task].head)


def with_head(model: ModelSpec, head: Head) -> ModelSpec:
    """Return the model with a head of this kind, once for each model."""
    scores = model.head is not None and model.head.name == SCORE
    if head is Head.VOCABULARY or (scores and head is Head.SCORE):
        return model
    if model.head is None and head is Head.NONE:
        return model
    key = (id(model), head)
    if key not in _MADE:
        one = ModuleSpec(name=SCORE, kind=ModuleKind.LINEAR, shapes=((1, model.hidden),))
        changed = replace(
            model,
            head=one if head is Head.SCORE else None,
            tied=False,
            softcap=0.0,
            logit_scale=1.0,
        )
        _MADE[key] = (model, changed)  # keeps `model` alive, so its id stays its own
    return _MADE[key][1]
