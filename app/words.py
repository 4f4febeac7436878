"""Words and marks that several pages share: text that means nothing as markdown, errors, headings."""

import re

import streamlit as st

from app.knobs import BY_PATH
from planner.answers.changes import Change
from planner.errors import UnknownNameError, VramwiseError
from planner.verbs.options import RECIPE_FIELDS

MARKS = {
    "fits": ("green", ":material/check_circle:", "Fits"),
    "tight": ("orange", ":material/warning:", "Tight"),
    "does not fit": ("red", ":material/cancel:", "Does not fit"),
}


_ESCAPED = str.maketrans({char: "\\" + char for char in "\\`*_{}[]<>()#+!|$~:"})


def escape(text: str) -> str:
    """Return text whose markdown means nothing: errors quote what people typed."""
    return text.translate(_ESCAPED)


_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")


def in_app(text: str) -> str:
    """Return a sentence of the planner in the words of the sidebar, where it names a flag."""
    return _FLAG.sub(lambda found: _setting(found.group(1)), text)


def _setting(flag: str) -> str:
    name = flag.replace("-", "_")
    knob = BY_PATH.get(RECIPE_FIELDS.get(name, name))
    return f'"{knob.label}"' if knob else flag.replace("-", " ")


def section(title: str) -> None:
    """Show a section's heading, one level under the page's title."""
    st.header(title, anchor=False)


def problem(error: VramwiseError) -> None:
    """Show what is wrong with the run, with the hint and near matches."""
    st.error(escape(in_app(error.message)), icon=":material/error:")
    if error.hint:
        st.caption(escape(in_app(error.hint)))
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
