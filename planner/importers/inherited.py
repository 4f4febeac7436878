"""Configs that go on from another file: NeMo-RL's `defaults: ../grpo_math_1B.yaml`."""

from dataclasses import replace
from typing import Any

from planner.importers.context import Context
from planner.importers.loading import load_yaml

SECTIONS = frozenset(
    [
        *("policy", "grpo", "ppo", "dpo", "sft", "distillation", "loss_fn"),
        *("cluster", "checkpointing", "data_plane"),
    ]
)
"""NeMo-RL's own; what an inheriting file changes is a few keys of some of them."""
DEEPEST = 6


def inherits(document: dict[str, Any]) -> bool:
    """Return whether a document is a NeMo-RL config that names the one it goes on from."""
    return bool(_named(document)) and len(SECTIONS & set(map(str, document))) > 0


def _named(document: dict[str, Any]) -> list[str]:
    named = document.get("defaults")
    listed = named if isinstance(named, list) else [named]
    return [each for each in listed if isinstance(each, str) and each.endswith((".yaml", ".yml"))]


def whole(document: dict[str, Any], context: Context) -> tuple[dict[str, Any], list[str]]:
    """Return the document laid over the files it goes on from, and those that are not here."""
    return _whole(document, context, DEEPEST)


def _whole(
    document: dict[str, Any], context: Context, depth: int
) -> tuple[dict[str, Any], list[str]]:
    below: dict[str, Any] = {}
    missing: list[str] = []
    for name in _named(document) if depth else []:
        found = context.find(name)
        base = load_yaml(found[0]) if found is not None else None
        if found is None or not isinstance(base, dict):
            missing.append(name)
            continue
        under, lost = _whole(base, replace(context, path=found[1]), depth - 1)
        below = _laid_over(below, under)
        missing += lost
    own = {key: value for key, value in document.items() if key != "defaults"}
    return _laid_over(below, own), missing


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    found = dict(below)
    for key, value in above.items():
        under = found.get(key)
        if isinstance(under, dict) and isinstance(value, dict):
            value = _laid_over(under, value)
        found[key] = value
    return found
