"""How many prompts or samples one step of a run takes, over all ranks."""

from planner.errors import UsageError
from planner.run.recipe import Recipe
from planner.run.train_bytes import step_prompts as prompts_of
from trainer.config import TrainSection
from trainer.say import Say


def step_prompts(recipe: Recipe, train: TrainSection, ranks: int = 1) -> int:
    """Return the prompts of a step (SFT: samples, or packed rows) that the run file asks for, over all ranks."""
    return prompts_of(recipe, train.prompts_per_step, ranks)


def within_epoch(
    recipe: Recipe, train: TrainSection, per_epoch: int | None, *, say: Say, ranks: int = 1
) -> int:
    """Return the prompts (SFT: samples) of a step: never more than the data set has.

    Raises UsageError where the run file itself asks for more.
    """
    count = step_prompts(recipe, train, ranks)
    if per_epoch is None or count <= per_epoch:
        return count
    if train.prompts_per_step is not None:
        raise UsageError(
            f"train.prompts_per_step: {count} is more than the {per_epoch} of the data set: one step "
            f"would go through it {count / per_epoch:.3g} times",
            hint=f"at most {per_epoch}; more data, or num_generations, for larger steps",
        )
    say(f"a step takes all {per_epoch} of the data set: the recipe's sizes would repeat them")
    return per_epoch
