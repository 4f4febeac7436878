"""A frontier as a picture and a page: hours against dollars, a colour for the memory, numbers as in the table."""

from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import TYPE_CHECKING, NamedTuple

from planner.report.colours import INK, PAPER, SOFT
from planner.report.picture import HEIGHT, WIDTH, Box, Shape, Words
from planner.report.svg import shapes_svg
from planner.report.time import HOUR, dollars, span
from planner.units import GiB, format_bytes

if TYPE_CHECKING:
    from planner.answers.frontier import Frontier, Point

LEFT, RIGHT, TOP, BOTTOM = 130, 60, 130, 110
DOT = 16
NEAR = (30, 16)
"""Numbers nearer than this would cover each other: the cheaper way's is shown."""
BANDS = (
    (12 * GiB, "#1455CC"),
    (24 * GiB, "#008E4D"),
    (48 * GiB, "#D27C0F"),
    (80 * GiB, "#B60700"),
    (1024 * GiB, "#843B6D"),
)
"""Memory of one GPU up to here, and its colour (report/colours.py tells them apart); numbers stand beside dots."""
STEPS = (1, 2, 5)


class _Axis(NamedTuple):
    """A logarithmic scale between two figures, onto pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return where a value stands."""
        share = log10(value / self.low) / log10(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round figures between both ends."""
        powers = range(floor(log10(self.low)), floor(log10(self.high)) + 1)
        every = [float(f"{step}e{power}") for power in powers for step in STEPS]
        return [each for each in every if self.low <= each <= self.high]


def _axis(values: Sequence[float], start: float, end: float) -> _Axis:
    low, high = min(values), max(values)
    return _Axis(low / 2, high * 2, start, end)


def frontier_picture(found: "Frontier", title: str) -> list[Shape]:
    """Return the picture: every point by its hours and dollars (memory where no price is known)."""
    shapes: list[Shape] = [
        Box(0, 0, WIDTH, HEIGHT, PAPER),
        Words(WIDTH - 48, 34, "vramwise", 20, SOFT, "end"),
        Words(48, 60, title[:70], 30, bold=True),
    ]
    if not found.points:
        return [*shapes, Words(48, 130, "Nothing that was tried fits.", 26)]
    across = _axis([p.spent.hours for p in found.points], LEFT, WIDTH - RIGHT)
    up = _axis([_height(p, found) for p in found.points], HEIGHT - BOTTOM, TOP)
    for tick in across.ticks():
        x = across.at(tick)
        shapes.append(Box(x, TOP, 1, HEIGHT - BOTTOM - TOP, "#E4E8EC"))
        shapes.append(Words(x - 20, HEIGHT - BOTTOM + 30, span(tick * HOUR), 18, SOFT))
    for tick in up.ticks():
        y = up.at(tick)
        shapes.append(Box(LEFT, y, WIDTH - RIGHT - LEFT, 1, "#E4E8EC"))
        shapes.append(Words(LEFT - 12, y + 6, _said(tick, found), 18, SOFT, "end"))
    for number, point in reversed(list(enumerate(found.points, 1))):
        x, y = across.at(point.spent.hours), up.at(_height(point, found))
        shapes.append(
            Box(x - DOT / 2, y - DOT / 2, DOT, DOT, colour_of(point), tip=words_of(point))
        )
        shapes.append(Words(x + DOT / 2 + 4, y + 6, str(number), 18))
    return [*shapes, *_legend(found)]


def _height(point: "Point", found: "Frontier") -> float:
    return (point.spent.usd_middle or 0.0) if found.priced else point.peak_bytes / GiB


def _said(value: float, found: "Frontier") -> str:
    return dollars(value) if found.priced else f"{value:g} GiB"


def colour_of(point: "Point") -> str:
    """Return the colour of a point's memory."""
    return next((colour for most, colour in BANDS if point.peak_bytes <= most), BANDS[-1][1])


def words_of(point: "Point") -> str:
    """Return a point in one line."""
    money = point.spent.usd_middle
    spent = f", {dollars(money)}" if money is not None else ""
    layout = f", {point.layout}" if point.layout else ""
    return (
        f"{point.gpus} x {point.gpu}: {format_bytes(point.peak_bytes)}, {span(point.spent.hours * HOUR)}"
        f"{spent}{layout}, {point.settings}"
    )


def _legend(found: "Frontier") -> list[Shape]:
    what = "dollars" if found.priced else "memory of the fullest GPU"
    shapes: list[Shape] = [
        Words(
            48,
            96,
            f"{what} up, likely hours of {found.of} across; colour: memory of a GPU",
            20,
            SOFT,
        )
    ]
    left = float(LEFT)
    lower = 0
    for most, colour in BANDS:
        name = f"up to {most // GiB} GiB" if most < BANDS[-1][0] else f"over {lower // GiB} GiB"
        shapes.append(Box(left, HEIGHT - 40, DOT, DOT, colour))
        shapes.append(Words(left + DOT + 8, HEIGHT - 26, name, 18, INK))
        left += 190
        lower = most
    return shapes


def frontier_page(found: "Frontier", title: str, text: str) -> str:
    """Return the report as one HTML file: the picture and the table, no network, no script."""
    from planner.report.page import POLICY, STYLE

    picture = shapes_svg(frontier_picture(found, title), f"{title}: {len(found.points)} ways")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<div class="scroll">{picture}</div>\n'
        f"<pre>{escape(text.strip())}</pre>\n</main>\n</body>\n</html>\n"
    )
