"""TRL's fields -> ours, or why not: the table of data/importers/trl_fields.json.

It is what the importer goes by, what docs/trl-fields.md shows, and what a test holds against the installed
dataclasses.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner.datafiles import data_dir
from planner.run.recipe import Task

KINDS = {
    "same": "does the same here",
    "changed": "carried over; what differs is said",
    "none": "not read: nothing that is learned depends on it",
    "refused": "any other value than TRL's default stops the run",
    "plan": "planned, not trained",
    "later": "not here yet: DPO is planned, not trained",
}
CONFIGS: dict[Task, tuple[str, ...]] = {
    Task.SFT: ("SFTConfig", "TrainingArguments", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig"),
    Task.GRPO: ("GRPOConfig", "TrainingArguments", "ModelConfig", "ScriptArguments", "GRPOScriptArguments",
                "DatasetMixtureConfig"),
}  # fmt: skip
"""The dataclasses that the scripts of TRL's command line read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What becomes of one field of TRL."""

    field: str
    default: Any
    """TRL's."""
    kind: str
    """One of KINDS."""
    ours: tuple[str, ...] = ()
    """Dotted names of run.yaml."""
    note: str = ""


@cache
def version() -> str:
    """Return the version of TRL that the table was read from."""
    return str(_document()["version"])


@cache
def table(config: str) -> dict[str, Row]:
    """Return field -> row of one dataclass; a trainer's config has its own defaults of inherited fields."""
    return {
        name: Row(
            field=name,
            default=row["default"],
            kind=row["kind"],
            ours=tuple(row.get("ours", ())),
            note=row.get("note", ""),
        )
        for name, row in _document()["configs"][config].items()
        if "kind" in row
    }


@cache
def rows_of(task: Task) -> dict[str, Row]:
    """Return field -> row of everything that a task's script takes, with that task's defaults."""
    found: dict[str, Row] = {}
    for config in CONFIGS[task]:
        found = {**table(config), **found}
    for name, default in inherited_defaults(CONFIGS[task][0]).items():
        row = found[name]
        found[name] = Row(field=name, default=default, kind=row.kind, ours=row.ours, note=row.note)
    return found


@cache
def inherited_defaults(config: str) -> dict[str, Any]:
    """Return the inherited fields that a trainer's config gives another default."""
    rows = _document()["configs"][config]
    return {name: row["default"] for name, row in rows.items() if "kind" not in row}


@cache
def _document() -> dict[str, Any]:
    text = (data_dir() / "importers" / "trl_fields.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
