"""Verb frameworks: which law a framework and version is planned by, and what it says."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.verbs.options import Json, print_json
from planner.verbs.terminal import show

if TYPE_CHECKING:
    from planner.run.framework_files import Framework


def register(app: typer.Typer) -> None:
    """Add the verb to the console script."""
    app.command("frameworks", rich_help_panel="Look")(_frameworks)


def _frameworks(
    name: Annotated[
        str | None, typer.Argument(help="Framework, or framework and version: trl, trl==1.9.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which law a framework and version is planned by, or list the laws."""
    from planner.report import table
    from planner.run.framework import families, laws_of, pick, planned_as, spelled

    if name is None:
        rows = [law for laws in families().values() for law in laws]
        if as_json:
            print_json({"schema_version": 1, "frameworks": [_document(law) for law in rows]})
            return
        cells = [[law.family, law.name, law.range, law.title] for law in rows]
        show(table(["framework", "law", "versions", "title"], cells))
        return
    law = pick(name)
    siblings = laws_of(law.family, law.variant)
    if as_json:
        document = _document(law)
        document["version_asked"] = spelled(name).version or None
        document["switches"] = law.switches.model_dump(mode="json", exclude_defaults=True)
        document["defaults"] = law.defaults
        document["differs"] = _differences(law)
        document["laws"] = [_document(sibling) for sibling in siblings]
        print_json({"schema_version": 1, **document})
        return
    lines = [f"{name} is planned as {planned_as(law, name)}", "", f"  law       {law.name}"]
    for label, value in (("read", law.read), ("source", law.source), ("notes", law.notes)):
        if value:
            lines.append(f"  {label:<9} {value}")
    differences = _differences(law)
    if differences:
        lines += ["", f"What it does otherwise than {law.extends}:"]
        lines += [
            f"  {key}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in differences.items()
        ]
    show("\n".join(lines))
    if len(siblings) > 1:
        show("\nLaws of this framework:\n")
        cells = [["*" if s is law else "", s.name, s.range, s.title] for s in siblings]
        show(table(["", "law", "versions", "title"], cells))


def _document(law: "Framework") -> dict[str, Any]:
    return {
        "name": law.name,
        "family": law.family,
        "variant": law.variant or None,
        "title": law.title,
        "package": law.package or law.family,
        "versions": law.versions,
        "read": law.read,
        "extends": law.extends or None,
        "aliases": list(law.aliases),
        "source": law.source,
        "retrieved": law.retrieved,
        "notes": law.notes,
        "file": f"data/{law.file}",
    }


def _differences(law: "Framework") -> dict[str, tuple[Any, Any]]:
    """Return what a law changes of the one it extends: (there, here)."""
    from planner.run.framework import frameworks

    if not law.extends:
        return {}
    old, new = _flat(frameworks()[law.extends]), _flat(law)
    found = {}
    for key in sorted({*old, *new}):
        usual = f"defaults.all.{key.rpartition('.')[2]}" if key.startswith("defaults.") else key
        before, after = (values.get(key, values.get(usual)) for values in (old, new))
        if before != after:
            found[key] = (before, after)
    return found


def _flat(law: "Framework") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for task, fields in law.defaults.items():
        flat |= {f"defaults.{task}.{key}": value for key, value in fields.items()}
    flat |= {
        f"switches.{key}": value for key, value in law.switches.model_dump(mode="json").items()
    }
    for task, switches in law.task_switches.items():
        own = switches.model_dump(mode="json")
        base = law.switches.model_dump(mode="json")
        flat |= {f"switches.{task}.{key}": own[key] for key in own if own[key] != base[key]}
    flat |= {f"logits.{key}": logits.source for key, logits in law.logits.items()}
    return flat


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
