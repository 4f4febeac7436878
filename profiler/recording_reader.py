"""Reads a recording from untrusted JSON: every field checked, unknown ones refused. No torch here."""

from dataclasses import MISSING, fields
from typing import Any, NoReturn, TypeVar

from planner.errors import UsageError
from planner.units import MAX_BYTES
from profiler.recording_parts import SCHEMA_VERSION, Event, LiveTensor, PhaseRecord

Made = TypeVar("Made")
MAX_EVENTS = 20_000_000


class Reader:
    """Turns untrusted JSON into a Recording, field by field."""

    def __init__(self, label: str) -> None:
        self._label = label

    def recording(self, document: Any, kind: type[Made]) -> Made:
        """Return the recording, a `kind`; raises UsageError naming the field."""
        self._object(document, "document")
        version = document.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            self._fail("schema_version", version, f"{SCHEMA_VERSION}")
        values = self._fields(document, kind, "")
        values["phases"] = self._list(document, "phases", self._phase, 64)
        values["largest"] = self._list(document, "largest", self._tensor, 10_000)
        values["events"] = self._list(document, "events", self._event, MAX_EVENTS)
        values["timeline"] = self._list(document, "timeline", self._sample, MAX_EVENTS)
        values["notes"] = self._list(document, "notes", self._text, 10_000)
        self._object(values["environment"], "environment")
        names = [phase.name for phase in values["phases"]]
        if len(set(names)) != len(names):
            self._fail("phases", names, "every phase once")
        return kind(**values)

    def _fields(self, document: dict[str, Any], kind: Any, where: str) -> dict[str, Any]:
        """Check the scalar fields of a dataclass by their annotations; lists come later."""
        known = {item.name: item for item in fields(kind)}
        for name in document:
            if name not in known:
                self._fail(where + str(name)[:60], "unknown field", ", ".join(known))
        values: dict[str, Any] = {}
        for name, item in known.items():
            if name not in document:
                if item.default is MISSING and item.default_factory is MISSING:
                    self._fail(where + name, "missing", "a value")
                continue
            values[name] = self._scalar(document[name], item.type, where + name)
        return values

    def _scalar(self, value: Any, kind: Any, where: str) -> Any:
        kind = kind.__name__ if isinstance(kind, type) and kind is not dict else str(kind)
        if "None" in kind and value is None:
            return None
        if kind.startswith("int"):
            return self._size(value, where)
        if kind == "str":
            return self._text(value, where)
        if kind == "bool" and not isinstance(value, bool):
            self._fail(where, value, "true or false")
        if kind.startswith("dict[str, int]"):
            self._object(value, where)
            for name, size in value.items():
                self._size(size, f"{where}.{str(name)[:60]}")
        return value

    def _phase(self, document: Any, where: str) -> PhaseRecord:
        self._object(document, where)
        return PhaseRecord(**self._fields(document, PhaseRecord, where + "."))

    def _tensor(self, document: Any, where: str) -> LiveTensor:
        self._object(document, where)
        values = self._fields(document, LiveTensor, where + ".")
        values["shape"] = tuple(self._list(document, "shape", self._size, 64, where=f"{where}."))
        return LiveTensor(**values)

    def _event(self, document: Any, where: str) -> Event:
        self._object(document, where)
        event = Event(**self._fields(document, Event, where + "."))
        if event.kind not in ("alloc", "free"):
            self._fail(where + ".kind", event.kind, "alloc or free")
        return event

    def _sample(self, document: Any, where: str) -> dict[str, Any]:
        self._object(document, where)
        return dict(document)

    def _list(
        self, document: dict[str, Any], name: str, read: Any, most: int, *, where: str = ""
    ) -> tuple[Any, ...]:
        value = document.get(name, [])
        if not isinstance(value, (list, tuple)) or len(value) > most:
            self._fail(where + name, type(value).__name__, f"a list of at most {most}")
        return tuple(read(item, f"{where}{name}[{index}]") for index, item in enumerate(value))

    def _object(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            self._fail(where, type(value).__name__, "an object")

    def _text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self._fail(where, value, "text")
        return str(value)

    def _size(self, value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_BYTES:
            self._fail(where, value, "a whole number from 0 to 2^60")
        return int(value)

    def _fail(self, where: str, value: Any, allowed: str) -> NoReturn:
        raise UsageError(
            f"{self._label}: {where}: {str(value)[:60]!r} is not allowed", hint=allowed
        )
