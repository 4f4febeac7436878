"""Patches and tokens of an image, as each model's own processor cuts it (transformers 5.19).

Qwen-VL: models/qwen2_vl/image_processing_qwen2_vl.py smart_resize; Gemma 3: one size, pooled to
mm_tokens_per_image; Llama 3.2 Vision: models/mllama/image_processing_mllama.py, padded to the most tiles.
"""

import re
from dataclasses import dataclass
from math import ceil, floor, sqrt

from planner.errors import UnsupportedError, UsageError
from planner.models.vision_spec import Cut, VisionSpec

MAX_RATIO = 200
"""smart_resize: absolute aspect ratio must be smaller."""
MAX_SIDE = 1 << 16


@dataclass(frozen=True, slots=True)
class Cutting:
    """One image or video after its processor."""

    patches: int
    """What the tower runs on; a tile's class token and padding are among them."""
    tokens: int
    """Positions in the text."""
    pixels: int
    """Numbers that the processor hands over."""
    said: str


def parse_size(text: str) -> tuple[int, int]:
    """Return (width, height) of "WxH"; raises UsageError naming the field."""
    found = re.fullmatch(r"\s*(\d{1,6})\s*[xX*]\s*(\d{1,6})\s*", text)
    if not found or not all(0 < int(side) <= MAX_SIDE for side in found.groups()):
        raise UsageError(
            f"image_size: {text[:40]!r} is not a size",
            hint=f"width x height in pixels, such as 1024x768, at most {MAX_SIDE} a side",
        )
    return int(found[1]), int(found[2])


def cut_image(vision: VisionSpec, width: int, height: int) -> Cutting:
    """Return one image's patches and tokens."""
    if vision.cut is Cut.NATIVE:
        wide, high = _resized(vision, width, height, vision.max_pixels)
        # an image is repeated to fill a patch of several frames
        return _grid(vision, wide, high, 1, f"{width} x {height} resized to {wide} x {high}")
    side = vision.size
    patches = (side // vision.patch) ** 2
    if vision.cut is Cut.FIXED:
        pixels = vision.channels * side**2
        return Cutting(
            patches, vision.tokens, pixels, f"{width} x {height} resized to {side} x {side}"
        )
    # a class token a tile, rounded up to 8 positions; all tiles run, used or not
    rows = -(-(patches + 1) // 8) * 8
    return Cutting(
        vision.tiles * rows,
        0 if vision.cross else vision.tokens,
        vision.tiles * vision.channels * side**2,
        f"{vision.tiles} tiles of {side} x {side}, padded where the image needs fewer",
    )


def cut_video(vision: VisionSpec, width: int, height: int, frames: int) -> Cutting:
    """Return one video's patches and tokens."""
    if vision.cut is not Cut.NATIVE or not vision.video_max_pixels:
        raise UnsupportedError("videos: only Qwen-VL's are planned", hint="give images")
    wide, high = _resized(vision, width, height, vision.video_max_pixels)
    steps = -(-frames // vision.frames)
    return _grid(vision, wide, high, steps, f"{frames} frames of {wide} x {high}")


def cut_tokens(vision: VisionSpec, tokens: int) -> Cutting:
    """Return an image of so many tokens."""
    if vision.cut is Cut.NATIVE:
        patches = tokens * vision.merge**2
        numbers = vision.channels * vision.frames * vision.patch**2
        return Cutting(patches, tokens, patches * numbers, f"{tokens} tokens an image")
    whole = cut_image(vision, vision.size, vision.size)
    if tokens != whole.tokens:
        raise UsageError(
            f"image_tokens: {tokens}, but an image of this model has {whole.tokens} tokens",
            hint="leave image_tokens out",
        )
    return whole


def _grid(vision: VisionSpec, wide: int, high: int, steps: int, said: str) -> Cutting:
    patches = steps * (wide // vision.patch) * (high // vision.patch)
    numbers = vision.channels * vision.frames * vision.patch**2
    return Cutting(patches, patches // vision.merge**2, patches * numbers, said)


def _resized(vision: VisionSpec, width: int, height: int, most: int) -> tuple[int, int]:
    """Return smart_resize's width and height."""
    if max(width, height) / min(width, height) > MAX_RATIO:
        raise UsageError(
            f"image_size: {width}x{height}: the processor refuses an aspect ratio above {MAX_RATIO}",
            hint="crop or pad the image",
        )
    unit, least = vision.patch * vision.merge, vision.min_pixels
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    if high * wide > most:
        shrink = sqrt(height * width / most)
        high = max(unit, floor(height / shrink / unit) * unit)
        wide = max(unit, floor(width / shrink / unit) * unit)
    elif high * wide < least:
        grow = sqrt(least / (height * width))
        high, wide = ceil(height * grow / unit) * unit, ceil(width * grow / unit) * unit
    return wide, high
