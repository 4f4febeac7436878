"""One tool's settings while they are read: what was taken, what was defaulted, what is left over."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from planner.errors import UsageError
from planner.importers.keys import DTYPE, HARMLESS, MOVES, SETTLED, SIXTEEN, shown
from planner.importers.vocabulary import strange
from planner.run.framework import fallback_note, pick, spell
from planner.run.framework_files import Framework
from planner.run.recipe import EngineSection, LoraSection, MachineSection, Recipe, RunFile

_NUMBER = re.compile(r"^\s*(\d[\d_,]*(?:\.\d+)?)\s*([kKmMgGtT]?)\s*$")
SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
SCALES |= {letter.upper(): 1024 ** (place + 1) for place, letter in enumerate("kmgt")}
"""vLLM reads 32k as 32000 and 32K as 32768."""
_OPEN = re.compile(r"[$?{}<>()]|\bargs\.")
"""A variable or an expression, which nothing in the file resolves."""
_NOTHING = ("none", "null", "")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", *_NOTHING)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A key of the file that the recipe holds."""

    key: str
    value: str
    field: str


@dataclass(frozen=True, kw_only=True)
class Defaulted:
    """A recipe field that the file does not set: the tool's own default."""

    field: str
    value: str
    source: str
    """Tool and version that the default was read in."""


@dataclass(frozen=True, kw_only=True)
class NotUnderstood:
    """A key that the planner does not read."""

    key: str
    value: str
    effect: str
    """What it may do to memory; "unknown" if that is not known."""


