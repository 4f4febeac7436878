"""Patches and tokens of an image, as each model's own processor cuts it (transformers 5.19).

Qwen-VL: models/qwen2_vl/image_processing_qwen2_vl.py smart_resize; Gemma 3: one size, pooled to
mm_tokens_per_image; LLaVA 1.5: one size; Llama 3.2 Vision: models/mllama/image_processing_mllama.py, padded
to the most tiles; the others by planner/models/tiles.py.
"""

import re
from dataclasses import dataclass
from math import ceil, floor, sqrt

from planner.errors import UnsupportedError, UsageError
from planner.models.tiles import anyres_tokens, best_resolution, canvas, fitted, split
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
    sequences: int = 1
    """Parts that attend to themselves alone: tiles, windows of sound."""
    features: int = 0
    """Rows that the projector makes; not all become tokens where padding is taken off."""


def parse_size(text: str) -> tuple[int, int]:
    """Return (width, height) of "WxH"; raises UsageError naming the field."""
    found = re.fullmatch(r"\s*(\d{1,6})\s*[xX*]\s*(\d{1,6})\s*", text)
    if not found or not all(0 < int(side) <= MAX_SIDE for side in found.groups()):
        raise UsageError(
            f"image_size: {text[:40]!r} is not a size",
            hint=f"width x height in pixels, such as 1024x768, at most {MAX_SIDE} a side",
        )
    return int(found[1]), int(found[2])


def cut_image(vision: VisionSpec, width: int, height: int, images: int = 1) -> Cutting:
    """Return one image's patches and tokens; `images` of one sample, which OneVision cuts otherwise."""
    if vision.cut is Cut.NATIVE:
        wide, high = _resized(vision, width, height, vision.max_pixels)
        # an image is repeated to fill a patch of several frames
        return _grid(vision, wide, high, 1, f"{width} x {height} resized to {wide} x {high}")
    side = vision.size
    if vision.cut is Cut.FIXED:
        return _tiled(vision, 1, vision.tokens, f"{width} x {height} resized to {side} x {side}")
    if vision.cut is Cut.ANYRES:
        if vision.tiles and images > 1:  # OneVision
            said = f"{width} x {height} resized to {side} x {side}"
            return _tiled(vision, 1, vision.tokens + 1, said)
        wide, high = best_resolution(vision, width, height)
        tokens = anyres_tokens(vision, width, height, vision.tiles)
        tiles = (wide // side) * (high // side) + 1
        return _tiled(vision, tiles, tokens, _tiles_said(width, height, tiles, side))
    if vision.cut is Cut.CROPS:
        columns, rows = canvas(vision, width, height)
        tiles = columns * rows + (columns * rows > 1)
        # a token before, one after
        return _tiled(
            vision, tiles, tiles * vision.tokens + 2, _tiles_said(width, height, tiles, side)
        )
    if vision.cut is Cut.EDGE:
        wide, high = fitted(vision, width, height)
        if not wide * high:
            raise UsageError(
                f"image_size: {width}x{height}: at a longest edge of {vision.edge} nothing is left of it",
                hint="crop or pad the image",
            )
        rows, columns = (edge // (vision.patch * vision.merge) for edge in (high, wide))
        said = f"{width} x {height} resized to {wide} x {high}"
        return _cutting(vision, rows * columns * vision.merge**2, rows * (columns + 1), said)
    if vision.cut is Cut.SPLIT:
        columns, rows = split(vision, width, height)
        tiles = columns * rows + 1
        # a tile: two marks; a row: a line's end; the whole image: three marks
        tokens = rows * (columns * (vision.tokens + 2) + 1) + vision.tokens + 3
        return _tiled(vision, tiles, tokens, _tiles_said(width, height, tiles, side))
    # a class token a tile, rounded up to 8 positions; all tiles run, used or not, as one sequence
    patches = (side // vision.patch) ** 2
    positions = -(-(patches + 1) // 8) * 8
    return Cutting(
        vision.tiles * positions,
        0 if vision.cross else vision.tokens,
        vision.tiles * vision.channels * side**2,
        f"{vision.tiles} tiles of {side} x {side}, padded where the image needs fewer",
        features=vision.tiles * (patches + 1),
    )


def cut_video(vision: VisionSpec, width: int, height: int, frames: int) -> Cutting:
    """Return one video's patches and tokens."""
    if vision.cut is Cut.NATIVE and vision.video_max_pixels:
        wide, high = _resized(vision, width, height, vision.video_max_pixels)
        steps = -(-frames // vision.frames)
        return _grid(vision, wide, high, steps, f"{frames} frames of {wide} x {high}")
    if vision.video_tokens:
        side = vision.size
        # OneVision ends a video with one token of its own
        tokens = frames * vision.video_tokens + (vision.cut is Cut.ANYRES)
        return _tiled(vision, frames, tokens, f"{frames} frames of {side} x {side}")
    raise UnsupportedError(
        "videos: not planned for this model",
        hint="Qwen-VL, LLaVA-OneVision, InternVL; or give images",
    )


def _tiles_said(width: int, height: int, tiles: int, side: int) -> str:
    return f"{width} x {height} in {tiles} tiles of {side} x {side}"


def _tiled(vision: VisionSpec, tiles: int, tokens: int, said: str) -> Cutting:
    patches = (vision.size // vision.patch) ** 2
    return Cutting(
        tiles * (patches + vision.class_token),
        tokens,
        tiles * vision.channels * vision.size**2,
        said,
        sequences=tiles,
        features=tiles * vision.tokens,
    )


def _cutting(vision: VisionSpec, patches: int, tokens: int, said: str) -> Cutting:
    numbers = vision.channels * vision.frames * vision.patch**2
    return Cutting(patches, tokens, patches * numbers, said, features=patches // vision.merge**2)


def cut_tokens(vision: VisionSpec, tokens: int) -> Cutting:
    """Return an image of so many tokens."""
    if vision.cut is Cut.NATIVE:
        return _cutting(vision, tokens * vision.merge**2, tokens, f"{tokens} tokens an image")
    if vision.cut in (Cut.FIXED, Cut.TILES):
        whole = cut_image(vision, vision.size, vision.size)
        if tokens == whole.tokens:
            return whole
        said = f"an image of this model has {whole.tokens} tokens"
    else:
        said = "this model's images have as many as their size makes"
    raise UsageError(
        f"image_tokens: {tokens}, but {said}", hint="leave image_tokens out; give image_size"
    )


def _grid(vision: VisionSpec, wide: int, high: int, steps: int, said: str) -> Cutting:
    patches = steps * (wide // vision.patch) * (high // vision.patch)
    return _cutting(vision, patches, patches // vision.merge**2, said)


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
