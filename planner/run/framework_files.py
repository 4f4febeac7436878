"""Reads data/frameworks: one JSON file, a law, for every range of versions that treats memory alike.

`family` groups the laws of one code base, `extends` names the law it takes everything from that it
does not say itself, `versions` is a PEP 440 specifier set. `defaults` are recipe fields by task
("all" first, then the task's own), `switches` say what the code does with memory, `logits` names
every tensor of vocabulary width with its dtype. Every file says where it was read, and when; every
mistake in one is a line that names the file and the key.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any, Literal

from planner.datafiles import data_dir
from planner.errors import UsageError
from planner.run.engine_law import EngineLaw
from planner.run.logits_law import LogitsLaw
from planner.run.recipe import BucketsSection, EngineSection, Recipe, Section, Task
from planner.run.runfile import validate
from planner.run.switches import Switches
from planner.run.tasks import TASKS

if TYPE_CHECKING:
    from packaging.version import Version


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One law: a framework and the range of versions that does the same with memory."""

    name: str
    title: str
    family: str
    """The code base; its newest law has the family's name."""
    variant: str = ""
    """Another way to run the same versions (kernels, method); a version alone never chooses it."""
    versions: str
    """PEP 440 specifiers of the package whose release decides; empty: any."""
    package: str = ""
    """That package, when it is not the family's own."""
    read: str = ""
    """The releases whose code was read, or that were measured."""
    extends: str = ""
    aliases: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()
    """What it has a command or trainer for; empty: any, a loop of one's own."""
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)
    task_switches: dict[str, Switches] = field(default_factory=dict)
    logits: dict[str, LogitsLaw] = field(default_factory=dict)
    engine: EngineLaw = field(default_factory=EngineLaw)
    """What its vLLM does: vLLM's own files state it, others have the newest."""
    deepspeed: dict[str, BucketsSection] = field(default_factory=dict)
    """Buckets of the DeepSpeed configs it ships, by scheme: zero1, zero2, zero3."""
    source: str = ""
    retrieved: str = ""
    notes: str = ""
    file: str = ""

    @cache  # noqa: B019  (frameworks live as long as the process)
    def task_defaults(self, task: str) -> dict[str, Any]:
        """Return the defaults of one task."""
        relative = self.defaults.get(_relative(task), {})
        return {**self.defaults.get("all", {}), **relative, **self.defaults.get(task, {})}

    def switches_of(self, task: str) -> Switches:
        """Return the switches, with what one task does otherwise."""
        relative = self.task_switches.get(_relative(task), self.switches)
        return self.task_switches.get(task, relative)

    def law(self, task: str, loss: str) -> LogitsLaw:
        """Return the logits law of a task and loss kind ("full" or "chunked")."""
        common = common_laws()
        for key in (f"{task}-{loss}", f"{_relative(task)}-{loss}"):
            for laws in (self.logits, common):
                if key in laws:
                    return laws[key]
        return self.logits[loss] if loss in self.logits else common[USUAL.get(loss, loss)]

    def has(self, task: Task) -> bool:
        """Say whether it runs a task by itself."""
        return not self.tasks or task in self.tasks

    @property
    def range(self) -> str:
        """What the law is for, in words: `>=1.0,<1.12` or `transformers >=5,<6`."""
        return f"{self.package} {self.versions or 'any version'}".strip()

    def matches(self, version: "Version") -> bool:
        """Return whether a release is in the law's range; raises UsageError for a wrong range."""
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            return SpecifierSet(self.versions).contains(version, prereleases=True)
        except InvalidSpecifier:
            raise UsageError(
                f"{self.file}: versions: {self.versions!r} is not a set of PEP 440 specifiers",
                hint='for example ">=1.0,<1.12"; leave it empty for any version',
            ) from None

    def __hash__(self) -> int:
        return hash(self.name)


def _relative(task: str) -> str:
    """Return the task whose habits hold where a file states none for this one."""
    return TASKS[Task(task)].relative.value if task in tuple(Task) else task


USUAL = {"full-fp32": "full-fp32-outputs"}
"""The common law of a loss that a file does not state under the loss' own name."""


@cache
def common_laws() -> dict[str, LogitsLaw]:
    """Return the logits laws that files name instead of stating their own."""
    return _read_common(data_dir() / "frameworks")


