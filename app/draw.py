"""Shows a chart: ink and paper follow the reader's theme, everything else is in the spec."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app.charts import Spec
from app.palette import DARK, LIGHT, RANGE_COLOUR

LOOKS = """<style>
@media (max-width: 640px) {
  [data-testid="stMainBlockContainer"] { padding-top: 3.5rem; padding-bottom: 1rem }
  .st-key-terms th:nth-child(4), .st-key-terms td:nth-child(4) { display: none }
  .st-key-terms td:nth-child(3) { font-size: 0.75rem; overflow-wrap: anywhere }
}
%s</style>"""
"""On a phone nothing stays blank, and a table of terms leaves the sources out; the chart's figures have them."""
CHOSEN = "button[data-variant=segmented_control][aria-checked=true] p { color: #9CC4FF }\n.stSlider p { color: #E6EAF0 }"
"""In the dark: Streamlit writes it in the primary colour, which white must be readable on too."""


def looks() -> None:
    """Have the page look as the theme's options alone cannot."""
    st.html(LOOKS % (CHOSEN if st.context.theme.type == "dark" else ""))


def draw(
    spec: Spec,
    *,
    key: str,
    alt: str,
    figures: Sequence[Spec] = (),
    columns: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Show a Vega-Lite spec at full width; `alt` says it in words.

    `figures`: the rows behind it, as a table for who cannot point at a bar; made when it is opened. A
    chart goes without where the page has the same rows as a table anyway.
    """
    shown = st.vega_lite_chart(themed(spec), width="stretch", key=key, alt=alt, **options)
    if figures:
        opened = st.expander("The figures of this chart", key=f"{key}_figures", on_change="rerun")
        if opened.open:
            with opened:
                st.dataframe(
                    pd.DataFrame(list(figures), columns=list(columns) or None),
                    hide_index=True,
                    width="stretch",
                    alt=alt,
                )
    return shown


def themed(spec: Spec) -> Spec:
    """Return the spec with labels and gaps in the colours of the theme in use."""
    kind = st.context.theme.type
    theme = {"light": LIGHT, "dark": DARK}.get(kind or "")
    ink = theme["textColor"] if theme else RANGE_COLOUR
    paper = theme["backgroundColor"] if theme else "transparent"
    config = {
        "text": {"color": ink},
        "rule": {"color": ink},
        "bar": {"stroke": paper, "strokeWidth": 0.8},
        "rect": {"stroke": paper, "strokeWidth": 0.8},
        "legend": {"symbolStrokeWidth": 0, "labelColor": ink},
        "axis": {"labelColor": ink, "titleColor": ink},
    }
    return {**spec, "config": config}
