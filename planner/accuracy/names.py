"""Names as sources print them -> models and GPUs that the planner knows; never over the network."""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

from planner.accuracy.prediction import NotCovered
from planner.datafiles import data_dir
from planner.errors import VramwiseError
from planner.families import model_spec_from_config
from planner.machines.machine import Machine, find_gpu, make_machine
from planner.models.catalogue import catalogue_model, load_catalogue
from planner.models.spec import ModelSpec, ModuleKind, ModuleSpec
from planner.terms.standing import model_of_size
from planner.units import GiB

_SUFFIXES = [
    "instruct",
    "chat",
    "it",
    "base",
    "hf",
    "bf16",
    "fp16",
    "fp8",
    "nvfp4",
    "gptq",
    "awq",
    "autoround",
    "gguf",
    "int4",
    "int8",
    "bnb",
    "4bit",
    "unsloth",
    "dynamic",
    "preview",
    "thinking",
    "qat",
    "text",
    "q8-0",
    "q4-k-m",
    "q4-0",
    "merged",
    "2507",
    "2506",
    "0528",
    "0324",
    "v10.1",
    "v1.0",
    "v0.1",
    "128k",
    "4k",
    "1m",
]
_SPELLINGS = (
    (r"^meta-llama", "llama"),
    (r"^llama(\d)", r"llama-\1"),
    (r"^llama-(\d)-(\d)-", r"llama-\1.\2-"),
    (r"^qwen(\d)-(\d)-", r"qwen\1.\2-"),
    (r"^qwen25-", "qwen2.5-"),
    (r"^qwen1half", "qwen1.5"),
    (r"^qwq-32b", "qwen2.5-32b"),
    (r"^tiny-?llama.*", "tinyllama-1.1b"),
    (r"^.*dolphin-.*mistral-7b", "mistral-7b-v0.1"),
    (r"^qwen3\.6-35b-a3b", "qwen3.5-35b-a3b"),
    (r"^phi-3-vision-128k", "phi-3-mini-128k"),
    (r"^qwen2\.5-vl-(\d+)b.*", r"qwen2.5-vl-\1b"),
    (r"^mistral-7b(-v0.2)?$|^mistral-7b-instruct$", "mistral-7b-v0.1"),
    (r"^mixtral$", "mixtral-8x7b"),
    (r"^deepseek-r1-0528-qwen3-8b", "qwen3-8b"),
    (r"^deepseek-coder-v2-lite", "deepseek-v2-lite"),
    (r"^llama-3.1-storm-8b|^final_dpo", "llama-3.1-8b"),
    (r"^kimi-k2-think.*", "kimi-k2"),
    (r"^chinese-llama.*2-(\d+b)$", r"llama-2-\1"),
    (r"^deepseek-v3-671b", "deepseek-v3"),
    (r"^gemma-(e[24]b)", r"gemma-3n-\1"),
    (r"^codegemma", "gemma"),
    (r"^qwen3-embedding", "qwen3"),
    (r"^qwen2.5-coder-14b", "qwen2.5-14b"),
    (r"^qwen2.5-(\d+)b-instruct-1m.*", r"qwen2.5-\1b"),
    (r"^(devstral|magistral)-small", "mistral-small-24b"),
    (r"^qwen3\.6-27b", "qwen3.6-27b"),
    (r"^bloomz", "bloom"),
    (r"^nvidia-nemotron-nano", "nemotron-nano"),
    (r"^granite-3.0-3b-a800m", "powermoe-3b"),
    (r"^llama-4-maverick.*", "llama-4-maverick"),
    (r"^llama-4-scout.*", "llama-4-scout"),
    (r"^gpt-neo-x", "gpt-neox"),
    (r"^falcon-(\d+)b.*", r"falcon-\1b"),
)