class _File(Section):
    """A framework file with what it extends filled in."""

    name: str
    title: str
    family: str = ""
    variant: str = ""
    versions: str
    package: str = ""
    read: str = ""
    extends: str = ""
    aliases: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()
    source: str
    retrieved: str
    notes: str = ""
    defaults: dict[str, dict[str, Any]] = {}
    switches: dict[str, Any] = {}
    task_switches: dict[str, dict[str, Any]] = {}
    logits: dict[str, str | dict[str, Any]] = {}
    engine: EngineLaw = EngineLaw()
    deepspeed: dict[Literal["zero1", "zero2", "zero3"], BucketsSection] = {}


_INHERITED = (
    *("tasks", "defaults", "switches", "task_switches", "logits", "engine", "deepspeed", "package"),
)


def load_frameworks(folder: Traversable) -> dict[str, Framework]:
    """Return the laws in a folder by name; every mistake names the file and the key."""
    common = _read_common(folder)
    rows: dict[str, dict[str, Any]] = {}
    files: dict[str, str] = {}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".json") and not entry.name.startswith("_"):
            label = f"{folder.name}/{entry.name}"
            row = _read(entry, label)
            name = str(row.get("name"))
            if name in rows:
                raise UsageError(f"{label}: name: {name!r} is taken by {files[name]}")
            rows[name], files[name] = row, label
    return {
        name: _framework(_extended(name, rows, files), common, label=files[name]) for name in rows
    }


def _read_common(folder: Traversable) -> dict[str, LogitsLaw]:
    entry = folder / "_losses.json"
    label = f"{folder.name}/{entry.name}"
    return {
        name: validate(LogitsLaw, row, label=f"{label}: {name}")
        for name, row in _read(entry, label)["laws"].items()
    }


def _read(entry: Traversable, label: str) -> dict[str, Any]:
    try:
        row = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{label}: cannot be read: {str(error)[:120]}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{label}: not a JSON object")
    return row


def _extended(
    name: str, rows: Mapping[str, dict[str, Any]], files: Mapping[str, str]
) -> dict[str, Any]:
    """Return a file's content with that of the laws it extends, the nearest first."""
    chain = [name]
    while parent := rows[chain[-1]].get("extends"):
        label = f"{files[chain[-1]]}: extends"
        if parent in chain:
            raise UsageError(f"{label}: {' -> '.join([*chain, parent])} goes in a circle")
        if parent not in rows:
            raise UsageError(f"{label}: unknown framework {parent!r}", hint=_near(parent, rows))
        chain.append(parent)
    merged: dict[str, Any] = {}
    for link in reversed(chain):
        inherited = {key: merged[key] for key in _INHERITED if key in merged}
        merged = _over(inherited, rows[link])
    return merged


def _over(base: dict[str, Any], row: dict[str, Any], *, depth: int = 0) -> dict[str, Any]:
    """Return `base` with the keys of `row`; sections and tasks are merged, null takes a key away."""
    merged = dict(base)
    for key, value in row.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict) and depth < 2:
            is_law = depth == 1 and "kind" in value
            merged[key] = value if is_law else _over(merged[key], value, depth=depth + 1)
        else:
            merged[key] = value
    return merged


def _framework(row: dict[str, Any], common: Mapping[str, LogitsLaw], *, label: str) -> Framework:
    read = validate(_File, row, label=label)
    _check_defaults(read.defaults, label)
    switches = validate(Switches, read.switches, label=f"{label}: switches")
    return Framework(
        **{
            **{name: getattr(read, name) for name in _File.model_fields},
            "family": read.family or read.name,
            "switches": switches,
            "task_switches": {
                task: validate(
                    Switches, {**read.switches, **own}, label=f"{label}: task_switches.{task}"
                )
                for task, own in read.task_switches.items()
            },
            "logits": {
                key: _law(law, common, label=f"{label}: logits.{key}")
                for key, law in read.logits.items()
            },
            "file": label,
        }
    )


def _law(law: str | dict[str, Any], common: Mapping[str, LogitsLaw], *, label: str) -> LogitsLaw:
    if isinstance(law, dict):
        return validate(LogitsLaw, law, label=label)
    if law not in common:
        raise UsageError(f"{label}: unknown law {law!r}", hint=_near(law, common))
    return common[law]


def _check_defaults(defaults: Mapping[str, Mapping[str, Any]], label: str) -> None:
    tasks = ("all", *Task)
    known = [*Recipe.model_fields, "engine", *EngineSection.model_fields]
    for task, fields in defaults.items():
        if task not in tasks:
            raise UsageError(f"{label}: defaults.{task}: unknown task", hint=_near(task, tasks))
        for key in fields:
            if key not in known:
                raise UsageError(
                    f"{label}: defaults.{task}.{key}: unknown key", hint=_near(key, known)
                )


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
