"""From widgets and links to a run, and back: the state of the page "Will it fit?".

The state is st.session_state under the keys of `app.knobs`; widgets are bound to the query
parameters of the same names. What a link says is checked here before any widget sees it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app import knobs
from app.knobs import BY_KEY, KNOBS, Kind, Knob
from planner.errors import UsageError, VramwiseError
from planner.framework import frameworks
from planner.hub import catalogue_names, find_model, load_catalogue
from planner.machine import Machine, gpu_catalogue
from planner.model import ModelSpec
from planner.recipe import MachineSection, Recipe, RunFile
from planner.resolve import resolve
from planner.runfile import machine_of, make_recipe
from planner.units import parse_bytes

DEFAULT_MODEL = "qwen2.5-7b"
DEFAULT_GPU = "rtx-4090"
OWN_SIZE = "own size"
"""Instead of a GPU: plain GiB."""
RUN_DEFAULTS: dict[str, Any] = {
    "model": DEFAULT_MODEL,
    "gpu": DEFAULT_GPU,
    "gpus": 1,
    "vram": 24.0,
    "ram": None,
    "framework": "vramwise",
}
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
UPLOADED = "uploaded_model"
"""Session key of a ModelSpec made of an uploaded config.json."""
FOUND = "hub_models"
"""Session key of the ModelSpecs that this person had looked up."""
MAX_FOUND = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the widgets say, validated."""

    model: ModelSpec
    recipe: Recipe
    machine: Machine
    section: MachineSection
    model_name: str
    """As a run file names it: the hub's id, so that the trainer finds its weights."""

    @property
    def file(self) -> RunFile:
        """The run as run.yaml."""
        return RunFile(model=self.model_name, recipe=self.recipe, machine=self.section)


class NeedsLookUp(UsageError):
    """A hub id that nobody has asked to look up yet."""


def model_options() -> list[str]:
    """Return the catalogue's names, the default first: the first option drops out of links."""
    return _first(DEFAULT_MODEL, catalogue_names())


def gpu_options() -> list[str]:
    """Return GPU ids by memory, the default first, then plain GiB."""
    known = [gpu.id for gpu in gpu_catalogue().values() if gpu.torch_total_bytes]
    return [*_first(DEFAULT_GPU, known), OWN_SIZE]


def framework_options() -> list[str]:
    """Return frameworks, the usual ones first."""
    first = [name for name in knobs.FRAMEWORKS_FIRST if name in frameworks()]
    return [*first, *(name for name in frameworks() if name not in first)]


def _first(name: str, names: list[str]) -> list[str]:
    return [name, *(other for other in names if other != name)]


def gpu_label(gpu_id: str) -> str:
    """Return a GPU as a person reads it."""
    if gpu_id == OWN_SIZE:
        return "Another size, in GiB"
    return gpu_catalogue()[gpu_id].name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def state(key: str) -> Any:
    """Return a knob's value, its default when the widget was not shown yet."""
    default = BY_KEY[key].default if key in BY_KEY else RUN_DEFAULTS[key]
    return st.session_state.get(key, default)


def recipe_from_state() -> Recipe:
    """Return the recipe that the widgets say; raises UsageError naming the field."""
    fields: dict[str, Any] = {"framework": state("framework")}
    task = state("task")
    for knob in KNOBS:
        value = state(knob.key)
        if value is None or value == "" or not knobs.applies(knob, task, state("method")):
            continue
        _put(fields, knob.path, knobs.to_field(knob, value))
    return make_recipe(**fields)


def _put(fields: dict[str, Any], path: str, value: Any) -> None:
    if "." in path:
        section, name = path.split(".", 1)
        fields.setdefault(section, {})[name] = value
    else:
        fields[path] = value


def machine_from_state() -> tuple[MachineSection, Machine]:
    """Return the machine that the widgets say."""
    gpu, ram = state("gpu"), state("ram")
    section = MachineSection(
        gpu=None if gpu == OWN_SIZE else gpu,
        gpus=state("gpus") or 1,
        vram=f"{state('vram') or 0:g}GiB" if gpu == OWN_SIZE else None,
        host_ram=f"{ram:g}GiB" if ram else None,
    )
    return section, machine_of(section)