def squash(text: str) -> str:
    """Fold a name to lower-case letters and digits; 1.3 stays apart from 13."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(\d)\.(\d)", r"\1p\2", text.lower()))


@cache
def _measured() -> dict[str, dict[str, Any]]:
    """Models that only published rows use, by short name."""
    text = (data_dir() / "models" / "measured.jsonl").read_text(encoding="utf-8")
    return {entry["name"]: entry for entry in map(json.loads, text.splitlines())}


def measured_config(name: str) -> dict[str, Any]:
    """Return the config of a model that only published rows use; empty when none is known."""
    return dict(_measured().get(name, {}).get("config") or {})


@cache
def _index() -> dict[str, tuple[str, bool]]:
    """Folded spelling -> (short name, whether it is in the catalogue)."""
    index: dict[str, tuple[str, bool]] = {}
    for in_catalogue, entries in ((False, _measured()), (True, load_catalogue())):
        for name, entry in entries.items():
            hub_name = str(entry.get("hub_id", "")).rsplit("/", 1)[-1]
            for spelling in (*entry.get("aliases", ()), hub_name):
                index.setdefault(squash(spelling.rsplit("/", 1)[-1]), (name, in_catalogue))
    for in_catalogue, entries in ((False, _measured()), (True, load_catalogue())):
        index |= {squash(name): (name, in_catalogue) for name in entries}
    return index


def _measured_model(entry: dict[str, Any]) -> ModelSpec:
    """Return a measured model; towers that are only counted become one flat parameter."""
    spec = model_spec_from_config(entry["config"], name=entry["name"], source="measured models")
    count = entry.get("tower_parameters", 0)
    if not count:
        return spec
    tower = ModuleSpec(name="tower", kind=ModuleKind.PARAMETER, shapes=((count,),))
    return replace(spec, towers=(*spec.towers, tower))


@cache
def loaded_model(text: str) -> ModelSpec:
    """Return a named model that is only loaded; encoders, of which only a size is known, included."""
    for candidate in _candidates(text):
        entry = _measured().get(candidate)
        if entry and not entry["config"]:
            return model_of_size(int(entry["parameters"]))
    return model_named(text)


@cache
def model_named(text: str) -> ModelSpec:
    """Return the model a row names; raises NotCovered when no size or family is known."""
    for candidate in _candidates(text):
        found = _index().get(squash(candidate))
        if found and not found[1] and not _measured()[found[0]]["config"]:
            raise NotCovered(f"{text[:60]!r} is an encoder, not a decoder")
        if found:
            name, in_catalogue = found
            if in_catalogue:
                return catalogue_model(name)
            return _measured_model(_measured()[name])
    raise NotCovered(f"the model {text[:60]!r} is not known or not named")


def _candidates(text: str) -> list[str]:
    """Return spellings from the most to the least exact."""
    plain = re.sub(r"\s*--.*$|\s+\+ .*$|\s+fine-tune.*$", "", text)
    plain = re.sub(r"\(.*?\)", "", plain).strip()
    sized = re.search(r"([\w.\-]+) class", text)
    if sized and (not plain or plain.startswith("models/")):
        plain = sized[1]
    name = plain.rsplit("/", 1)[-1].lower().strip()
    name = re.sub(r"(\d) b\b", r"\1b", name)
    name = re.sub(r"[ _]+", "-", name)
    found = [name]
    for pattern, replacement in _SPELLINGS:
        changed = re.sub(pattern, replacement, name)
        if changed != name:
            found.append(changed)
            name = changed
    while True:
        shorter = re.sub(rf"[-_.]({'|'.join(map(re.escape, _SUFFIXES))})$", "", name)
        if shorter == name:
            break
        name = shorter
        found.append(name)
        for pattern, replacement in _SPELLINGS:
            changed = re.sub(pattern, replacement, name)
            if changed != name:
                found.append(changed)
    return found


_GPU_SPELLINGS = (
    (r"v100.*32", "v100-32gb"),
    (r"v100", "v100-16gb"),
    (r"a100.*40", "a100-40gb"),
    (r"a100.*80|a800", "a100-80gb"),
    (r"h100.*nvl", "h100-nvl"),
    (r"h100|h800", "h100"),
    (r"h200", "h200"),
    (r"\bt4\b", "t4"),
    (r"a10g", "a10g"),
    (r"l40s", "l40s"),
    (r"\bl4\b", "l4"),
    (r"3080 ti laptop", "rtx-3080-ti-laptop"),
    (r"3070 laptop", "rtx-3070-laptop"),
)


_SIZE = re.compile(r"\b\d+ ?g[bi]+\b")


OTHER_SIZES = ((r"h100.{0,9}\b96 ?gb", 95),)
"""Cards with more memory than the one sold under their name: GiB that torch saw, by torchtitan's own logs
(30.99GiB(32.62%))."""
SEVERAL_SIZES = {"a100": "a100-80gb"}
"""Cards sold with several memory sizes -> one of them, for figures that do not depend on the size."""


@cache
def machine_named(
    text: str, num_gpus: int = 1, total_gib: float = 0.0, *, any_memory: bool = False
) -> Machine:
    """Return the machine a row names; `total_gib` or a printed "(79.22 GiB)" is what torch saw.

    `any_memory`: the figure is what tensors take, on a card of any size. Raises NotCovered when neither the card nor its memory is known: nothing is assumed.
    """
    printed = re.search(r"\(([\d.]+) GiB\)", text)
    total = total_gib or (float(printed[1]) if printed else 0.0)
    name = re.sub(r"^\d+x ", "", text.lower())
    total = total or next((size for pattern, size in OTHER_SIZES if re.search(pattern, name)), 0.0)
    bare = re.sub(r"\(.*|,.*", "", name).strip()
    choices = [alias for pattern, alias in _GPU_SPELLINGS if re.search(pattern, name)][:1]
    if any_memory and bare in SEVERAL_SIZES:
        choices.append(SEVERAL_SIZES[bare])
    for choice in (*choices, bare, _SIZE.sub("", bare).strip()):
        try:
            spec = find_gpu(choice)
        except VramwiseError:
            continue
        vram = int(total * GiB) if total else spec.torch_total_bytes
        if vram:
            return make_machine(spec.id, gpus=num_gpus, vram=vram)
    if total:
        return make_machine(gpus=num_gpus, vram=int(total * GiB))
    raise NotCovered(f"the card {text[:40]!r} is not known" if text else "the row names no card")
