"""Shapes as SVG: a plan's picture, and the badge that people put into a README."""

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from planner.report.colours import VERDICT_COLOURS
from planner.report.picture import (
    HEIGHT,
    METHODS_SAID,
    WIDTH,
    Box,
    Rule,
    Shape,
    Words,
    picture,
    sentence,
    title,
)

if TYPE_CHECKING:
    from planner.plan import Plan

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
CHAR = 7
"""Pixels of a letter on a badge; `textLength` makes it exactly so with any font."""
GREY = "#555555"


def picture_svg(plan: "Plan") -> str:
    """Return the card of a plan as SVG; it scales with the page."""
    return shapes_svg(picture(plan), f"{title(plan)}. {sentence(plan)}")


def shapes_svg(shapes: Iterable[Shape], said: str) -> str:
    """Return shapes as SVG; `said` is what a screen reader says."""
    body = "".join(_shape(shape) for shape in shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(said)}" font-family="{FONT}">{body}</svg>'
    )


def _shape(shape: Shape) -> str:
    if isinstance(shape, Box):
        tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
        return (
            f'<rect x="{shape.left:.1f}" y="{shape.top:.1f}" width="{shape.width:.1f}" '
            f'height="{shape.height:.1f}" fill="{shape.colour}">{tip}</rect>'
        )
    if isinstance(shape, Rule):
        return (
            f'<line x1="{shape.x:.1f}" x2="{shape.x:.1f}" y1="{shape.top:.1f}" y2="{shape.bottom:.1f}" '
            f'stroke="{shape.colour}" stroke-width="3" stroke-dasharray="9 6"/>'
        )
    return _words(shape)


def _words(words: Words) -> str:
    weight = ' font-weight="700"' if words.bold else ""
    end = ' text-anchor="end"' if words.anchor == "end" else ""
    return (
        f'<text x="{words.x:.1f}" y="{words.y:.1f}" font-size="{words.size}" '
        f'fill="{words.colour}"{weight}{end}>{escape(words.text)}</text>'
    )


def badge_label(plan: "Plan") -> str:
    """Return what a badge is about: "QLoRA, 8K context", "GRPO QLoRA, 8K context"."""
    r = plan.resolved
    if not r.trains:
        how = "serve"
    else:
        task = "" if r.task.value == "sft" else f"{r.task.value.upper()} "
        how = task + {**METHODS_SAID, "full": "full"}[r.method.value]
    return f"{how}, {tokens_said(r.seq_tokens)} context"


def tokens_said(tokens: int) -> str:
    """Return 8K for 8,192, and 2,000 as it is."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


def badge_message(plan: "Plan", smallest_gb: float | None) -> str:
    """Return what it says: "fits 12 GB", by the smallest card that takes the run."""
    count = f"{plan.machine.num_gpus} x " if plan.machine.num_gpus > 1 else ""
    if smallest_gb is not None:
        return f"fits {count}{smallest_gb:g} GB"
    return "fits no card yet" if plan.verdict != "fits" else f"fits {plan.machine.label}"


def badge_svg(label: str, message: str, verdict: str) -> str:
    """Return a flat badge of two parts."""
    left, right = (CHAR * len(text) + 14 for text in (label, message))
    said = escape(f"{label}: {message}")
    parts = (
        (0, left, GREY, label),
        (left, right, VERDICT_COLOURS[verdict], message),
    )
    body = "".join(
        f'<rect x="{at}" width="{wide}" height="20" fill="{colour}"/>'
        f'<text x="{at + wide / 2:g}" y="14" textLength="{wide - 14}">{escape(text)}</text>'
        for at, wide, colour, text in parts
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{said}"><title>{said}</title><clipPath id="r"><rect width="{left + right}" '
        f'height="20" rx="3"/></clipPath><g clip-path="url(#r)" fill="#fff" text-anchor="middle" '
        f'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{body}</g></svg>\n'
    )
