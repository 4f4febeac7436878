"""The sidebar of "Will it fit?": model, machine, run and knobs, in the order people think of them."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import streamlit as st
from streamlit.errors import StreamlitAPIException

from app import inputs, knobs, runs, uploads
from app.inputs import state
from app.knobs import KNOBS, MORE, Group
from app.links import MAX_GIB
from app.runs import OWN_SIZE
from app.words import escape, problem
from planner.errors import VramwiseError
from planner.machines.machine import MAX_GPUS
from planner.models.catalogue import model_names
from planner.run.framework import pick


def model_widget() -> None:
    """Show the catalogue; a hub id can be written instead."""
    options, chosen = runs.model_options(), str(state("model") or "")
    typed = st.selectbox(
        "Model",
        options if not chosen or chosen in options else [*options, chosen],
        key="model",
        bind="query-params",
        accept_new_options=True,
        help="Search the catalogue, write a name in your own words, or a Hugging Face id: owner/name.",
    )
    _meant(str(typed or "").strip())


def _meant(typed: str) -> None:
    """Say which model a name in other words is taken for; a hub id's own config is one click away."""
    if said := st.session_state.get(inputs.SAID, {}).get(typed):
        st.caption(escape(said))
    known = runs.known_name(typed)
    if known in (None, typed) or typed in st.session_state.get(inputs.FOUND, {}):
        return
    if not runs.is_hub_id(typed) or typed.lower() in model_names():
        st.caption(f"That is {escape(str(known))}.")
        return
    st.caption(f"Planned by the shapes of {escape(str(known))}.")
    st.button(
        "Read its own config from the Hugging Face hub", key="look_up_own", type="tertiary",
        icon=":material/search:", on_click=inputs.look_up, args=(typed,),
    )  # fmt: skip
    if error := st.session_state.pop("look_up_error", None):
        problem(error)


def machine_widgets() -> None:
    """Show GPU, count, plain GiB and host RAM."""
    options = runs.gpu_options()
    st.selectbox(
        "GPU", options, key="gpu", format_func=runs.gpu_label, help=_gpu_help(),
        placeholder="Pick a GPU", persist_state="session", accept_new_options=True,
        on_change=_typed_gpu,
    )  # fmt: skip
    if error := st.session_state.pop("gpu_error", None):
        problem(error)
    inputs.gpu_to_address()
    if state("gpu") == OWN_SIZE:
        _into_link("vram")
        st.number_input(
            "Memory torch sees (GiB)", 0.1, MAX_GIB, 24.0, 1.0, key="vram", bind="query-params",
            help="What torch.cuda.mem_get_info() says: 0.2 to 1.2 GiB less than on the box.",
        )  # fmt: skip
    left, right = st.columns(2)
    left.number_input("GPUs", 1, MAX_GPUS, 1, 1, key="gpus", bind="query-params")
    right.number_input(
        "Host RAM (GiB)", 0.1, MAX_GIB, None, 8.0, key="ram", bind="query-params",
        placeholder="not judged",
    )  # fmt: skip
    if int(state("gpus") or 1) > 1:
        _into_link("nodes")
        st.number_input(
            "Nodes", 1, MAX_GPUS, None, 1, key="nodes", bind="query-params",
            placeholder="as few as hold eight each", help="Hosts that the GPUs are in.",
        )  # fmt: skip


def _typed_gpu() -> None:
    """Take cards however they were typed, with their count; what is none leaves the box as it was."""
    typed = st.session_state["gpu"]
    if typed is None or typed in runs.gpu_options():
        return
    try:
        st.session_state["gpu"], count = runs.named_gpu(typed)
    except VramwiseError as error:
        st.session_state["gpu_error"] = error
        st.session_state["gpu"] = st.query_params.get("gpu", runs.DEFAULT_GPU)
    else:
        if count > 1:
            st.session_state["gpus"] = min(count, MAX_GPUS)


def _gpu_help() -> str:
    return "Search by name or memory, or write it in your own words: 8 x h100. Every card, MIG slices and unified memories; the last entry takes plain GiB."


def framework_widget() -> None:
    """Show the framework."""
    st.selectbox(
        "Framework", runs.framework_options(), key="framework", bind="query-params",
        help="How a code base implements the run: its copies of logits, dtypes and padding.",
    )  # fmt: skip


def knob(key: str, defaults: Mapping[str, Any]) -> None:
    """Show one knob by its key."""
    inputs.widget(knobs.BY_KEY[key], defaults=defaults)


def show() -> None:
    """Show everything; the values end up in the session under the knobs' keys."""
    uploads.from_file()
    if st.session_state.get(inputs.UPLOADED) is None:
        model_widget()
    machine_widgets()
    framework_widget()
    left, right = st.columns(2)
    with left:
        knob("task", {})
    defaults = _defaults(state("framework"), state("task"))
    if state("task") != "serve":
        with right:
            knob("method", defaults)
    _pairs([k.key for k in _shown(Group.FIRST)], defaults)
    more = st.expander("More settings", key="more", on_change="rerun")
    if more.open or _more_is_set():  # thirty widgets that nobody looks at would cost every answer
        with more:
            _into_link(*(k.key for k in KNOBS if k.group in MORE))
            _more(defaults)


def _into_link(*keys: str) -> None:
    """Put what a button or a file has set into the link; Streamlit does so for widgets it has shown before."""
    for key in keys:
        value = st.session_state.get(key)
        if value is not None and key not in st.query_params:
            with suppress(StreamlitAPIException):  # shown before
                st.query_params[key] = str(value)


def _more_is_set() -> bool:
    said, linked = inputs.values(), set(st.query_params)
    keys = [k.key for k in KNOBS if k.group in MORE]
    return any(said[key] is not None or key in linked for key in keys)


def _more(defaults: Mapping[str, Any]) -> None:
    for group in MORE:
        if shown := _shown(group):
            st.caption(group.value)
            _pairs([k.key for k in shown], defaults)


def _defaults(framework: str | None, task: str) -> dict[str, Any]:
    """Return what a framework does by itself, by recipe path."""
    found = pick(framework).task_defaults(task) if framework else {}
    engine = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "sleep_level")
    inner = {f"engine.{name}": found.get(name) for name in engine}
    return {**found, **inner, "engine.kind": found.get("engine")}


def _shown(group: Group) -> list[knobs.Knob]:
    task, method = state("task"), state("method")
    return [k for k in KNOBS if k.group is group and knobs.applies(k, task, method)]


def _pairs(keys: list[str], defaults: Mapping[str, Any]) -> None:
    """Show knobs two in a row."""
    for first in range(0, len(keys), 2):
        for column, key in zip(st.columns(2), keys[first : first + 2], strict=False):
            with column:
                knob(key, defaults)
