"""A recipe's images, videos and sounds: checked against the model, in numbers."""

from typing import Any, Protocol

from planner.errors import UnsupportedError, UsageError
from planner.models.images import Cutting, cut_image, cut_tokens, cut_video, parse_size
from planner.models.sounds import cut_sound
from planner.models.spec import ModelSpec
from planner.run.recipe import Recipe, Task

DEFAULT_IMAGE = (1024, 1024)
"""The size where none is given, and the one that a note about images left out counts."""
DEFAULT_SECONDS = 30.0
"""The same of a sound."""


class Seen(Protocol):
    """What of a Resolved says what one sample holds."""

    @property
    def images(self) -> int: ...
    @property
    def image_size(self) -> tuple[int, int] | None: ...
    @property
    def image_tokens(self) -> int: ...
    @property
    def videos(self) -> int: ...
    @property
    def video_frames(self) -> int: ...
    @property
    def audio(self) -> int: ...
    @property
    def audio_seconds(self) -> float: ...


Cuts = tuple[tuple[Cutting, int], ...]


def cuttings(model: ModelSpec, r: Seen) -> Cuts:
    """Return the images and videos of one sample: cuts, and how many there are of each."""
    vision, found = model.vision, []
    if vision is None:
        return ()
    width, height = r.image_size or DEFAULT_IMAGE
    if r.images:
        if r.image_tokens:
            one = cut_tokens(vision, r.image_tokens)
        else:
            one = cut_image(vision, width, height, r.images)
        found.append((one, r.images))
    if r.videos:
        found.append((cut_video(vision, width, height, r.video_frames), r.videos))
    return tuple(found)


def sounds(model: ModelSpec, r: Seen) -> Cuts:
    """Return the sounds of one sample."""
    if model.audio is None or not r.audio:
        return ()
    return ((cut_sound(model.audio, r.audio_seconds), r.audio),)


class _Fields:
    """The fields before there is a Resolved."""

    def __init__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)


def image_notes(model: ModelSpec, fields: dict[str, Any], length: int) -> list[str]:
    """Return what the images take of a sample; raises UsageError where they leave no room."""
    seen: Any = _Fields(fields)
    notes = []
    for kind, cuts in (("images", cuttings(model, seen)), ("sounds", sounds(model, seen))):
        tokens = sum(one.tokens * count for one, count in cuts)
        if tokens >= length:
            raise UsageError(
                f"context: the {kind} alone are {tokens:,} tokens, the sample has {length:,}",
                hint=f"a longer context, fewer {kind}, or smaller ones",
            )
        if cuts:
            said = "; ".join(
                f"{count} x {one.said}: {one.tokens:,} tokens each" for one, count in cuts
            )
            notes.append(f"{tokens:,} of the sample's {length:,} tokens are {kind} ({said})")
    return notes


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
    if recipe.audio_seconds is not None and not recipe.audio:
        raise UsageError("audio_seconds: there are no sounds", hint="--audio 1")
    if given:
        _check(model, recipe, "images", model.vision is not None)
    if recipe.audio:
        _check(model, recipe, "audio", model.audio is not None)
    return {
        "images": recipe.images,
        "image_size": parse_size(recipe.image_size) if recipe.image_size else None,
        "image_tokens": recipe.image_tokens or 0,
        "videos": recipe.videos,
        "video_frames": recipe.video_frames or 0,
        "audio": recipe.audio,
        "audio_seconds": (recipe.audio_seconds or DEFAULT_SECONDS) if recipe.audio else 0.0,
    }


def sees_images_whole(model: ModelSpec, recipe: Recipe) -> bool:
    """Say whether the text's attention gets masks because of images.

    models/gemma3/modeling_gemma3.py create_causal_mask_mapping: tokens of one image see each other, which
    no kernel's causal flag says.
    """
    return recipe.images > 0 and model.vision is not None and model.vision.masks_text


PLANNED = {
    "images": "Qwen-VL (2, 2.5, 3, 3.5), Gemma 3, Llama 3.2 Vision, LLaVA (1.5, NeXT, OneVision), InternVL, "
    "Idefics3, SmolVLM and Mistral 3",
    "audio": "Qwen2-Audio and Voxtral",
}


def _check(model: ModelSpec, recipe: Recipe, kind: str, known: bool) -> None:
    """Raise where the model takes no such thing, or its tower is not planned."""
    name = model.name or model.model_type
    other = model.vision if kind == "audio" else model.audio
    if not model.multimodal or (not known and other is not None):
        raise UsageError(f"{kind}: {name} takes none", hint=f"leave {kind} out")
    if not known:
        raise UnsupportedError(
            f"{kind}: the tower of {model.model_type} is not planned yet",
            hint=f"planned are {PLANNED[kind]}",
        )
    if recipe.task is Task.SERVE:
        raise UnsupportedError(
            f"{kind}: vLLM's encoder profile and cache are not planned",
            hint=f"leave {kind} out; the plan counts the text and all weights",
        )
