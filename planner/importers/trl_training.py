"""A TRL config as a run of this trainer: the `train:` section, the recipe as it is trained, and what differs.

Every field of the file gives one line. A field that would change what is learned and has no place here is
refused by name; planner/importers/trl_fields.py is the table that says which.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import UnsupportedError
from planner.importers import trl_parts as parts
from planner.importers.settings import Imported
from planner.importers.trl_fields import Row
from planner.importers.trl_made import Made
from planner.importers.trl_values import Fields, put, same
from planner.run.recipe import Method, Task

TOOLS = ("trl", "alignment-handbook", "open-r1")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What became of one field of the file."""

    field: str
    value: str
    kind: str
    """As in the table: same, changed, none or refused."""
    ours: str = ""
    """Fields here and their values."""
    note: str = ""

    @property
    def line(self) -> str:
        """Return it as one line."""
        taken = f" -> {self.ours}" if self.ours else ""
        if self.kind == "none":
            return f"{self.field} {self.value}: not read, {self.note}"
        if self.kind == "refused":
            return f"{self.field} {self.value}: as here"
        note = f"; {self.note}" if self.note and self.kind == "changed" else ""
        return f"{self.field} {self.value}{taken}{note}"


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A run file of ours, made of a TRL config."""

    document: dict[str, Any]
    differences: list[Difference] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    """Dotted name -> the part of all steps that it is, where the file gives no number of steps."""
    dialogues_in_full: bool = False
    """SFT: the loss of a dialogue is on all of its tokens, as TRL's is unless the file says otherwise."""


def convert(imported: Imported) -> Converted:
    """Return the run; raises UsageError or UnsupportedError for what cannot be carried over."""
    task = imported.run.recipe.task
    if imported.tool not in TOOLS:
        raise UnsupportedError(
            f"a config of {imported.tool} is planned, not trained",
            hint="vramwise plan FILE --save run.yaml, and give it a train: section; TRL's are trained",
        )
    if task not in (Task.SFT, Task.GRPO):
        raise UnsupportedError(f"TRL's {task} is planned, not trained", hint="sft or grpo")
    fields = Fields(imported)
    made = Made(fields=fields)
    for part in (*parts.BOTH, *(parts.GRPO if task is Task.GRPO else parts.SFT)):
        part(made)
    put(made.document, "model", imported.run.model)
    _recipe(made, imported)
    differences = [
        _difference(fields.rows[name], fields.given[name], made) for name in fields.given
    ]
    differences += [
        Difference(field=name, value=f"{_short(fields[name])} (TRL's default)", kind="changed", note=note)
        for name, note in made.notes.items()
        if name not in fields.given
    ]  # fmt: skip
    return Converted(
        document=made.document,
        differences=differences,
        shares=made.shares,
        dialogues_in_full=made.dialogues_in_full,
    )


def _recipe(made: Made, imported: Imported) -> None:
    """Put the imported recipe in, with what this trainer does in another way."""
    recipe = imported.run.recipe
    kept = recipe.model_dump(mode="json", exclude_unset=True)
    for name in (
        "framework",
        "mixed_precision",
        "loss",
        "algorithm",
        "packing",
        "engine",
        "compile",
    ):
        kept.pop(name, None)
    if kept.get("reference") in ("none", "adapter-off"):
        kept.pop("reference")
    if not kept.get("beta"):
        kept.pop("beta", None)
    if recipe.method is not Method.QLORA:
        kept.pop("quantization", None)
    if recipe.dtype == "fp32" and recipe.mixed_precision in ("bf16", "fp16"):
        kept["dtype"] = recipe.mixed_precision
        made.notes["dtype"] = made.fields.rows["dtype"].note
        if recipe.method is Method.FULL:
            kept["master_weights"] = True
    lora = {k: v for k, v in {**kept.pop("lora", {}), **made.lora}.items() if v not in (False, [])}
    if recipe.method is not Method.FULL:
        kept["lora"] = lora
    made.document["recipe"] = {**kept, **made.document.get("recipe", {})}
    if imported.run.revision:
        made.document["revision"] = imported.run.revision
    if imported.run.machine.gpus > 1:
        made.document["machine"] = {"gpus": imported.run.machine.gpus}


def _difference(row: Row, value: Any, made: Made) -> Difference:
    said = [
        f"{name} {_short(found)}"
        for name in row.ours
        if (found := _at(made.document, name)) is not None
    ]
    own = made.notes.get(row.field, "")
    kind = "changed" if own and row.kind == "same" else row.kind
    if kind == "changed" and not own and same(value, False):
        kind = "same"
    if row.kind in ("same", "changed") and not said and not own:
        return Difference(
            field=row.field,
            value=_short(value),
            kind="same",
            note=row.note,
            ours="" if same(value, row.default) else "nothing to set",
        )
    return Difference(
        field=row.field,
        value=_short(value),
        kind=kind,
        ours=", ".join(said),
        note=own or row.note,
    )


def _at(document: Mapping[str, Any], name: str) -> Any:
    found: Any = document
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def resolve_shares(converted: Converted, *, steps: int) -> dict[str, Any]:
    """Return the document with everything that is a share of all `steps` as a number."""
    for name, share in converted.shares.items():
        # as transformers does: the ceiling for a warm-up, at least one step
        put(converted.document, name, max(1, math.ceil(share * steps)))
    return converted.document
