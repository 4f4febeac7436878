"""Other tools' configs -> our run file, with a report of what was taken, defaulted and not understood.

Nothing is executed: YAML by a safe loader, shell parsed, Python and notebooks by AST.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import UnsupportedError, UsageError
from planner.importers import manifests, vllm
from planner.importers.context import Context
from planner.importers.detect import TOOLS, tool_of_mapping
from planner.importers.keys import shown
from planner.importers.launch import apply_launch, offload_fields, read_launch_file
from planner.importers.loading import (
    flatten,
    load_json,
    load_yaml,
    load_yaml_all,
    notebook_files,
    notebook_source,
    read_text,
)
from planner.importers.mappings import from_mapping, unknown
from planner.importers.names import resolve_model
from planner.importers.pasted import unwrap, written_files
from planner.importers.scripts import from_python, from_shell
from planner.importers.settings import Imported, ImportReport, Settings
from planner.importers.shell import parse_shell
from planner.importers.spread import Launch
from planner.importers.toml_files import load_toml, tool_of_toml

__all__ = [
    "TOOLS",
    "ImportReport",
    "Imported",
    "import_config",
    "import_subject",
    "looks_foreign",
    "resolve_model",
]
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_COMMAND = re.compile(r"\s--?[A-Za-z]")
"""What no key of a config holds: a command whose JSON value makes YAML of its line."""
_SHELL = (".sh", ".bash", ".slurm", ".sbatch")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)|\{\{\s*\.?([\w.]+)|<([\w -]+)>")


def import_config(
    path_or_text: Path | str,
    *,
    version: str | None = None,
    tool: str | None = None,
    launch: Path | None = None,
    variant: str | None = None,
    model: str | None = None,
    gpus: int | None = None,
) -> Imported:
    """Return a foreign config as a run file and a report.

    `version`: the tool's version, where the file does not say. `tool`: its name, where the
    content does not tell. `launch`: an accelerate or DeepSpeed file that goes with it.
    `variant`: of a vLLM recipe. `model`: wins over the file's. `gpus`: how many there are.
    Raises UsageError when nothing can be made of it.
    """
    text, path = read_text(path_or_text)
    if not text.strip():
        raise UsageError("config: the file is empty")
    if tool is not None and tool not in TOOLS:
        raise UsageError(
            f"tool: {tool[:40]!r} is not one that can be imported", hint=", ".join(TOOLS)
        )
    spread = read_launch_file(launch) if launch else None
    context = Context(
        path=path,
        tool=tool,
        version=version,
        launch=spread,
        variant=variant,
        model=model,
        gpus=gpus,
    )
    found = _import(text, path, context)
    if spread is not None and found.run.recipe.sharding.value == "none":
        found = _with_launch(found, spread)
    return _completed(found, replace(context, text=text))


def _completed(found: Imported, context: Context) -> Imported:
    """Return the import with what was said beside it: the model, and no note about GPUs that were given."""
    if context.model is not None:
        found = replace(found, run=found.run.model_copy(update={"model": context.model}))
    if not found.report.version_assumed:
        found.report.version_why = context.why(found.tool, found.version)
    if context.gpus is not None:
        report = found.report
        report.effects = [
            sentence
            for sentence in report.effects
            if "say --gpus" not in sentence and "give --gpus" not in sentence
        ]
    return found


def import_subject(
    subject: str,
    *,
    text: bool = False,
    tool: str | None = None,
    version: str | None = None,
    launch: Path | None = None,
    variant: str | None = None,
    model: str | None = None,
    gpus: int | None = None,
) -> Imported | None:
    """Return the import of what `plan` was given if it is another tool's config, else None.

    `text`: the subject is the config itself, or a command line, not the name of a file.
    """
    path = Path("the text" if text else subject)
    try:
        foreign = text or looks_foreign(path) or (tool is not None and path.is_file())
    except OSError:  # a name longer than a path may be
        return None
    if not foreign:
        return None
    found = import_config(
        subject.rstrip("\n") + "\n" if text else path,
        tool=tool,
        version=version,
        launch=launch,
        variant=variant,
        model=model,
        gpus=gpus,
    )
    named = found.run.model
    if (
        cached := _CACHED.search(named)
    ) is not None:  # a folder of the Hub's cache says whose it is
        named = f"{cached[1]}/{cached[2]}"
        found = replace(found, run=found.run.model_copy(update={"model": named}))
    if not named and found.tool in ("accelerate", "deepspeed"):
        raise UsageError(
            f"{path.name}: no model in this {found.tool} config",
            hint="vramwise plan MODEL --launch FILE for accelerate and DeepSpeed files",
        )
    if not named:
        raise UsageError(
            f"{path.name}: the model is not in this {found.tool} config, or only running it would tell",
            hint=f"say it: vramwise plan {path.name} --model Qwen/Qwen3-8B",
        )
    if (match := _VARIABLE.search(named)) and (leaf := _known_leaf(named)):
        found.report.effects.append(
            f"the model lies in {shown('model', named)[:100]}: planned as {leaf}, which its name says"
        )
        return replace(found, run=found.run.model_copy(update={"model": leaf}))
    if match:
        name = next(part for part in match.groups() if part)
        raise UsageError(
            f"{path.name}: the model is {shown('model', named)[:100]!r}, whose variable {name} is not set in this file",
            hint=f"say it: vramwise plan {path.name} --model Qwen/Qwen3-8B",
        )
    if re.match(r"[./~]|checkpoint-\d+$", named) and resolve_model(named) is None:
        raise UsageError(
            f"{path.name}: the model is {shown('model', named)[:100]!r}, which is not here",
            hint=f"say what it is: vramwise plan {path.name} --model Qwen/Qwen3-8B",
        )
    return found


def _known_leaf(named: str) -> str | None:
    """Return the last part of a path with variables where a model has that name, or None."""
    leaf = named.rstrip("/}\"' ").rsplit("/", 1)[-1]
    if not leaf or "$" in leaf or _VARIABLE.search(leaf):
        return None
    return leaf if resolve_model(leaf) is not None else None


def launch_document(path: Path) -> dict[str, Any]:
    """Return the run-file fields that an accelerate or DeepSpeed file sets."""
    if not path.is_file():
        raise UsageError(f"launch: no file {str(path)[:200]!r}")
    launch = read_launch_file(path)
    recipe = {
        "sharding": launch.sharding,
        "mixed_precision": launch.mixed_precision,
        "checkpointing": "full" if launch.checkpointing else None,
    }
    document: dict[str, Any] = {"recipe": {key: value for key, value in recipe.items() if value}}
    if launch.optimizer_offload:
        document["recipe"]["optimizer_offload"] = True
    document["recipe"].update(offload_fields(launch))
    if launch.gpus:
        document["machine"] = {"gpus": launch.gpus}
    return document


def looks_foreign(path: Path) -> bool:
    """Return whether a file is another tool's config rather than a run.yaml of ours or a model."""
    if path.suffix.lower() in (
        ".ipynb",
        ".py",
        ".sh",
        ".bash",
        ".slurm",
        ".sbatch",
        ".toml",
        ".md",
        ".txt",
    ):
        return path.is_file()
    if path.suffix.lower() not in (".yaml", ".yml", ".json") or not path.is_file():
        return False
    text = unwrap(read_text(path)[0])
    if manifests.is_manifest(text):
        return True
    try:
        document = load_json(text) if text.lstrip().startswith("{") else load_yaml(text)
    except UsageError:
        return "{{" in text
    if not isinstance(document, dict):
        return False
    if {"recipe", "machine", "train"} & set(map(str, document)) and "model" in document:
        return False
    try:
        return tool_of_mapping(document, flatten(document), text) is not None
    except UsageError:
        return True


