"""The colours: one for every term, the same on every chart and picture, told apart by every kind of eye.

Chosen by search: under normal vision and simulated protanopia, deuteranopia and tritanopia
(Machado 2009, severity 1) every two differ by at least 24 in CIE Lab (tests/app/test_app_palette.py).
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
VERDICT_COLOURS = {"fits": "#1A7F37", "tight": "#9A6700", "does not fit": "#CF222E"}
"""White text on each of them has a contrast of at least 4.5 : 1."""
INK, SOFT, PAPER = "#1B2330", "#59636E", "#FFFFFF"
