"""From plain values (of widgets or of a link) to a validated run. No Streamlit here.

Values are a mapping of the keys in RUN_DEFAULTS and `app.knobs` to what their widgets hold.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from app import knobs
from app.knobs import KNOBS
from planner.answers.cards import BROAD_KINDS
from planner.errors import UsageError, near_names
from planner.machines.machine import Machine, find_gpu, gpu_catalogue
from planner.models.catalogue import (
    catalogue_model,
    catalogue_names,
    model_named,
    model_names,
    models_like,
)
from planner.models.spec import ModelSpec
from planner.names import COUNTED
from planner.run.framework import frameworks
from planner.run.recipe import MachineSection, Recipe, RunFile
from planner.run.runfile import machine_of, make_recipe

Values = Mapping[str, Any]
DEFAULT_MODEL = "qwen2.5-7b"
DEFAULT_GPU = "rtx-4090"
OWN_SIZE = "own size"
"""Instead of a GPU: plain GiB."""
KINDS = (*BROAD_KINDS, "mig")
"""Of GPUs, in the order that lists show them."""
RUN_DEFAULTS: dict[str, Any] = {
    "model": DEFAULT_MODEL,
    "gpu": DEFAULT_GPU,
    "gpus": 1,
    "nodes": None,
    "vram": 24.0,
    "ram": None,
    "framework": "vramwise",
}
DEFAULTS: dict[str, Any] = RUN_DEFAULTS | {knob.key: knob.default for knob in KNOBS}
MOST_NEAR = 6
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the widgets say, validated."""

    model: ModelSpec
    recipe: Recipe
    machine: Machine
    section: MachineSection
    model_name: str
    """As a run file names it: the hub's id, so that the trainer finds its weights."""
    private: bool = False
    """The model is this person's own: uploaded, or looked up on the hub."""

    @property
    def key(self) -> tuple[str, ...]:
        """Return what tells this run from every other."""
        own = repr(self.model) if self.private else ""
        recipe, section = self.recipe, self.section
        said = (part.model_dump_json(exclude_defaults=True) for part in (recipe, section))
        return (self.model_name, own, *said)

    def sent(self) -> "Sent":
        """Return the run as a worker gets it."""
        return Sent(self.file, self.model if self.private else None)

    @property
    def file(self) -> RunFile:
        """The run as run.yaml."""
        return RunFile(model=self.model_name, recipe=self.recipe, machine=self.section)


class Sent(NamedTuple):
    """A run on its way to a worker: what the catalogue knows goes by name."""

    file: RunFile
    model: ModelSpec | None
    """A private model."""


def received(sent: Sent) -> Run:
    """Return the run that was sent."""
    name, model = sent.file.model, sent.model
    return Run(
        model=model or named_model(name, {})[1],
        recipe=sent.file.recipe,
        machine=machine_of(sent.file.machine),
        section=sent.file.machine,
        model_name=name,
        private=model is not None,
    )


class NeedsLookUp(UsageError):
    """A hub id that nobody has asked to look up yet."""


def model_options() -> list[str]:
    """Return the catalogue's names, the default first: the first option drops out of links."""
    return _first(DEFAULT_MODEL, catalogue_names())


def gpu_options() -> list[str]:
    """Return GPU ids by memory, people's own cards before others, the default first, then plain GiB."""
    known = [gpu for gpu in gpu_catalogue().values() if gpu.torch_total_bytes]
    known.sort(key=lambda gpu: (gpu.marketed_gb, KINDS.index(gpu.kind)))
    return [*_first(DEFAULT_GPU, [gpu.id for gpu in known]), OWN_SIZE]


def named_gpu(typed: str) -> tuple[str, int]:
    """Return the id and the count of cards however they are typed: "4090 laptop", "8 x h100".

    Raises UsageError with the cards that it could be, or near ones.
    """
    try:
        card, count = find_gpu(typed), 1
    except UsageError:
        counted = COUNTED.fullmatch(typed.strip())
        if counted is None:
            raise
        card = find_gpu(counted["card"] or counted["each"])
        count = int(counted["count"] or counted["times"])
    if not card.torch_total_bytes:
        raise UsageError(f"gpu: how much torch sees of a {card.name} is not known", hint=OWN_SIZE)
    return card.id, count


