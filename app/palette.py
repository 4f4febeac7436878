"""The app's colours beside those of terms (planner/report/colours.py): lines, maps, light and dark."""

from planner.report.colours import LIMIT_COLOUR, TERM_COLOURS, UNKNOWN_COLOUR

__all__ = [
    "DARK",
    "DASHES",
    "LIGHT",
    "LIMIT_COLOUR",
    "RANGE_COLOUR",
    "SEQUENTIAL",
    "SERIES",
    "TERM_COLOURS",
    "UNKNOWN_COLOUR",
    "term_words",
]
RANGE_COLOUR = "#7C8794"
"""The likely range under the peak's bar; readable on light and on dark."""
SERIES = (
    TERM_COLOURS["weights"],
    TERM_COLOURS["optimizer"],
    TERM_COLOURS["activations"],
    TERM_COLOURS["engine"],
    TERM_COLOURS["adapters"],
    TERM_COLOURS["logits"],
)
"""Lines that are no terms (frameworks); told apart by their dashes too."""
DASHES = ((1, 0), (6, 3), (2, 2), (10, 3, 2, 3), (14, 4), (4, 4, 1, 4))
FRAMEWORKS = (
    "vramwise", "trl", "unsloth", "hf-trainer", "axolotl", "verl", "llamafactory", "ms-swift",
)  # fmt: skip
"""Frameworks with a place of their own among the lines; every other one follows by its name."""


def framework_style(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the colour and dash of a framework's line: the same whatever stands beside it."""
    known = name in FRAMEWORKS
    place = FRAMEWORKS.index(name) if known else len(FRAMEWORKS) + sum(name.encode()) % 24
    return SERIES[place % len(SERIES)], DASHES[(place + place // len(SERIES)) % len(DASHES)]


SEQUENTIAL = "cividis"
"""Vega scheme of heat maps: made for colour-blind readers."""


def term_words(name: str) -> str:
    """Return what charts, tables and sentences call a term."""
    return name.replace("_", " ").replace("kv ", "KV ")


LIGHT = {
    "primaryColor": "#1455CC",
    "backgroundColor": "#FFFFFF",
    "secondaryBackgroundColor": "#F3F5F8",
    "textColor": "#060B14",
    "linkColor": "#1455CC",
}
DARK = {
    "primaryColor": "#2B6FDA",
    "backgroundColor": "#10141B",
    "secondaryBackgroundColor": "#1A212C",
    "textColor": "#E6EAF0",
    "linkColor": "#67B6FF",
}