def model_from_state() -> tuple[str, ModelSpec]:
    """Return the model's name and its spec; never touches a path, and the network only when asked."""
    uploaded = st.session_state.get(UPLOADED)
    if uploaded is not None:
        return uploaded.name, uploaded
    return named_model(str(state("model") or ""))


def named_model(name: str) -> tuple[str, ModelSpec]:
    """Return a catalogue model, or one that was looked up in this session."""
    looked_up = st.session_state.get(FOUND, {})
    if name in looked_up:
        return name, looked_up[name]
    known = spellings().get(name.strip().lower())
    if known is not None:
        model = find_model(known)
        return model.hub_id or known, model
    if HUB_ID.fullmatch(name):
        raise NeedsLookUp(f"{name} is not in the catalogue")
    raise UsageError(
        f"model: {name[:60]!r} is not in the catalogue",
        hint="pick one, write a Hugging Face id such as Qwen/Qwen2.5-0.5B, or upload its config.json",
    )


@st.cache_data(max_entries=1, show_spinner=False)
def spellings() -> dict[str, str]:
    """Return every spelling of a catalogue model, in lower case, with its short name."""
    names: dict[str, str] = {}
    for name, entry in load_catalogue().items():
        for spelling in (*entry["aliases"], entry["hub_id"]):
            names[str(spelling).lower()] = name
    return names | {name: name for name in load_catalogue()}


def look_up(name: str) -> None:
    """Fetch a hub model's config because a person asked; keep it for this session."""
    from planner.hub_remote import fetch_model

    found = dict(st.session_state.get(FOUND, {}))
    try:
        found[name] = fetch_model(name)
    except VramwiseError as error:
        st.session_state["look_up_error"] = error
        return
    st.session_state[FOUND] = dict(list(found.items())[-MAX_FOUND:])
    st.session_state.pop("look_up_error", None)


def run_from_state() -> Run:
    """Return the whole run; raises VramwiseError when something in it is wrong."""
    return run_with(recipe_from_state())


def run_with(recipe: Recipe) -> Run:
    """Return the run of the widgets' model and machine with another recipe."""
    name, model = model_from_state()
    section, machine = machine_from_state()
    return Run(model=model, recipe=recipe, machine=machine, section=section, model_name=name)


def set_recipe(recipe: Recipe, run: Run | None = None) -> None:
    """Write a recipe into the widgets; lengths become one context and the prompt in it."""
    for knob in KNOBS:
        st.session_state[knob.key] = knobs.to_widget(knob, knobs.read_path(recipe, knob.path))
    st.session_state["framework"] = recipe.framework
    if run is not None:
        resolved = resolve(run.model, recipe, run.machine)
        st.session_state["context"] = resolved.seq_tokens
        has_prompt = bool(resolved.prompt_tokens and resolved.completion_tokens)
        st.session_state["prompt"] = resolved.prompt_tokens if has_prompt else None


def set_machine(section: MachineSection) -> None:
    """Write a machine into the widgets; what the file leaves out stays as it is."""
    from planner.machine import find_gpu
    from planner.units import to_gib

    if section.gpu:
        st.session_state["gpu"] = find_gpu(section.gpu).id
    if section.vram:
        st.session_state["gpu"] = OWN_SIZE
        st.session_state["vram"] = round(to_gib(parse_bytes(section.vram)), 2)
    if section.host_ram:
        st.session_state["ram"] = round(to_gib(parse_bytes(section.host_ram)), 2)
    st.session_state["gpus"] = section.gpus


def widget(knob: Knob, *, place: Any = st, defaults: Mapping[str, Any]) -> Any:
    """Show one knob; what the framework would do stands in grey where nothing is chosen."""
    grey = defaults.get(knob.path, knobs.recipe_default(knob))
    common: dict[str, Any] = {
        "key": knob.key,
        "help": knob.help or None,
        "bind": "query-params",
        "placeholder": "framework's own" if grey in (None, "", ()) else _grey(grey),
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


def _grey(value: Any) -> str:
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def _step(knob: Knob) -> int:
    return 1024 if knob.key == "context" else 256 if knob.key in ("prompt", "batched_tokens") else 1
