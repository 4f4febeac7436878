"""What of a run file's train section moves bytes, as recipe fields: a plan of the file counts it."""

from planner.run.recipe import Attention, RunFile, Task


def with_train(run: RunFile) -> RunFile:
    """Return the run whose recipe has what its train section says about memory.

    `padding_free` without flash attention lays samples end to end under packing's mask
    (trainer.preflight.choose_layout).
    """
    recipe = run.recipe
    free = run.train.get("padding_free") is True and recipe.task is Task.SFT
    if not free or recipe.packing is not None or recipe.attention is Attention.FLASH:
        return run
    return run.model_copy(update={"recipe": recipe.model_copy(update={"packing": True})})
