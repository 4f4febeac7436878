"""A tool's limit on the pixels of an image -> one image of that size in every sample."""

import math
from typing import Any

from planner.importers.names import resolve_model
from planner.importers.settings import Settings, as_int
from planner.models.images import cut_image
from planner.run.recipe import Task

STEP = 28
"""Sides are rounded down to the coarsest grid of the towers met (Qwen2-VL's patch of 14, merged by 2)."""


def image_limit(
    settings: Settings, recipe: dict[str, Any], model: str, *keys: str, word: Any = None
) -> None:
    """Plan one square image of the most pixels that the file allows, cut to what the length holds.

    Says nothing and plans none where no limit is stated: the data may be text alone.
    """
    pixels = settings.count(*keys, to="image_size", off=True) if keys else as_int(word)
    spec = resolve_model(model) if model and pixels else None
    if not pixels or spec is None or spec.vision is None or recipe.get("task") is Task.SERVE:
        return
    tower, length = spec.vision, recipe.get("context") or 2048
    side = max(STEP, math.isqrt(pixels) // STEP * STEP)
    whole = cut_image(tower, side, side)
    while cut_image(tower, side, side).tokens > 0.9 * length and side > STEP:
        side = max(STEP, int(side * 0.9) // STEP * STEP)
    recipe["images"], recipe["image_size"] = 1, f"{side}x{side}"
    said = f"{keys[0] if keys else 'max_pixels'} {pixels:,}: an image of so many pixels is {whole.patches:,} patches of the vision tower"
    if cut_image(tower, side, side).tokens < whole.tokens:
        said += f", {whole.tokens:,} tokens, more than {length:,} hold; {side} x {side} is planned, a lower bound"
    settings.effect(f"{said}; one image a sample is assumed")
