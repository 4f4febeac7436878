"""The colours: one for every term, the same on every chart, told apart by every kind of eye.

Chosen by search: under normal vision and simulated protanopia, deuteranopia and tritanopia
(Machado 2009, severity 1) every two differ by at least 24 in CIE Lab (tests/app/test_palette.py).
"""

TERM_COLOURS = {
    "weights": "#1455CC",
    "adapters": "#67B6FF",
    "gradients": "#FFBB0D",
    "optimizer": "#D27C0F",
    "activations": "#008E4D",
    "vision": "#110701",
    "logits": "#B60700",
    "kv_cache": "#DEC0E2",
    "engine": "#843B6D",
    "overhead": "#869590",
    "communication": "#C0F8A0",
}
UNKNOWN_COLOUR = "#B8B8B8"
"""A recording's memory that no term owns."""
LIMIT_COLOUR = "#E0245E"
"""The capacity line; drawn dashed and labelled, so that it is not colour alone."""
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
SEQUENTIAL = "cividis"
"""Vega scheme of heat maps: made for colour-blind readers."""
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