def _with_launch(found: Imported, launch: Launch) -> Imported:
    settings = Settings({}, tool=found.tool, version=found.version, assumed=False)
    settings.report = found.report
    recipe: dict[str, Any] = {}
    gpus = apply_launch(settings, recipe, launch)
    machine = found.run.machine.model_copy(update={"gpus": gpus} if gpus else {})
    run = found.run.model_copy(
        update={"recipe": found.run.recipe.model_copy(update=recipe), "machine": machine}
    )
    return replace(found, run=run)


def _import(raw: str, path: Path | None, context: Context) -> Imported:
    text = unwrap(raw)
    context = replace(context, text=raw, written=written_files(text))
    stripped = text.lstrip()
    named = path is not None and path.suffix.lower() == ".toml"
    if (table := load_toml(text, named=named)) is not None:
        kind = tool_of_toml(table)
        return from_mapping(table, text, replace(context, tool=kind))
    if not (stripped.startswith("{") and '"cells"' in text):  # a notebook may hold a template
        manifests.refuse_template(text)
    if stripped.startswith("{"):
        document = load_json(text)
        if "cells" in document:
            inside = replace(context, written={**context.written, **notebook_files(document)})
            return from_python(notebook_source(document), inside)
        return from_mapping(document, text, context)
    if path is not None and path.suffix == ".ipynb":
        raise UsageError(f"config: {path.name} is not a notebook: it is not JSON")
    shell = path is not None and path.suffix.lower() in _SHELL
    if manifests.is_manifest(text) and not shell and not _is_shell(text):
        return _from_manifest(text, context)
    document = _mapping_or_none(text)
    if document is not None:
        imported = from_mapping(document, text, context)
        if (count := len(load_yaml_all(text))) > 1:
            said = f"the file holds {count} documents: the first is planned"
            imported.report.effects.append(said)
        return imported
    if (found := from_shell(parse_shell(text), context)) is not None:
        return found
    if shell:
        raise unknown()
    if re.search(r"^\s*(?:import|from)\s+\w|\w\s*\(.*=", text, re.MULTILINE) and not _is_shell(
        text
    ):
        return from_python(text, context)
    if _reads_as_yaml(text):
        load_yaml(text)  # says where the YAML breaks
    raise unknown()


