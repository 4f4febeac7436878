"""What of a run file's train section moves bytes, as recipe fields: a plan of the file counts it."""

from typing import Any

from planner.models.spec import MlpKind, ModelSpec
from planner.run.recipe import Attention, Recipe, RunFile, Task
from planner.run.switches import Switches


def with_train(run: RunFile) -> RunFile:
    """Return the run whose recipe has what its train section says about memory.

    `padding_free` without flash attention lays samples end to end under packing's mask
    (trainer.preflight.choose_layout).
    """
    recipe, train = run.recipe, run.train
    if recipe.task is not Task.SFT or not train:
        return run
    more: dict[str, Any] = {}
    flash = recipe.attention is Attention.FLASH
    if train.get("padding_free") is True and recipe.packing is None and not flash:
        more["packing"] = True
    if train.get("neftune_alpha"):
        more["neftune"] = True
    if train.get("router_aux_loss_coef") is not None:
        more["router_loss"] = bool(train["router_aux_loss_coef"])
    return run.model_copy(update={"recipe": recipe.model_copy(update=more)}) if more else run


def step_prompts(recipe: Recipe, stated: int | None, gpus: int = 1) -> int:
    """Return the prompts of a step (SFT: samples, or packed rows), over all GPUs.

    `stated`: by train.prompts_per_step; else the micro-batches' are meant.
    """
    if stated is not None:
        return stated
    rows = (recipe.micro_batch_size or 1) * recipe.gradient_accumulation
    own = rows if recipe.task is Task.SFT else max(1, rows // (recipe.num_generations or 8))
    return own * gpus


def beside(model: ModelSpec, recipe: Recipe, switches: Switches) -> dict[str, Any]:
    """Return what a resolved run holds beside its layers, by field."""
    experts = any(layer.mlp.kind is MlpKind.MOE for layer in model.layers)
    trained = recipe.task is Task.SFT
    balanced = model.router_loss if recipe.router_loss is None else recipe.router_loss
    return {
        "neftune": trained and recipe.neftune,
        # other frameworks' losses are made of other tensors
        "router_loss": trained and experts and balanced and switches.trace_step == "own",
    }
