"""Words and marks that several pages share: text that means nothing as markdown, errors, headings."""

import re
from functools import cache

import streamlit as st

from app.knobs import BY_PATH
from app.palette import term_words
from planner.answers.changes import Change
from planner.errors import UnknownNameError, VramwiseError
from planner.run.recipe import Recipe
from planner.terms.term import TERM_NAMES
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
_ASIDE = re.compile(r" \((--[a-z][^()]*)\)|: (--[a-z][^.;()]*)")
"""What a sentence adds about flags, in brackets or after a colon."""
_COMMAND = re.compile(r"`vramwise ([a-z]+)[^`]*`")
_NAME = re.compile(r"(?<![\w./'`])(?:[a-z]+\.)?([a-z]+(?:_[a-z0-9]+)+)(?!\w|[/(`']|\.\w)")
"""A setting or a term by its name in a run file; what people typed is quoted and stays."""
_TOKEN = re.compile(r"--token\b(?: or (?:set )?HF_TOKEN)?")
"""Nobody types one here: whoever runs the app sets the variable."""
MACHINE_LABELS = {
    "gpu": "GPU",
    "gpus": "GPUs",
    "nodes": "Nodes",
    "vram": "Memory torch sees",
    "host-ram": "Host RAM",
    "framework": "Framework",
}
PAGES = {
    "plan": "Will it fit?",
    "recommend": "Recommend",
    "gpus": "Recommend",
    "compare": "Compare",
    "frontier": "Budget",
    "explain": "Explain",
}
"""The page that answers what a command does."""


def in_app(text: str) -> str:
    """Return a sentence of the planner in the words of the app, where it names a flag, a field or a command.

    An aside about a flag that has no setting here is left out.
    """
    text = _TOKEN.sub("HF_TOKEN", _COMMAND.sub(_page, text))
    text = _ASIDE.sub(_aside, text)
    text = _FLAG.sub(lambda found: _setting(found.group(1)), text)
    return _NAME.sub(_field, text)


def _page(found: re.Match[str]) -> str:
    page = PAGES.get(found.group(1))
    return f'the page "{page}"' if page else found.group()


def _aside(found: re.Match[str]) -> str:
    flags = _FLAG.findall(found.group(1) or found.group(2))
    return found.group() if all(_label(flag) for flag in flags) else ""


def _label(flag: str) -> str | None:
    """Return what the sidebar calls a flag, where it has it."""
    name = flag.replace("-", "_")
    knob = BY_PATH.get(RECIPE_FIELDS.get(name, name))
    return knob.label if knob else MACHINE_LABELS.get(flag)


def _setting(flag: str) -> str:
    label = _label(flag)
    return f'"{label}"' if label else flag.replace("-", " ")


def _field(found: re.Match[str]) -> str:
    return field_words().get(found.group(1), found.group())


@cache
def field_words() -> dict[str, str]:
    """Return what the app calls the fields of a run file and the terms whose names have an underscore."""
    schema = Recipe.model_json_schema()
    parts = (schema, *schema["$defs"].values())
    said = {name: name.replace("_", " ") for part in parts for name in part.get("properties", ())}
    said |= {path.rpartition(".")[2]: f'"{knob.label}"' for path, knob in BY_PATH.items()}
    said |= {name: term_words(name) for name in TERM_NAMES}
    return {name: words for name, words in said.items() if "_" in name}


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