def _from_manifest(text: str, context: Context) -> Imported:
    """Return the run that a manifest's or compose file's container starts."""
    manifests.refuse_template(text)
    if (arguments := manifests.ray_serve(text)) is not None:
        return vllm.read(arguments, version=context.version_of("vllm"))
    served = manifests.read(text, context)
    if served is None:
        raise UnsupportedError(
            "config: no container of this manifest starts vLLM or SGLang",
            hint="the container with the server's image or command is what is read",
        )
    script, container, gpus = served
    inside = replace(context, version=context.version or manifests.image_version(container))
    found = from_shell(script, inside)
    if found is None:
        raise UnsupportedError(
            "config: the container's command starts no server that is known",
            hint="vllm serve, vllm.entrypoints.openai.api_server or sglang.launch_server",
        )
    manifests.note_gpus(found, gpus)
    found.report.effects += [note for note in script.not_understood if "containers" in note]
    return found


def _is_shell(text: str) -> bool:
    return text.lstrip().startswith("#!") and "python" not in text.lstrip().split("\n", 1)[0]


def _mapping_or_none(text: str) -> dict[str, Any] | None:
    first = text.lstrip().split("\n", 1)[0]
    if first.startswith("#!") or re.match(r"(?:import|from|def|class) ", first):
        return None
    try:
        document = load_yaml(text)
    except UsageError as error:
        if "aliases" in error.message or "nested" in error.message or _reads_as_yaml(text):
            raise
        return None
    if not isinstance(document, dict) or any(_COMMAND.search(str(key)) for key in document):
        return None
    return document if any(isinstance(key, str) for key in document) else None


def _reads_as_yaml(text: str) -> bool:
    """Return whether most lines are key: value, so that a YAML error is the user's."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    keyed = sum(bool(re.match(r"\s*(?:- )?[\w.-]+:(?:\s|$)", line)) for line in lines)
    return keyed > 0.6 * max(1, len(lines))
