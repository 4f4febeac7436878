"""run.yaml: read with guards, written atomically; every mistake is one line that names the field."""

import difflib
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from planner.errors import UsageError, near_names
from planner.machines.calibration import apply as calibrated
from planner.machines.machine import Machine, make_machine
from planner.run.other_names import here
from planner.run.recipe import MachineSection, Recipe, RunFile

MAX_RUN_FILE_BYTES = 1 << 20
MAX_DEPTH = 32
Model = TypeVar("Model", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases (nothing here needs them), deep nesting or double keys."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed in a run file")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.YAMLError(f"the key {str(key.value)[:40]!r} appears twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; raises UsageError for anything else."""
    try:
        if path.stat().st_size > MAX_RUN_FILE_BYTES:
            raise UsageError(f"{path}: larger than 1 MiB, so not a run file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    return parse_yaml(text, label=str(path))


def parse_yaml(text: str, *, label: str) -> dict[str, Any]:
    """Return the mapping that `text` holds; `label` names it in errors."""
    try:
        document = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{label}: not a YAML mapping: {' '.join(str(error).split())[:160]}"
        ) from None
    if not isinstance(document, dict):
        raise UsageError(
            f"{label}: expected a mapping with model, recipe and machine",
            hint="`vramwise plan MODEL --save run.yaml` writes one",
        )
    return {str(key): value for key, value in document.items()}


def load_run_file(path: Path) -> RunFile:
    """Return the validated run file at `path`."""
    return validate(RunFile, read_yaml(path), label=str(path))


def run_file_text(run: RunFile) -> str:
    """Return `run` as YAML; defaults that nobody chose are left out."""
    document = run.model_dump(mode="json", exclude_defaults=True)
    document = {"schema_version": run.schema_version, **document}
    text: str = yaml.safe_dump(document, sort_keys=False)
    return text


def save_run_file(run: RunFile, path: Path) -> None:
    """Write `run` to `path` whole or not at all; defaults that nobody chose are left out."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(run_file_text(run), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"save: cannot write {path}: {error.strerror}") from None


def validate(model: type[Model], data: Any, *, label: str = "") -> Model:
    """Return `data` as `model`; raises UsageError naming the first wrong field."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _usage_error(model, error, label) from None


def make_recipe(**fields: Any) -> Recipe:
    """Return a Recipe of plain values; raises UsageError naming the first wrong field."""
    return validate(Recipe, fields)


def machine_of(section: MachineSection) -> Machine:
    """Return the Machine that a run file names, with the overheads measured here if there are any."""
    return calibrated(
        make_machine(
            section.gpu,
            gpus=section.gpus,
            nodes=section.nodes,
            vram=section.vram,
            host_ram=section.host_ram,
        )
    )


def _usage_error(model: type[BaseModel], error: ValidationError, label: str) -> UsageError:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    field = ".".join(location)
    prefix = f"{label}: " if label else ""
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, first["loc"][:-1])
        near = difflib.get_close_matches(location[-1], known, n=3, cutoff=0.5)
        section = ".".join([*([label] if label == "train" else []), *location[:-1]])
        foreign = here(location[-1], section)
        if foreign is not None:
            near = [foreign, *(name for name in near if name != foreign)]
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
        return UsageError(f"{prefix}{field}: unknown key", hint=hint)
    value = repr(first.get("input"))
    shown = value if len(value) <= 60 else value[:57] + "..."
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if first["type"] == "missing":
        return UsageError(f"{prefix}{field}: is missing")
    close = _near_values(first)
    hint = f"did you mean {', '.join(close)}? {message}" if close else message
    return UsageError(f"{prefix}{field}: {shown} is not allowed", hint=hint)


def _near_values(error: Any) -> list[str]:
    """Return the allowed words that a wrong one is most like."""
    asked, expected = error.get("input"), str((error.get("ctx") or {}).get("expected", ""))
    if error["type"] not in ("enum", "literal_error") or not isinstance(asked, str):
        return []
    return near_names(asked, re.findall(r"'([^']+)'", expected), most=3)


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    current: type[BaseModel] = model
    for part in path:
        if isinstance(part, int):  # an item of a tuple: its section was found at the field
            continue
        field = current.model_fields.get(part)
        annotation = field.annotation if field else None
        options = (annotation, *getattr(annotation, "__args__", ()))
        sections = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if not sections:
            return []
        current = sections[0]
    return list(current.model_fields)