@dataclass
class ImportReport:
    """What became of a foreign config."""

    tool: str
    version: str
    version_assumed: bool
    """The file does not say its version: this one was assumed, or follows from what it holds."""
    version_why: str = ""
    """What in the file, or beside it, the version follows from; empty where its user gave it."""
    taken: list[Taken] = field(default_factory=list)
    defaulted: list[Defaulted] = field(default_factory=list)
    not_understood: list[NotUnderstood] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    """What a person should know about memory: traps of this tool and version."""
    ignored_keys: list[str] = field(default_factory=list)
    """Keys without an effect on memory (learning rates, data, logging)."""

    @property
    def ignored(self) -> int:
        """How many keys have no effect on memory."""
        return len(self.ignored_keys)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A foreign config as a run file, and how it got there."""

    tool: str
    version: str
    run: RunFile
    report: ImportReport
    values: Mapping[str, Any] = field(default_factory=dict)
    """The file's keys, flat, as the tool would read them."""
    script: bool = False
    """They are keyword arguments of a Python script."""
    unknown: tuple[str, ...] = ()
    """Those whose value only running the script would give."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "tool": self.tool,
            "version": self.version,
            "run": self.run.model_dump(mode="json", exclude_defaults=True),
            "report": {**asdict(self.report), "ignored": self.report.ignored},
        }


MOVES_NOTE = "unknown to this reader, and its name says that it may move memory"


class Settings:
    """A foreign file's flat keys; every read is written into the report."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        tool: str,
        version: str,
        assumed: bool,
        why: str = "",
    ) -> None:
        self.values = {str(key): value for key, value in values.items()}
        self.report = ImportReport(
            tool=tool, version=version, version_assumed=assumed, version_why=why
        )
        self.used: set[str] = set()

    def law(self, family: str) -> Framework:
        """Return the law of the file's version, the nearest if none covers it."""
        return pick(f"{family}~{self.report.version}")

    def framework(self, family: str) -> str:
        """Return how the recipe names the law; a version without one is said, and its neighbour taken."""
        law, asked = self.law(family), spell(family, self.report.version)
        if note := fallback_note(law, asked):
            self.effect(note)
        assumed = self.report.version_assumed and law.name == family
        return family if assumed and not note else asked

    @property
    def source(self) -> str:
        """Tool and version, for defaults."""
        return f"{self.report.tool} {self.report.version}".strip()

    def has(self, *keys: str) -> bool:
        """Return whether one of the keys is set to something."""
        return any(self.values.get(key) is not None for key in keys)

    def raw(self, *keys: str, to: str = "", default: Any = None) -> Any:
        """Return the first key that is set and no ${variable} alone; record it, or the default."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                self.used.update(keys)
                if to:
                    self.report.taken.append(
                        Taken(key=key, value=shown(key, value)[:200], field=to)
                    )
                if strange(to, value):
                    self.unread(key, value, f"no word for {to} that is known; planned without it")
                return value
        self.used.update(keys)
        if default is not None and to:
            self.defaulted(to, default)
        return default

    def mapping(self, key: str) -> dict[str, Any] | None:
        """Return a section that was a mapping in the file, nested again; None where it is none."""
        whole = self.values.get(key)
        if isinstance(whole, Mapping):
            self.used.add(key)
            return dict(whole)
        prefix = f"{key}."
        found: dict[str, Any] = {}
        for name, value in self.values.items():
            if not name.startswith(prefix):
                continue
            self.used.add(name)
            inner = found
            *above, last = name.removeprefix(prefix).split(".")
            for part in above:
                inner = inner.setdefault(part, {}) if isinstance(inner, dict) else {}
            inner[last] = value
        if found:
            self.report.taken.append(Taken(key=key, value=str(found)[:200], field="sharding"))
        return found or None

    def defaulted(self, to: str, value: Any) -> None:
        """Record a default of the tool."""
        self.report.defaulted.append(Defaulted(field=to, value=str(value), source=self.source))

    def count(
        self, *keys: str, to: str, default: int | None = None, off: bool = False
    ) -> int | None:
        """Return a whole number of at least 1 ("8k" and "1_024" are read), or the default where none is set.

        `off`: 0 or less says in this tool that there is none: None. Raises UsageError for any other value;
        a variable that nothing in the file sets is reported, and the default used.
        """
        key, value = self._set_one(keys)
        if value is None or self._unset(key, value, to):
            if default is not None:
                self.defaulted(to, default)
            return default
        number = as_int(value)
        none = (number is not None and number < 1) or as_bool(value) is False
        if (number is None or number < 1) and not (off and none):
            self._refuse(key, value, "a whole number of at least 1" + (", or 0" if off else ""))
        self.report.taken.append(Taken(key=key, value=str(value), field=to))
        return None if none else number

    def number(self, *keys: str, to: str, default: float | None = None) -> float | None:
        """Return a real number, or the default where none is set; refuses like `count`."""
        key, value = self._set_one(keys)
        if value is None or self._unset(key, value, to):
            if default is not None:
                self.defaulted(to, default)
            return default
        real = as_real(value)
        if real is None:
            self._refuse(key, value, "a number")
        self.report.taken.append(Taken(key=key, value=str(value), field=to))
        return real

    def flag(self, *keys: str, to: str = "", default: bool = False) -> bool:
        """Return a switch, or the default where none is set; "true"/"false" words are read; refuses like `count`."""
        key, value = self._set_one(keys)
        unset = value is None or str(value).strip().lower() == "auto"
        if unset or self._unset(key, value, to or key):
            if to:
                self.defaulted(to, default)
            return default
        read = as_bool(value)
        if read is None:
            self._refuse(key, value, "true or false")
        if to:
            self.report.taken.append(Taken(key=key, value=str(value), field=to))
        return bool(read)

    def _set_one(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """Return the first of the keys that is set, and its value; ("", None) where none is."""
        value = self.raw(*keys)
        if isinstance(value, str) and value.strip().lower() in _NOTHING:
            return "", None
        return next((key for key in keys if self.values.get(key) is not None), ""), value

    def _unset(self, key: str, value: Any, to: str) -> bool:
        """Report a value that only the program or its shell would know; False for one that is written out."""
        if not (isinstance(value, str) and _OPEN.search(value)):
            return False
        self.unread(key, value, f"{to} could not be read; the default is used")
        return True

    def _refuse(self, key: str, value: Any, allowed: str) -> NoReturn:
        raise UsageError(
            f"{self.report.tool} config: {key}: {shown(key, value)[:60]!r} is not {allowed}",
            hint=f"leave {key} out for {self.report.tool}'s default",
        )

    def unread(self, key: str, value: Any, effect: str) -> None:
        """Record something that was not understood."""
        self.report.not_understood.append(
            NotUnderstood(key=key, value=shown(key, value)[:120], effect=effect)
        )

    def quiet(self, *prefixes: str) -> None:
        """Count the keys that begin so and that nobody read as those without an effect on memory.

        A key whose own words speak of memory is not among them, unless its whole name or, after "=", its
        beginning is listed: it is reported as unknown.
        """
        listed = tuple(word.removeprefix("=") for word in prefixes if word.startswith("="))
        open_ = tuple(word for word in prefixes if not word.startswith("="))
        for key in self.values:
            if key in self.used or not key.startswith((*listed, *open_)):
                continue
            moves = MOVES.search(_own_words(key, open_)) and not SETTLED.search(key)
            plain = DTYPE.search(key) and str(self.values[key]) in SIXTEEN
            plain = plain or (key.endswith("parallel_size") and as_int(self.values[key]) == 1)
            plain = plain or self.values[key] in (0, 0.0, [], "0.0")
            moves = moves and not plain
            if key in open_ or key.startswith(listed) or not moves:
                self.used.add(key)
                self.report.ignored_keys.append(key)

    def without_disabled(self) -> None:
        """Take what stands beside an `enabled: false` as read: that section does nothing."""
        for key, value in self.values.items():
            if key.endswith(".enabled") and as_bool(value) is False:
                self.quiet(f"={key.removesuffix('enabled')}")

    @staticmethod
    def note_unknown(report: "ImportReport", key: str) -> None:
        """Record a script's value that only running it would give."""
        report.not_understood.append(
            NotUnderstood(
                key=key,
                value="",
                effect="the value is computed when the program runs; the default was used",
            )
        )

    def effect(self, sentence: str) -> None:
        """Record a memory effect a person should know."""
        if sentence not in self.report.effects:
            self.report.effects.append(sentence)

    def _existing(self, model: str, targets: tuple[str, ...]) -> tuple[str, ...]:
        """Leave out target names that the model does not have: PEFT ignores them if others match."""
        leaves = _leaves(model)
        kept = tuple(name for name in targets if name.rsplit(".", 1)[-1] in leaves)
        missing = [name for name in targets if name not in kept]
        if not leaves or not missing or not kept:
            return targets
        self.effect(f"the model has no {', '.join(missing)}: PEFT adapts the other targets only")
        return kept

    def _companions(self, recipe: dict[str, Any]) -> dict[str, Any]:
        """Return the recipe with other models' names as the catalogue has them, or without."""
        from planner.importers.names import resolve_model, resolve_name

        changed = dict(recipe)
        for role in ("reward_model", "value_model", "teacher"):
            name = changed.get(role)
            if not name or name == "none":
                continue
            if found := resolve_name(name):
                changed[role] = found
            elif resolve_model(name) is None and role != "teacher":
                changed[role] = None
                self.effect(
                    f"{role} {name}: not known here, planned as of the trained model's own kind"
                )
        return changed

    def finish(
        self,
        model: str,
        *,
        recipe: dict[str, Any],
        lora: dict[str, Any],
        engine: dict[str, Any],
        gpus: int | None = None,
        gpu: str | None = None,
    ) -> Imported:
        """Return the run file; keys nobody asked for are reported."""
        for key, value in self.values.items():
            if key in self.used or str(value).strip().lower() in _FALSE:
                continue
            if HARMLESS.search(key.replace("-", "_")):
                self.report.ignored_keys.append(key)
            else:
                self.unread(key, value, MOVES_NOTE if MOVES.search(key) else "unknown")
        if len(model) > 1000 or model.startswith("["):
            raise UsageError(
                f"{self.report.tool} config: model: {model[:60]!r}... is not a name or a path"
            )
        recipe = self._companions(recipe)
        if isinstance(lora.get("targets"), tuple):
            lora = {**lora, "targets": self._existing(model, lora["targets"])}
        try:
            run = RunFile(
                model=model,
                recipe=Recipe(
                    lora=LoraSection(**_set(lora)),
                    engine=EngineSection(**_set(engine)),
                    **_set(recipe),
                ),
                machine=MachineSection(**_set({"gpus": gpus, "gpu": gpu})),
            )
        except ValueError as error:
            problems: list[dict[str, Any]] = getattr(error, "errors", lambda: [])()
            first = problems[0] if problems else {"loc": ("?",), "msg": str(error)}
            where = ".".join(map(str, first["loc"]))
            rows = [row for row in self.report.taken if row.field.rsplit(".", 1)[-1] == where]
            where = rows[-1].key if rows else where
            raise UsageError(
                f"{self.report.tool} config: {where}: {first['msg']}",
                hint=f"value {shown(where, first.get('input', ''))[:60]!r}",
            ) from None
        return Imported(
            tool=self.report.tool,
            version=self.report.version,
            run=run,
            report=self.report,
            values=self.values,
        )


