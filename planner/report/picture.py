"""A plan as one picture of shapes: what svg.py and png.py draw, so that both show the same."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from planner.report.colours import (
    INK,
    LIMIT_COLOUR,
    PAPER,
    SOFT,
    TERM_COLOURS,
    UNKNOWN_COLOUR,
    VERDICT_COLOURS,
)
from planner.terms.term import TERM_NAMES
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.phases import Phase
    from planner.plan import Plan

WIDTH, HEIGHT = 1200, 630
"""What Slack, Discord, X and Facebook show uncropped."""
MARGIN, TOP, BOTTOM = 48, 190, 96
NAMES, SIZES = 150, 170
"""Room left of the bars for a phase's name, and right of them for its size."""
MOST_PHASES = 9
FULL = 92
"""Percent of the bars' room that the longest takes."""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle."""

    left: float
    top: float
    width: float
    height: float
    colour: str
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: int
    colour: str = INK
    anchor: Literal["start", "end"] = "start"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A dashed line from top to bottom."""

    x: float
    top: float
    bottom: float
    colour: str


Shape = Box | Words | Rule


def title(plan: "Plan") -> str:
    """Return a run in few words: "Llama-3.1-8B, GRPO with QLoRA, 8,192 tokens"."""
    r = plan.resolved
    how = TASKS_SAID.get(r.task.value, r.task.value.upper())
    if r.trains:
        how += f" with {METHODS_SAID[r.method.value]}"
    return f"{plan.model}, {how}, {r.seq_tokens:,} tokens"


METHODS_SAID = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA"}
TASKS_SAID = {
    "serve": "serving",
    "reward": "reward model",
    "distill": "distillation",
    "embed": "embeddings",
    "rerank": "reranker",
}


def sentence(plan: "Plan") -> str:
    """Return the answer in one sentence: how much of what, on which machine."""
    machine = plan.machine
    name = machine.gpu.name if machine.gpu else f"a GPU of {format_bytes(machine.vram_bytes)}"
    count = f"{machine.num_gpus} x " if machine.num_gpus > 1 else ""
    return (
        f"{plan.verdict.capitalize()}: {format_bytes(plan.peak_bytes)} of "
        f"{format_bytes(plan.capacity_bytes)} on {count}{name}"
    )


def picture(plan: "Plan") -> list[Shape]:
    """Return the card of a plan: its verdict, a stacked bar for every phase, the capacity."""
    said = plan.verdict.upper()
    chip = 40 + 21 * len(said)
    shapes: list[Shape] = [
        Box(0, 0, WIDTH, HEIGHT, PAPER),
        Words(WIDTH - MARGIN, 34, "vramwise", 20, SOFT, "end"),
        Words(MARGIN, 72, _cut(title(plan), 52), 40, bold=True),
        Box(MARGIN, 98, chip, 54, VERDICT_COLOURS[plan.verdict]),
        Words(MARGIN + 20, 136, said, 30, PAPER, bold=True),
        Words(MARGIN + chip + 24, 136, _cut(sentence(plan).partition(": ")[2], 60), 28),
    ]
    return [*shapes, *_bars(plan), *_legend(plan)]


def shown_phases(plan: "Plan") -> list["Phase"]:
    """Return the phases that have room: all, or the largest in their order."""
    largest = sorted(plan.phases, key=lambda phase: -phase.total_bytes)[:MOST_PHASES]
    return [phase for phase in plan.phases if phase in largest]


def _bars(plan: "Plan") -> list[Shape]:
    phases = shown_phases(plan)
    row = min(56, (HEIGHT - TOP - BOTTOM) / len(phases))
    left, room = MARGIN + NAMES, WIDTH - 2 * MARGIN - NAMES - SIZES
    scale = room * FULL / 100 / max(plan.peak_bytes, plan.capacity_bytes, 1)
    shapes: list[Shape] = []
    for number, phase in enumerate(phases):
        top = TOP + number * row
        bold = phase.name == plan.peak_phase
        middle = top + row / 2 + 8
        shapes.append(Words(MARGIN, middle, phase.name, 22, bold=bold))
        at = float(left)
        for term in sorted(phase.terms, key=lambda term: _order(term.name)):
            wide = term.bytes * scale
            tip = f"{phase.name}, {term.name}: {format_bytes(term.bytes)}"
            shapes.append(Box(at, top + 5, wide, row - 10, colour(term.name), tip))
            at += wide
        size = format_bytes(phase.total_bytes)
        shapes.append(Words(WIDTH - MARGIN, middle, size, 22, anchor="end", bold=bold))
    end = left + plan.capacity_bytes * scale
    bottom = TOP + len(phases) * row
    limit = f"capacity {format_bytes(plan.capacity_bytes)}"
    shapes.append(Rule(end, TOP - 6, bottom + 4, LIMIT_COLOUR))
    shapes.append(Words(end - 6, TOP - 10, limit, 18, LIMIT_COLOUR, "end"))
    return shapes


def _legend(plan: "Plan") -> list[Shape]:
    names = {term.name for phase in plan.phases for term in phase.terms}
    at, shapes = float(MARGIN), list[Shape]()
    for name in sorted(names, key=_order):
        shapes.append(Box(at, HEIGHT - 52, 18, 18, colour(name)))
        shapes.append(Words(at + 25, HEIGHT - 36, name, 18, SOFT))
        at += 49 + 10 * len(name)
    return shapes


def colour(name: str) -> str:
    """Return a term's colour."""
    return TERM_COLOURS.get(name, UNKNOWN_COLOUR)


def _order(name: str) -> int:
    return TERM_NAMES.index(name) if name in TERM_NAMES else len(TERM_NAMES)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
