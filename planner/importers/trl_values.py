"""The fields of a TRL file as values of TRL's own types; unknown names and refused values are errors."""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.importers.settings import Imported, as_bool, as_int
from planner.importers.trl_fields import Row, rows_of, version

OTHER_NAMES = {
    # Python: LoraConfig, BitsAndBytesConfig, from_pretrained
    "r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters", "task_type": "lora_task_type", "model": "model_name_or_path",
    "model_name": "model_name_or_path", "bnb_4bit_use_double_quant": "use_bnb_nested_quant", "revision": "model_revision",
    # older releases
    "torch_dtype": "dtype", "max_seq_length": "max_length", "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps", "use_liger": "use_liger_kernel", "use_liger_loss": "use_liger_kernel",
}  # fmt: skip
OLDER: dict[str, Row] = {
    row.field: row
    for row in (
        Row(field="max_prompt_length", default=None, kind="same", ours=("recipe.prompt_length",)),
        Row(field="bnb_4bit_compute_dtype", default=None, kind="none", note="4-bit weights are computed in recipe.dtype"),
        Row(field="bias", default="none", kind="same", ours=("recipe.lora.bias",)),
        Row(field="init_lora_weights", default=None, kind="same", ours=("recipe.lora.init",)),
        Row(field="group_by_length", default=False, kind="none", note="micro-batches are filled by tokens"),
        Row(field="logging_dir", default=None, kind="none", note="in the output folder"),
        Row(field="env", default=None, kind="none", note="set variables where you start the run"),
        Row(field="accelerate_config", default="single_gpu", kind="refused", note="one device: single_gpu"),
        Row(field="num_processes", default=1, kind="refused", note="one device"),
        Row(field="overwrite_output_dir", default=False, kind="same", ours=("train.overwrite",)),
    )
}  # fmt: skip
"""Fields of older releases and of PEFT that a file may still hold."""


class Fields:
    """What a file says, and TRL's defaults for the rest."""

    def __init__(self, imported: Imported) -> None:
        task = imported.run.recipe.task
        self.rows = {**OLDER, **rows_of(task)}
        self.script = imported.script
        self.given: dict[str, Any] = {}
        """In TRL's own names and types."""
        for name in imported.unknown:
            row = self.rows.get(OTHER_NAMES.get(name, name))
            if row is None or row.kind != "none":
                raise UnsupportedError(
                    f"{name}: only running the script would give its value",
                    hint="write it into a YAML file for `trl sft --config` or `trl grpo --config`",
                )
        for key, value in _nested(imported.values).items():
            name = key if key in self.rows else OTHER_NAMES.get(key, key)
            row = self.rows.get(name)
            if row is None:
                near = difflib.get_close_matches(key, self.rows, n=3, cutoff=0.6)
                raise UsageError(
                    f"{key}: TRL {version()} has no such field for {task}",
                    hint=f"did you mean {', '.join(near)}?" if near else "take it out",
                )
            found = typed(value, row)
            if row.kind == "refused" and not same(found, row.default):
                raise UnsupportedError(
                    f"{key}: {str(value)[:60]} cannot be trained here",
                    hint=row.note or f"leave it out ({row.default})",
                )
            self.given[name] = found

    def __getitem__(self, name: str) -> Any:
        """Return the file's value, else TRL's default."""
        return self.given.get(name, self.rows[name].default)

    def says(self, *names: str) -> bool:
        """Return whether the file sets one of them."""
        return any(name in self.given for name in names)


def typed(value: Any, row: Row) -> Any:
    """Return a YAML value or a flag's word as TRL would read it; raises UsageError."""
    if isinstance(value, str) and value.strip().lower() in ("none", "null"):
        value = None
    if value is None:
        return None
    if isinstance(row.default, bool):
        read: Any = as_bool(value)
    elif isinstance(row.default, int) and not isinstance(value, float):
        read = as_int(value)
        read = _number(value) if read is None else read
    elif isinstance(row.default, int | float):
        read = _number(value)
    else:
        return _free(value)
    if read is None:
        raise UsageError(
            f"{row.field}: {str(value)[:60]!r} is not allowed", hint=f"like {row.default}"
        )
    return read


def same(value: Any, default: Any) -> bool:
    """Return whether a value is TRL's default, in whatever words."""
    empty: tuple[Any, ...] = (None, "", False, [], {}, "no", "none")
    return value == default or (value in empty and default in empty)


def put(document: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name in nested mappings."""
    *path, last = name.split(".")
    for part in path:
        document = document.setdefault(part, {})
    document[last] = value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat keys with those of dictionaries (generation_kwargs.stop) put together again."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        head, dot, tail = key.partition(".")
        if not dot:
            found[key] = value
        elif isinstance(found.setdefault(head, {}), dict):
            put(found[head], tail, value)
    return found


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _free(value: Any) -> Any:
    """Return a word as the number, switch or mapping that it spells."""
    if not isinstance(value, str):
        return value
    word = value.strip()
    if word[:1] in "{[":
        try:
            return json.loads(word)
        except ValueError:
            return value
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), value)