def _own_words(key: str, sections: tuple[str, ...]) -> str:
    """Return a key without the section that a prefix names."""
    inside = [word for word in sections if word.endswith(".") and key.startswith(word)]
    return key.removeprefix(max(inside, key=len)) if inside else key


def _leaves(model: str) -> set[str]:
    """Return the last path components of a known model's modules, {} for an unknown one."""
    from planner.importers.names import resolve_model
    from planner.models.lora_targets import EXPERT_NAMES

    spec = resolve_model(model)
    if spec is None:
        return set()
    modules = [module for layer in spec.layers for module in layer.modules]
    modules += [*spec.embeddings, *spec.final, *spec.towers, *((spec.head,) if spec.head else ())]
    return {module.leaf for module in modules} | set(EXPERT_NAMES.get(spec.model_type, {}))


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def as_int(value: Any) -> int | None:
    """Return a whole number of a YAML value or a flag's word, or None."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    match = _NUMBER.match(str(value))
    if match is not None:
        real: float | None = float(re.sub("[,_]", "", match[1])) * SCALES[match[2]]
    else:
        real = as_real(value) if re.search(r"\d[eE]\+?\d", str(value)) else None
    return int(real) if real is not None and real.is_integer() else None


def as_real(value: Any) -> float | None:
    """Return a finite number of a YAML value or a flag's word, or None."""
    try:
        real = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return real if real is not None and math.isfinite(real) else None


def as_bool(value: Any) -> bool | None:
    """Return a switch's value, or None if it is not one."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if value is not None else "?"
    return True if word in _TRUE else False if word in _FALSE else None


def as_names(value: Any) -> tuple[str, ...]:
    """Return module names from a list, a comma or blank separated word list."""
    if isinstance(value, (list, tuple)):
        return tuple(str(item) for item in value)
    if isinstance(value, str):
        return tuple(part for part in re.split(r"[\s,\[\]'\"]+", value) if part)
    return ()