@cache
def gpu_label(name: str) -> str:
    """Return a GPU as its box shows and finds it: by what people call it, its size or its id.

    No label begins with another one: Streamlit 1.67 begins anew when what is typed is the value shown.
    """
    gpu = gpu_catalogue().get(name)
    if gpu is None:
        return name
    called = gpu.name.replace("NVIDIA ", "").replace("GeForce ", "").removesuffix(" GPU")
    return f"{called} · {gpu.marketed_gb:g} GB · {gpu.id}"


def framework_options() -> list[str]:
    """Return frameworks, the usual ones first."""
    first = [name for name in knobs.FRAMEWORKS_FIRST if name in frameworks()]
    return [*first, *(name for name in frameworks() if name not in first)]


def _first(name: str, names: list[str]) -> list[str]:
    return [name, *(other for other in names if other != name)]


def recipe_of(values: Values) -> Recipe:
    """Return the recipe of some values; raises UsageError naming the field."""
    fields: dict[str, Any] = {"framework": values["framework"]}
    for knob in KNOBS:
        value = values[knob.key]
        if value is None or value == "":
            continue
        if knobs.applies(knob, values["task"], values["method"]):
            _put(fields, knob.path, knobs.to_field(knob, value))
    return make_recipe(**fields)


def _put(fields: dict[str, Any], path: str, value: Any) -> None:
    if "." in path:
        section, name = path.split(".", 1)
        fields.setdefault(section, {})[name] = value
    else:
        fields[path] = value


def machine_section(values: Values) -> MachineSection:
    """Return the machine of some values, as a run file names it."""
    own, ram, gpus = values["gpu"] == OWN_SIZE, values["ram"], values["gpus"] or 1
    return MachineSection(
        gpu=None if own else values["gpu"],
        gpus=gpus,
        nodes=values.get("nodes") if gpus > 1 else None,
        vram=f"{values['vram'] or 0:g}GiB" if own else None,
        host_ram=f"{ram:g}GiB" if ram else None,
    )


def named_model(name: str, found: Mapping[str, ModelSpec]) -> tuple[str, ModelSpec]:
    """Return a model however its name is typed, or one of `found`; touches neither a path nor the network.

    The name that comes back is what a run file says: the hub id of what was typed, where it has weights
    to train.
    """
    if name in found:
        return name, found[name]
    typed = name.strip()
    known = known_name(typed)
    if known is not None:
        model = catalogue_model(known)
        own = (
            is_hub_id(typed) and typed.lower() not in model_names() and "gguf" not in typed.lower()
        )
        return (typed if own else model.hub_id or known), model
    if is_hub_id(typed):
        raise NeedsLookUp(f"model: {typed} is not in the catalogue")
    if several := models_like(typed):
        raise UsageError(
            f"model: {typed[:60]!r} could be several models", hint=f"say which: {_listed(several)}"
        )
    near = near_names(typed[:60], catalogue_names())
    raise UsageError(
        f"model: {typed[:60]!r} is not in the catalogue",
        hint=(f"near: {_listed(near)}; " if near else "")
        + "pick one, write a Hugging Face id such as Qwen/Qwen2.5-0.5B, or upload its config.json",
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:MOST_NEAR])


@lru_cache(maxsize=1024)
def known_name(typed: str) -> str | None:
    """Return the catalogue model that somebody means: by any spelling, in words, or a derivative of its shapes."""
    text = typed.strip()[:200]
    same = model_named(text)
    if same is None:
        from planner.importers.names import resolve_name  # which workers need for few runs only

        same = resolve_name(text)
    return model_names().get(same.lower()) if same else None


def is_hub_id(text: str) -> bool:
    """Return whether a text has the form of a Hugging Face id."""
    return bool(HUB_ID.fullmatch(text))


def run_of(values: Values, *, recipe: Recipe | None = None, model: ModelSpec | None = None,
           found: Mapping[str, ModelSpec] | None = None) -> Run:  # fmt: skip
    """Return the whole run of some values; raises VramwiseError when something in it is wrong.

    `recipe` and `model` take the place of what the values say.
    """
    private = model is not None or str(values["model"]) in (found or {})
    if model is not None:
        name = model.name
    else:
        name, model = named_model(str(values["model"] or ""), found or {})
    section = machine_section(values)
    return Run(
        private=private,
        model=model,
        recipe=recipe or recipe_of(values),
        machine=machine_of(section),
        section=section,
        model_name=name,
    )
