"""The state of "Will it fit?": widgets bound to query parameters, and what is written into them.

The state is st.session_state under the keys of `app.knobs`; the query parameters have the same
names. What a link says is checked by `app.links` before any widget sees it.
"""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import knobs, runs
from app.knobs import KNOBS, Kind, Knob
from app.links import read_link
from app.runs import DEFAULTS, OWN_SIZE, Run
from planner.errors import VramwiseError
from planner.machines.machine import Machine, find_gpu
from planner.models.spec import ModelSpec
from planner.run.framework import pick
from planner.run.recipe import MachineSection, Recipe
from planner.run.resolve import resolve
from planner.run.runfile import machine_of
from planner.units import parse_bytes, to_gib

UPLOADED = "uploaded_model"
"""Session key of a ModelSpec made of an uploaded config.json."""
FOUND = "hub_models"
"""Session key of the ModelSpecs that this person had looked up."""
SAID = "hub_said"
"""Session key of what the last look-up said, by the name that was looked up."""
MAX_FOUND = 8


def state(key: str) -> Any:
    """Return a setting's value, its default when the widget was not shown yet."""
    return st.session_state.get(key, DEFAULTS[key])


def values() -> dict[str, Any]:
    """Return every setting."""
    said = st.session_state.to_dict()  # one by one, fifty look-ups would cost every answer
    return {key: said.get(key, default) for key, default in DEFAULTS.items()}


def from_link(parameters: Mapping[str, str]) -> None:
    """Take what a link says for the widgets that are not bound to the address."""
    said = parameters.get("gpu")
    if said is not None and "gpu" not in st.session_state:
        st.session_state["gpu"] = read_link({"gpu": said})["gpu"]


def gpu_to_address() -> None:
    """Keep the GPU's id in the address: a bound widget would put its label there."""
    chosen = state("gpu")
    if chosen in (None, DEFAULTS["gpu"]):
        st.query_params.pop("gpu", None)
    elif st.query_params.get("gpu") != chosen:
        st.query_params["gpu"] = chosen


def machine_from_state() -> tuple[MachineSection, Machine]:
    """Return the machine that the widgets say."""
    section = runs.machine_section(values())
    return section, machine_of(section)


def model_from_state() -> tuple[str, ModelSpec]:
    """Return the model's name and its spec."""
    uploaded = st.session_state.get(UPLOADED)
    if uploaded is not None:
        return uploaded.name, uploaded
    return named(str(state("model") or ""))


def named(name: str) -> tuple[str, ModelSpec]:
    """Return a model by name: of the catalogue, or looked up in this session."""
    return runs.named_model(name, st.session_state.get(FOUND, {}))


def look_up(name: str) -> None:
    """Ask the hub about a model because a person asked; keep the answer for this session.

    A repository of GGUF files is planned as the model they were made of.
    """
    from planner.importers.typed import typed_model

    found = dict(st.session_state.get(FOUND, {}))
    st.session_state.pop("look_up_error", None)
    try:
        typed = typed_model(name)
    except VramwiseError as error:
        st.session_state["look_up_error"] = error
        return
    found[name] = typed.model
    st.session_state[FOUND] = dict(list(found.items())[-MAX_FOUND:])
    st.session_state[SAID] = {name: typed.said}


def run_from_state(recipe: Recipe | None = None) -> Run:
    """Return the run that the widgets say, or the same with another recipe."""
    return runs.run_of(
        values(),
        recipe=recipe,
        model=st.session_state.get(UPLOADED),
        found=st.session_state.get(FOUND, {}),
    )


def set_recipe(recipe: Recipe, run: Run | None = None) -> None:
    """Write a recipe into the widgets; lengths become one context and the prompt in it."""
    for knob in KNOBS:
        st.session_state[knob.key] = knobs.to_widget(knob, knobs.read_path(recipe, knob.path))
    st.session_state["framework"] = pick(recipe.framework).name
    if run is not None:
        resolved = resolve(run.model, recipe, run.machine)
        st.session_state["context"] = resolved.seq_tokens
        has_prompt = bool(resolved.prompt_tokens and resolved.completion_tokens)
        st.session_state["prompt"] = resolved.prompt_tokens if has_prompt else None


def set_machine(section: MachineSection) -> None:
    """Write a machine into the widgets; what the file leaves out stays as it is."""
    if section.gpu:
        st.session_state["gpu"] = find_gpu(section.gpu).id
    if section.vram:
        st.session_state["gpu"] = OWN_SIZE
        st.session_state["vram"] = round(to_gib(parse_bytes(section.vram)), 2)
    if section.host_ram:
        st.session_state["ram"] = round(to_gib(parse_bytes(section.host_ram)), 2)
    st.session_state["gpus"] = section.gpus
    st.session_state["nodes"] = section.nodes


def widget(knob: Knob, *, place: Any = st, defaults: Mapping[str, Any]) -> Any:
    """Show one knob; what the framework would do stands in grey where nothing is chosen."""
    grey = defaults.get(knob.path, knobs.recipe_default(knob))
    common: dict[str, Any] = {
        "key": knob.key,
        "help": knob.help or None,
        "bind": "query-params",
        "placeholder": _placeholder(knob, grey),
    }
    if knob.kind in (Kind.CHOICE, Kind.SWITCH):
        index = knob.options.index(knob.default) if knob.default else None
        return place.selectbox(knob.label, knob.options, index=index, **common)
    if knob.kind is Kind.TEXT:
        return place.text_input(knob.label, value=None, max_chars=100, **common)
    whole = knob.kind is Kind.COUNT
    return place.number_input(
        knob.label,
        min_value=int(knob.low) if whole else knob.low,
        max_value=int(knob.high) if whole else knob.high,
        value=knob.default,
        step=_step(knob) if whole else 0.01,
        **common,
    )


def _placeholder(knob: Knob, grey: Any) -> str:
    """Return what happens where nothing is chosen."""
    if knob.key == "prompt":  # a context without a prompt is planned as all completion
        return "none"
    return "framework's own" if grey in (None, "", ()) else _grey(grey)


def _grey(value: Any) -> str:
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def _step(knob: Knob) -> int:
    return 1024 if knob.key == "context" else 256 if knob.key in ("prompt", "batched_tokens") else 1
