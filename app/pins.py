"""Runs kept for "Compare": as the query strings of their links, so that a link restores them too."""

from urllib.parse import parse_qsl, urlencode

import streamlit as st

from app import inputs, links, runs
from app.runs import Run

PARAMETER = "pin"
KEY = "pinned_runs"
"""Session key of the query strings."""
MAX_PINS = 6
MAX_LENGTH = 1500


def add() -> None:
    """Keep the run of "Will it fit?"."""
    text = urlencode(links.link_parameters(inputs.values()))
    kept = [pin for pin in pinned() if pin != text]
    st.session_state[KEY] = [*kept, text][-MAX_PINS:]
    st.toast("Added: open Compare to see it beside others.", icon=":material/keep:")


def remove(index: int) -> None:
    """Drop one run."""
    kept = pinned()
    st.session_state[KEY] = kept[:index] + kept[index + 1 :]


def pinned() -> list[str]:
    """Return the query strings of the runs that are kept; a link's the first time."""
    if KEY not in st.session_state:
        texts = st.query_params.get_all(PARAMETER)
        st.session_state[KEY] = [t for t in texts if len(t) <= MAX_LENGTH][:MAX_PINS]
    kept: list[str] = st.session_state[KEY]
    return kept


def write_link() -> None:
    """Put the runs into the address."""
    st.query_params[PARAMETER] = pinned()


def run_of(pin: str) -> tuple[Run, list[str]]:
    """Return the run of a pin and what in it was not taken; raises VramwiseError."""
    parameters = dict(parse_qsl(pin, keep_blank_values=True)[:100])
    found = st.session_state.get(inputs.FOUND, {})
    return runs.run_of(links.read_link(parameters), found=found), links.check_link(parameters)
