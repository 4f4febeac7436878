"""Shapes as PNG, by Pillow: the picture of a link, and a result to paste where no SVG is shown.

Pillow comes with the app's own packages and has a font in it; a browser for it would be 150 MB more.
"""

from collections.abc import Iterable
from io import BytesIO
from typing import TYPE_CHECKING

from planner.errors import MissingExtraError
from planner.report.picture import HEIGHT, WIDTH, Box, Rule, Shape, picture

if TYPE_CHECKING:
    from planner.plan import Plan

DASH, GAP = 9, 6
COLOURS = 128


def picture_png(plan: "Plan") -> bytes:
    """Return the card of a plan as PNG."""
    return shapes_png(picture(plan))


def shapes_png(shapes: Iterable[Shape]) -> bytes:
    """Return shapes as PNG."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ModuleNotFoundError as error:
        raise MissingExtraError("a PNG", "app") from error
    image = Image.new("RGB", (WIDTH, HEIGHT))
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        if isinstance(shape, Box):
            if round(shape.width) >= 1:
                end = (shape.left + shape.width - 1, shape.top + shape.height - 1)
                draw.rectangle(
                    (shape.left, shape.top, max(end[0], shape.left), end[1]), shape.colour
                )
        elif isinstance(shape, Rule):
            for at in range(int(shape.top), int(shape.bottom), DASH + GAP):
                draw.line((shape.x, at, shape.x, min(at + DASH, shape.bottom)), shape.colour, 3)
        else:
            font = ImageFont.load_default(shape.size)
            anchor = "rs" if shape.anchor == "end" else "ls"
            heavy = 1 if shape.bold and shape.size >= 30 else 0
            where = (shape.x, shape.y)
            draw.text(where, shape.text, shape.colour, font, anchor, stroke_width=heavy)
    kept = BytesIO()
    image.quantize(COLOURS).save(kept, "PNG", optimize=True)
    return kept.getvalue()
