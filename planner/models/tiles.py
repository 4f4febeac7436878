"""Tiles of an image: LLaVA-NeXT and OneVision, InternVL, Idefics3 and SmolVLM, Pixtral (transformers 5.19).

Each function follows one processor: models/llava_next/processing_llava_next.py, models/llava_onevision/
processing_llava_onevision.py, models/got_ocr2/image_processing_got_ocr2.py (InternVL's),
models/idefics3/image_processing_idefics3.py, models/pixtral/image_processing_pixtral.py.
"""

from math import ceil, floor, sqrt

from planner.models.vision_spec import VisionSpec

LARGEST_EDGE = 4096
"""Idefics3's MAX_IMAGE_SIZE."""


def best_resolution(vision: VisionSpec, width: int, height: int) -> tuple[int, int]:
    """Return (width, height) of the pinpoint that loses least of the image, then wastes least."""

    def fit(pinpoint: tuple[int, int]) -> tuple[int, int]:
        high, wide = pinpoint
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - wide * high

    high, wide = max(vision.pinpoints, key=fit)
    return wide, high


def anyres_tokens(vision: VisionSpec, width: int, height: int, most: int) -> int:
    """Return the tokens of the tiles without their padding, a line's end each, and of the whole image.

    `most`: tiles whose tokens are kept; more are scaled down (OneVision's anyres_max_9). 0: all.
    """
    wide, high = best_resolution(vision, width, height)
    side = round(sqrt(vision.tokens))
    rows, columns = side * (high // vision.size), side * (wide // vision.size)
    if width / height > columns / rows:
        used = int(round(height * (columns / width), 7))
        rows -= (rows - used) // 2 * 2
    else:
        used = int(round(width * (rows / height), 7))
        columns -= (columns - used) // 2 * 2
    if most and (ratio := sqrt(rows * columns / (most * side**2))) > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return rows * columns + rows + vision.tokens


def canvas(vision: VisionSpec, width: int, height: int) -> tuple[int, int]:
    """Return columns and rows of InternVL's tiles: the nearest aspect ratio; of equal ones the larger,
    unless it is more than twice the image."""
    grids = [
        (columns, rows)
        for columns in range(1, vision.tiles + 1)
        for rows in range(1, vision.tiles // columns + 1)
    ]
    best, nearest = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        off = abs(width / height - columns / rows)
        if off < nearest or (
            off == nearest and width * height > 0.5 * vision.size**2 * columns * rows
        ):
            best, nearest = (columns, rows), off
    return best


def split(vision: VisionSpec, width: int, height: int) -> tuple[int, int]:
    """Return columns and rows of Idefics3's tiles; (0, 0) = the image is one."""
    wide, high = _longest(width, height, vision.edge, even=True)
    if max(wide, high) > LARGEST_EDGE:
        wide, high = _longest(wide, high, LARGEST_EDGE, even=False)
    columns, rows = _tiles(wide, high, vision.size)
    return (columns, rows) if max(columns, rows) > 1 else (0, 0)


def fitted(vision: VisionSpec, width: int, height: int) -> tuple[int, int]:
    """Return Pixtral's width and height: no edge above the longest, rounded up to whole merged patches.

    0 for the shorter edge of an image that is longer than that many times its width.
    """
    ratio, unit = max(width, height) / vision.edge, vision.patch * vision.merge
    if ratio > 1:
        width, height = floor(width / ratio), floor(height / ratio)
    return -(-width // unit) * unit, -(-height // unit) * unit


def _longest(width: int, height: int, edge: int, *, even: bool) -> tuple[int, int]:
    """Return the size scaled to a longest edge; the other one is made even."""
    ratio = width / height
    other = int(edge / ratio) if width >= height else int(edge * ratio)
    other = max(1, other + (other % 2 if even else 0))
    return (edge, other) if width >= height else (other, edge)


def _tiles(wide: int, high: int, side: int) -> tuple[int, int]:
    """Return columns and rows after the longer side was rounded up to whole tiles, the ratio kept."""
    ratio = wide / high
    if wide >= high:
        wide = ceil(wide / side) * side
        high = int(wide / ratio)
    else:
        high = ceil(high / side) * side
        wide = int(high * ratio)
    return max(1, ceil(wide / side)), max(1, ceil(high / side))
