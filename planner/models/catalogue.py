"""The catalogue: models by short name, alias and hub id, with their configs and exact counts."""

import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from planner.datafiles import data_dir
from planner.errors import words_of
from planner.families import model_spec_from_config
from planner.models.spec import ModelSpec
from planner.names import folded

_ACTIVE = re.compile(r"-a[\d.]+b$")


@lru_cache(maxsize=1)
def load_catalogue() -> dict[str, dict[str, Any]]:
    """Return every catalogue entry by its short name: config, exact count, aliases, sources."""
    text = (data_dir() / "models" / "catalogue.jsonl").read_text(encoding="utf-8")
    entries = [json.loads(line) for line in text.splitlines()]
    return {entry["name"]: entry for entry in entries}


def catalogue_names() -> list[str]:
    """Return the short names of the catalogue, in its order."""
    return list(load_catalogue())


@lru_cache(maxsize=1)
def model_names() -> dict[str, str]:
    """Every spelling, in lower case, to its short name; short names win over aliases."""
    names: dict[str, str] = {}
    for name, entry in load_catalogue().items():
        for spelling in (*entry["aliases"], entry["hub_id"]):
            names[spelling.lower()] = name
            owner = entry["hub_id"].split("/")[0]
            names[f"{owner}/{spelling}".lower()] = name
    return names | {name: name for name in load_catalogue()}


@lru_cache(maxsize=512)
def catalogue_model(name: str) -> ModelSpec:
    """Return the catalogue's model of this short name."""
    entry = load_catalogue()[name]
    spec = model_spec_from_config(entry["config"], name=name, source="catalogue")
    return replace(spec, hub_id=entry["hub_id"])


def model_named(name: str) -> str | None:
    """Return the catalogue's short name for what somebody typed; None when it could be several or none."""
    found = models_like(name)
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=512)
def models_like(name: str) -> tuple[str, ...]:
    """Return every catalogue model that a typed name could mean, the likest first."""
    spellings = model_names()
    text = name.strip().lower()
    if text in spellings:
        return (spellings[text],)
    leaf = text.rsplit("/", 1)[-1]
    same = {short for known, short in spellings.items() if folded(known) == folded(leaf)}
    if len(same) == 1:
        return tuple(same)
    asked = words_of(leaf)
    # a name is all words that were typed, in any order, and perhaps more
    wide = [short for short in catalogue_names() if _has_all(asked, short)]
    # the one that adds nothing but its active parameters, before those of another kind: no VL, no Coder
    plain = [short for short in wide if set(words_of(_ACTIVE.sub("", short))) <= set(asked)]
    if len(plain) == 1:
        return tuple(plain)
    return tuple(sorted(wide, key=lambda short: (len(words_of(short)), len(short))))


def _has_all(asked: list[str], name: str) -> bool:
    own = words_of(name)
    return bool(asked) and all(
        word in own or (word.isalpha() and any(each.startswith(word) for each in own))
        for word in asked
    )
