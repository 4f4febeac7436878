"""Reads a config.json's fields: class defaults, old spellings, and one clear error for each bad value."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from planner.datafiles import data_dir
from planner.errors import UsageError

MAX_COUNT = 2**40
"""Larger than any width, vocabulary or context a model has."""
MAX_LAYERS = 10_000
_LAYER_FIELDS = {"num_hidden_layers", "n_layer", "depth", "num_nextn_predict_layers"}
_MISSING: Any = object()


@lru_cache(maxsize=1)
def _class_table() -> dict[str, dict[str, Any]]:
    path = data_dir() / "models" / "class_defaults.json"
    table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["model_types"]
    return table


def known_model_types() -> list[str]:
    """Return the model types whose class defaults are in data/models/class_defaults.json."""
    return sorted(_class_table())


class ConfigFields:
    """One (sub-)config: typed getters that fall back to the class default of its model type.

    An absent key takes the class default, as transformers' config class does; an explicit null
    stays null. Raises UsageError naming the field, its value and what is allowed.
    """

    def __init__(self, config: object, model_type: str, *, path: str = "") -> None:
        if not isinstance(config, Mapping):
            raise UsageError(
                f"{path or 'config.json'}: expected an object of fields, got {_show(config)}"
            )
        self.config: Mapping[str, Any] = config
        self.model_type = model_type
        self.path = path
        entry = _class_table().get(model_type, {})
        self.defaults: Mapping[str, Any] = entry.get("defaults", {})
        self.architecture: str = entry.get("architecture", "")
        self.sub_types: Mapping[str, str] = entry.get("sub_configs", {})
        self._spellings: dict[str, tuple[str, ...]] = {}
        for alias, name in entry.get("aliases", {}).items():
            # transformers sets the alias last, so it wins where a config has both
            both = (*(n for n in self._spellings.get(name, (name,)) if n != name), alias, name)
            self._spellings[name] = both
            self._spellings[alias] = both

    def label(self, field: str) -> str:
        """Return the field's full name for an error, for example "text_config.hidden_size"."""
        return f"{self.path}.{field}" if self.path else field

    def error(self, field: str, value: object, allowed: str) -> UsageError:
        """Return the error for a value that is not allowed."""
        return UsageError(f"{self.label(field)}: {_show(value)} is not allowed", hint=allowed)

    def has(self, field: str) -> bool:
        """Say whether the config itself (not the class) sets the field to something but null."""
        return self._given(field) not in (_MISSING, None)

    def _given(self, field: str) -> Any:
        for name in self._spellings.get(field, (field,)):
            if name in self.config:
                return self.config[name]
        return _MISSING

    def raw(self, field: str, default: Any = _MISSING) -> Any:
        """Return the field's value, else `default`, else the class default."""
        value = self._given(field)
        if value is not _MISSING:
            return value
        if default is not _MISSING:
            return default
        for name in self._spellings.get(field, (field,)):
            if name in self.defaults:
                return self.defaults[name]
        raise UsageError(
            f"{self.label(field)}: missing, and {self.model_type!r} has no default for it",
            hint="the config.json is incomplete; take the file from the model's repository",
        )

    def integer(self, field: str, default: Any = _MISSING, *, least: int = 1) -> int:
        """Return a whole number from `least` up."""
        return self.whole(field, self.raw(field, default), least)

    def optional(self, field: str, default: Any = _MISSING, *, least: int = 1) -> int | None:
        """Return a whole number, or None where the field is null."""
        value = self.raw(field, default)
        return None if value is None else self.whole(field, value, least)

    def whole(self, field: str, value: Any, least: int = 1) -> int:
        """Return `value`, said to be of `field`, as a whole number from `least` up."""
        most = MAX_LAYERS if field in _LAYER_FIELDS else MAX_COUNT
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not least <= value <= most:
            raise UsageError(
                f"{self.label(field)}: {_show(value)} is not allowed",
                hint=f"a whole number from {least} to {most}",
            )
        return int(value)

    def flag(self, field: str, default: Any = _MISSING) -> bool:
        """Return true or false."""
        value = self.raw(field, default)
        if not isinstance(value, bool):
            raise UsageError(
                f"{self.label(field)}: {_show(value)} is not allowed", hint="true or false"
            )
        return value

    def number(self, field: str, default: Any = _MISSING) -> float:
        """Return a finite number; null is 0."""
        value = self.raw(field, default)
        if value is None:
            return 0.0
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or abs(value) > 1e12
        ):
            raise UsageError(
                f"{self.label(field)}: {_show(value)} is not allowed", hint="a finite number"
            )
        return float(value)

    def text(self, field: str, default: Any = _MISSING) -> str:
        """Return a string."""
        value = self.raw(field, default)
        if not isinstance(value, str):
            raise UsageError(f"{self.label(field)}: {_show(value)} is not allowed", hint="a string")
        return value

    def items(self, field: str, default: Any = _MISSING) -> list[Any] | None:
        """Return a list, or None where the field is null."""
        value = self.raw(field, default)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MAX_LAYERS:
            raise UsageError(f"{self.label(field)}: {_show(value)} is not allowed", hint="a list")
        return list(value)

    def auto(self, field: str, otherwise: int) -> int:
        """Return a whole number, or `otherwise` where the field says "auto"."""
        return otherwise if self.raw(field) == "auto" else self.integer(field)

    def pattern(self, field: str, num_layers: int, allowed: Sequence[str]) -> list[str] | None:
        """Return one of `allowed` for every layer, or None where the field is null or absent."""
        values = self.items(field, None)
        if values is None:
            return None
        if len(values) != num_layers:
            raise UsageError(
                f"{self.label(field)}: {len(values)} entries for {num_layers} layers",
                hint="one entry for every layer",
            )
        for value in values:
            if value not in allowed:
                raise UsageError(
                    f"{self.label(field)}: {_show(value)} is not allowed",
                    hint=f"one of {', '.join(allowed)}",
                )
        return values

    def sub(self, field: str, model_type: str = "") -> "ConfigFields":
        """Return the fields of a nested config; null or absent means all class defaults."""
        value = self.raw(field, None)
        value = {} if value is None else value
        kind = model_type or (
            str(value.get("model_type") or self.sub_types.get(field, ""))
            if isinstance(value, Mapping)
            else ""
        )
        return ConfigFields(value, kind, path=self.label(field))

    def divide(self, field: str, amount: int, by_field: str, parts: int) -> int:
        """Return amount / parts, or say which two fields do not divide."""
        if amount % parts:
            raise UsageError(
                f"{self.label(field)}: {amount} is not a multiple of {by_field} {parts}",
                hint="heads must divide the width they share",
            )
        return amount // parts


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
