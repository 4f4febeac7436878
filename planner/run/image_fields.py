"""A recipe's images: checked against the model, in numbers."""

from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.models.images import Cutting, cut_image, cut_tokens, cut_video, parse_size
from planner.models.spec import ModelSpec
from planner.run.recipe import Recipe, Task

DEFAULT_IMAGE = (1024, 1024)
"""The size where none is given, and the one that a note about images left out counts."""


def cuttings(model: ModelSpec, fields: dict[str, Any]) -> tuple[tuple[Cutting, int], ...]:
    """Return what one sample holds: cuts, and how many there are of each."""
    vision, found = model.vision, []
    assert vision is not None
    width, height = fields["image_size"] or DEFAULT_IMAGE
    if fields["images"]:
        tokens = fields["image_tokens"]
        one = cut_tokens(vision, tokens) if tokens else cut_image(vision, width, height)
        found.append((one, fields["images"]))
    if fields["videos"]:
        found.append((cut_video(vision, width, height, fields["video_frames"]), fields["videos"]))
    return tuple(found)


def image_notes(model: ModelSpec, fields: dict[str, Any], length: int) -> list[str]:
    """Return what the images take of a sample; raises UsageError where they leave no room."""
    if not (fields["images"] or fields["videos"]):
        return []
    cuts = cuttings(model, fields)
    tokens = sum(one.tokens * count for one, count in cuts)
    if tokens >= length:
        raise UsageError(
            f"context: the images alone are {tokens:,} tokens, the sample has {length:,}",
            hint="a longer context, fewer images, or a smaller image_size",
        )
    said = "; ".join(f"{count} x {one.said}: {one.tokens:,} tokens each" for one, count in cuts)
    return [f"{tokens:,} of the sample's {length:,} tokens are images ({said})"]


def image_fields(model: ModelSpec, recipe: Recipe) -> dict[str, Any]:
    """Return the image fields of a Resolved; raises where the model or the task has no such thing."""
    given = recipe.images or recipe.videos
    if recipe.videos and not recipe.video_frames:
        raise UsageError(
            "video_frames: a video without frames",
            hint="how many frames of one video reach the model, such as 16",
        )
    if recipe.image_size and recipe.image_tokens:
        raise UsageError("image_tokens: give a size or tokens, not both")
    for field in ("image_size", "image_tokens"):
        if getattr(recipe, field) and not given:
            raise UsageError(f"{field}: there are no images", hint="--images 1")
    if recipe.video_frames and not recipe.videos:
        raise UsageError("video_frames: there are no videos", hint="--videos 1")
    if given:
        name = model.name or model.model_type
        if not model.multimodal:
            raise UsageError(f"images: {name} takes none", hint="leave images and videos out")
        if model.vision is None:
            raise UnsupportedError(
                f"images: the tower of {model.model_type} is not planned yet",
                hint="planned are Qwen-VL (2, 2.5, 3, 3.5), Gemma 3 and Llama 3.2 Vision",
            )
        if recipe.task is Task.SERVE:
            raise UnsupportedError(
                "images: vLLM's encoder profile and cache are not planned",
                hint="leave images out; the plan counts the text and all weights",
            )
    return {
        "images": recipe.images,
        "image_size": parse_size(recipe.image_size) if recipe.image_size else None,
        "image_tokens": recipe.image_tokens or 0,
        "videos": recipe.videos,
        "video_frames": recipe.video_frames or 0,
    }
