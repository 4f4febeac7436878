"""CUDA graphs of a vLLM in the trainer's process: with them unless only a run without them fits."""

from collections.abc import Callable

from planner.answers.width import Planned, changed, generates_inside
from planner.errors import VramwiseError
from planner.run.recipe import Recipe
from trainer.say import Say, silent


def with_graphs(
    recipe: Recipe, solve: Callable[[Recipe], Planned], *, say: Say = silent
) -> Planned:
    """Return what `solve` makes of the recipe: with CUDA graphs, without them where only that fits.

    Raises what `solve` raises where neither does, or where the recipe has decided.
    """
    try:
        return solve(recipe)
    except VramwiseError as error:
        if not generates_inside(recipe) or recipe.engine.cuda_graphs is not None:
            raise
        try:
            found = solve(changed(recipe, cuda_graphs=False))
        except VramwiseError:
            raise error from None
        say(f"vLLM runs without CUDA graphs, slower: with them {error.message}")
        return found
