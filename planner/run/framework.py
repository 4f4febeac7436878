"""Frameworks: how a code base implements a recipe, read from data/frameworks.

One JSON file per framework and range of versions. `defaults` are recipe fields by task ("all"
first, then the task's own), `switches` say what the code does with memory, `logits` names every
tensor of vocabulary width with its dtype. Every file says where it was read, and when.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from planner.datafiles import data_dir
from planner.errors import UnknownNameError
from planner.run.runfile import validate
from planner.run.switches import Switches


@dataclass(frozen=True, kw_only=True)
class LogitsLaw:
    """What one implementation of the loss keeps per (token x vocabulary) element, or its tiles."""

    kind: str
    """full, chunked (whole rows of the vocabulary) or tiled (rows by columns, never a whole row)."""
    forward: tuple[tuple[str, str], ...] = ()
    """(tensor, dtype) alive when the forward of the loss is at its largest; see `width`."""
    backward: tuple[tuple[str, str], ...] = ()
    order: tuple[str, ...] = ()
    """Every allocation of the loss in order, for the allocator's replay: "name: dtype", "-name" for a
    free, "a > b: dtype" for a copy that replaces a, "|" where the backward starts. `shifted` after the
    dtype: a row less for each sequence; `downcast`: back to 16 bits, nothing in fp32."""
    rows: str = "all"
    """all tokens of the micro-batch, or completion tokens only."""
    chunk_rows: int = 0
    chunk_count: int = 0
    """Instead of chunk_rows: the rows are cut into this many chunks."""
    chunk_ratio: bool = False
    """Rows are the next power of two of N / ceil(V / H), so that a chunk is as large as hidden."""
    chunk_vocab: int = 0
    """0 = the whole vocabulary."""
    chunk: tuple[tuple[str, str], ...] = ()
    """(tensor, dtype) per element of a chunk."""
    hidden: tuple[tuple[str, str], ...] = ()
    """(tensor, dtype) of [rows, H] kept until the loss is done."""
    head_grad: tuple[tuple[str, str], ...] = ()
    """(tensor, dtype) of [V, H] beside the gradient itself when the head is trained."""
    drops_hidden: bool = False
    """The rows are copied, so the norm's output is free again before the head runs."""
    max_chunk_bytes: int = 0
    """Chunk rows are chosen so that one chunk stays below this."""
    min_chunk_bytes: int = 0
    head_share: int = 0
    """tiled: a tile may take the head's 16-bit weight over this, between min and max_chunk_bytes."""
    tile_rows: int = 0
    """tiled: rows of one tile at most; its columns are what the budget leaves."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework and range of versions."""

    name: str
    title: str
    versions: str
    aliases: tuple[str, ...] = ()
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)
    logits: dict[str, LogitsLaw] = field(default_factory=dict)
    source: str = ""
    retrieved: str = ""
    notes: str = ""

    @cache  # noqa: B019  (frameworks live as long as the process)
    def task_defaults(self, task: str) -> dict[str, Any]:
        """Return the defaults of one task."""
        return {**self.defaults.get("all", {}), **self.defaults.get(task, {})}

    def law(self, task: str, loss: str) -> LogitsLaw:
        """Return the logits law of a task and loss kind ("full" or "chunked")."""
        for key in (f"{task}-{loss}", loss):
            if key in self.logits:
                return self.logits[key]
        return _common_laws()[loss]

    def __hash__(self) -> int:
        return hash(self.name)


@cache
def frameworks() -> dict[str, Framework]:
    """Return every framework by name."""
    found = {}
    for entry in sorted((data_dir() / "frameworks").iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".json") and not entry.name.startswith("_"):
            row = json.loads(entry.read_text(encoding="utf-8"))
            found[row["name"]] = _framework(row, label=f"data/frameworks/{entry.name}")
    return found


@cache
def _common_laws() -> dict[str, LogitsLaw]:
    text = (data_dir() / "frameworks" / "_losses.json").read_text(encoding="utf-8")
    return {name: _law(row) for name, row in json.loads(text)["laws"].items()}


@cache
def _index() -> dict[str, str]:
    return {
        alias: framework.name
        for framework in frameworks().values()
        for alias in (framework.name, *framework.aliases)
    }


def find_framework(name: str) -> Framework:
    """Return a framework by name or alias; raises UnknownNameError with near matches."""
    key = name.lower().strip()
    found = _index().get(key)
    if found is None:
        raise UnknownNameError("framework", name, _index(), hint=", ".join(frameworks()))
    return frameworks()[found]


def _framework(row: dict[str, Any], *, label: str) -> Framework:
    laws = {
        key: _common_laws()[law] if isinstance(law, str) else _law(law)
        for key, law in row.get("logits", {}).items()
    }
    return Framework(
        name=row["name"],
        title=row["title"],
        versions=row["versions"],
        aliases=tuple(row.get("aliases", ())),
        defaults=row.get("defaults", {}),
        switches=validate(Switches, row.get("switches", {}), label=f"{label}: switches"),
        logits=laws,
        source=row["source"],
        retrieved=row["retrieved"],
        notes=row.get("notes", ""),
    )


_PAIRS = ("forward", "backward", "chunk", "hidden", "head_grad")


def _law(row: dict[str, Any]) -> LogitsLaw:
    values: dict[str, Any] = {key: value for key, value in row.items() if key not in _PAIRS}
    values |= {key: tuple(row[key].items()) for key in _PAIRS if key in row}
    values["order"] = tuple(row.get("order", ()))
    return LogitsLaw(**values)


def width(dtype: str, act_bytes: int) -> int:
    """Return bytes per element of a law's dtype word.

    act: the compute dtype. fp32, bf16: what they say. upcast: an fp32 copy, nothing when the
    values are fp32 already. outputs: the model's outputs held by the caller (act).
    """
    if dtype == "act":
        return act_bytes
    if dtype == "upcast":
        return 4 if act_bytes < 4 else 0
    if dtype == "downcast":
        return act_bytes if act_bytes < 4 else 0
    return {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "bool": 1}[dtype]
