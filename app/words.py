"""Words and marks that several pages share: text that means nothing as markdown, errors, headings."""

import streamlit as st

from app.knobs import BY_PATH
from planner.answers.changes import Change
from planner.errors import UnknownNameError, VramwiseError

MARKS = {
    "fits": ("green", ":material/check_circle:", "Fits"),
    "tight": ("orange", ":material/warning:", "Tight"),
    "does not fit": ("red", ":material/cancel:", "Does not fit"),
}


def escape(text: str) -> str:
    """Return text whose markdown means nothing: errors quote what people typed."""
    return "".join("\\" + char if char in "\\`*_{}[]<>()#+!|$~:" else char for char in text)


def section(title: str) -> None:
    """Show a section's heading, one level under the page's title."""
    st.header(title, anchor=False)


def problem(error: VramwiseError) -> None:
    """Show what is wrong with the run, with the hint and near matches."""
    st.error(escape(error.message), icon=":material/error:")
    if error.hint:
        st.caption(escape(error.hint))
    elif isinstance(error, UnknownNameError) and error.near:
        st.caption("Near: " + ", ".join(map(escape, error.near)))


def change_label(change: Change) -> str:
    """Return a change in the words of the sidebar: "Checkpointing full", "Batch 1"."""
    parts = []
    for path, value in change.update.items():
        knob = BY_PATH.get(path)
        if knob is None or value is None or value is False:
            continue
        number = isinstance(value, int) and value is not True
        shown = f" {value:,}" if number else f" {value}"
        parts.append(knob.label if value is True else knob.label + shown)
    return ", ".join(parts) or change.name
