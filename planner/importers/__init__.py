"""Other tools' configs -> our run file, with a report of what was taken, defaulted and not understood.

Nothing is executed: YAML by a safe loader, shell parsed, Python and notebooks by AST.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.importers import (
    axolotl,
    llamafactory,
    ms_swift,
    torchtitan,
    torchtune,
    trl,
    trl_script,
    unsloth,
    verl,
    vllm,
)
from planner.importers.commands import llamafactory_command, nested_config, trl_command
from planner.importers.detect import TOOLS, tool_of_mapping, written_version
from planner.importers.launch import (
    Launch,
    apply_launch,
    from_accelerate,
    from_deepspeed,
    from_words,
    offload_fields,
    read_launch_file,
)
from planner.importers.loading import flatten, load_json, load_yaml, notebook_source, read_text
from planner.importers.names import resolve_model
from planner.importers.python_calls import Calls, read_calls
from planner.importers.settings import Imported, ImportReport, Settings
from planner.importers.shell import Script, parse_shell
from planner.importers.versions import stated

__all__ = [
    "TOOLS",
    "ImportReport",
    "Imported",
    "import_config",
    "import_subject",
    "looks_foreign",
    "resolve_model",
]


def import_config(
    path_or_text: Path | str,
    *,
    version: str | None = None,
    tool: str | None = None,
    launch: Path | None = None,
    variant: str | None = None,
) -> Imported:
    """Return a foreign config as a run file and a report.

    `version`: the tool's version, where the file does not say. `tool`: its name, where the
    content does not tell. `launch`: an accelerate or DeepSpeed file that goes with it.
    `variant`: of a vLLM recipe. Raises UsageError when nothing can be made of it.
    """
    text, path = read_text(path_or_text)
    if not text.strip():
        raise UsageError("config: the file is empty")
    spread = read_launch_file(launch) if launch else None
    found = _import(text, path, tool, version, spread, variant)
    if spread is not None and found.run.recipe.sharding.value == "none":
        found = _with_launch(found, spread)
    return found


def import_subject(
    subject: str,
    *,
    version: str | None = None,
    launch: Path | None = None,
    variant: str | None = None,
) -> Imported | None:
    """Return the import of what `plan` was given if it is another tool's config, else None."""
    path = Path(subject)
    try:
        foreign = looks_foreign(path)
    except OSError:  # a name longer than a path may be
        return None
    if not foreign:
        return None
    found = import_config(path, version=version, launch=launch, variant=variant)
    if not found.run.model:
        raise UsageError(
            f"{path.name}: no model in this {found.tool} config",
            hint="vramwise plan MODEL --launch FILE for accelerate and DeepSpeed files",
        )
    return found


def launch_document(path: Path) -> dict[str, Any]:
    """Return the run-file fields that an accelerate or DeepSpeed file sets."""
    if not path.is_file():
        raise UsageError(f"launch: no file {str(path)[:200]!r}")
    launch = read_launch_file(path)
    recipe = {"sharding": launch.sharding, "mixed_precision": launch.mixed_precision}
    document: dict[str, Any] = {"recipe": {key: value for key, value in recipe.items() if value}}
    if launch.optimizer_offload:
        document["recipe"]["optimizer_offload"] = True
    document["recipe"].update(offload_fields(launch))
    if launch.gpus:
        document["machine"] = {"gpus": launch.gpus}
    return document


def looks_foreign(path: Path) -> bool:
    """Return whether a file is another tool's config rather than a run.yaml of ours."""
    if path.suffix.lower() in (".ipynb", ".py", ".sh"):
        return path.is_file()
    if path.suffix.lower() == ".toml":
        return path.is_file() and torchtitan.load(read_text(path)[0]) is not None
    if path.suffix.lower() not in (".yaml", ".yml", ".json") or not path.is_file():
        return False
    text, _ = read_text(path)
    try:
        document = load_json(text) if text.lstrip().startswith("{") else load_yaml(text)
    except UsageError:
        return False
    return (
        isinstance(document, dict)
        and tool_of_mapping(document, flatten(document), text) is not None
    )


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


def _import(
    text: str,
    path: Path | None,
    tool: str | None,
    version: str | None,
    launch: Launch | None,
    variant: str | None,
) -> Imported:
    stripped = text.lstrip()
    if (titan := torchtitan.load(text)) is not None:
        return torchtitan.read(flatten(titan), version=version)
    if tool is not None and tool not in TOOLS:
        raise UsageError(
            f"tool: {tool[:40]!r} is not one that can be imported", hint=", ".join(TOOLS)
        )
    if stripped.startswith("{"):
        document = load_json(text)
        if "cells" in document:
            return _from_python(notebook_source(document), text, version)
        return _from_mapping(document, text, path, tool, version, launch, variant)
    if path is not None and path.suffix == ".ipynb":
        raise UsageError(f"config: {path.name} is not a notebook: it is not JSON")
    document = _mapping_or_none(text)
    if document is not None:
        return _from_mapping(document, text, path, tool, version, launch, variant)
    if (found := _from_shell(parse_shell(text), text, path, version, launch)) is not None:
        return found
    if re.search(r"^\s*(?:import|from)\s+\w|\w\s*\(.*=", text, re.MULTILINE):
        return _from_python(text, text, version)
    load_yaml(text)  # says where the YAML breaks, if that is what it is
    raise _unknown()


_PACKAGES = {
    "axolotl": ("axolotl",),
    "llamafactory": ("llamafactory", "llama-factory"),
    "torchtune": ("torchtune",),
    "ms-swift": ("ms-swift", "swift"),
    "verl": ("verl",),
    **dict.fromkeys(("trl", "alignment-handbook", "open-r1"), ("trl",)),
}
"""What a file calls the package whose version decides."""


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
    return (
        document
        if isinstance(document, dict) and any(isinstance(key, str) for key in document)
        else None
    )


def _reads_as_yaml(text: str) -> bool:
    """Return whether most lines are key: value, so that a YAML error is the user's."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    keyed = sum(bool(re.match(r"\s*(?:- )?[\w.-]+:(?:\s|$)", line)) for line in lines)
    return keyed > 0.6 * max(1, len(lines))


def _unknown() -> UsageError:
    return UsageError(
        "config: not recognised as any tool's config",
        hint=f"these can be read: {', '.join(TOOLS)}; say which with --tool",
    )


def _from_mapping(
    document: dict[str, Any],
    text: str,
    path: Path | None,
    tool: str | None,
    version: str | None,
    launch: Launch | None,
    variant: str | None,
) -> Imported:
    flat = flatten(document)
    version = version or written_version(text)
    kind = tool or tool_of_mapping(document, flat, text)
    version = version or stated(text, *_PACKAGES.get(kind or "", ()))
    if kind == "axolotl":
        return axolotl.read(flat, version=version, base=path, text=_comments(text))
    if kind == "llamafactory":
        return llamafactory.read(flat, version=version, base=path, text=_comments(text))
    if kind == "torchtune":
        return torchtune.read(flat, version=version, text=_comments(text))
    if kind == "ms-swift":
        return ms_swift.read(flat, version=version)
    if kind == "verl":
        return verl.read(flat, version=version)
    if kind == "vllm":
        return vllm.read(document, version=version)
    if kind == "vllm-recipe":
        return vllm.read_recipe(document, version=version, variant=variant)
    if kind in ("trl", "alignment-handbook", "open-r1"):
        assumed = {"open-r1": trl.OPEN_R1_VERSION, "alignment-handbook": trl.HANDBOOK_VERSION}.get(
            kind, trl.VERSION
        )
        spread = launch or from_words(f"{document.get('launch', '')} {_comments(text)}")
        values = {key: value for key, value in flat.items() if key != "launch"}
        return trl.read(values, version=version, assumed=assumed, tool=kind, launch=spread)
    if kind in ("accelerate", "deepspeed"):
        settings = Settings(flat, tool=kind, version=version or "any", assumed=False)
        settings.used.update(flat)
        recipe: dict[str, Any] = {}
        found = from_accelerate(document) if kind == "accelerate" else from_deepspeed(document)
        gpus = apply_launch(settings, recipe, found)
        settings.effect(
            "this file says how a run is spread out, not what runs: give the model and the method beside it"
        )
        return settings.finish("", recipe=recipe, lora={}, engine={}, gpus=gpus)
    if "architectures" in document and "hidden_size" in flat:
        raise UsageError(
            "config: this is a model's config.json, not a run",
            hint="vramwise plan PATH takes it as the model",
        )
    raise _unknown()


def _comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.lstrip().startswith("#"))[:20_000]


def _from_shell(
    script: Script, text: str, path: Path | None, version: str | None, launch: Launch | None
) -> Imported | None:
    if (found := vllm.read_script(script, version=version)) is not None:
        return found
    for tool, reader in (("ms-swift", ms_swift.read_script), ("verl", verl.read_script)):
        if (found := reader(script, version=version or stated(text, *_PACKAGES[tool]))) is not None:
            return found
    for command, environment in zip(script.commands, script.prefixes, strict=True):
        at = version or stated(text, *_PACKAGES["trl"])
        found = trl_command(command, path=path, version=at, launch=launch)
        at = version or stated(text, *_PACKAGES["llamafactory"])
        found = found or llamafactory_command(command, version=at)
        if found is not None:
            return found
        nested = nested_config(command, environment, path)
        if nested is not None:
            return _from_mapping(
                nested.document, nested.comment, nested.path, None, version, launch, None
            )
    return None


def _from_python(source: str, text: str, version: str | None) -> Imported:
    calls = read_calls(source)
    if calls.has(*unsloth.LOADERS):
        return unsloth.read(calls, version=version or stated(text, "unsloth"))
    if calls.has("LLM") and not calls.has("GRPOTrainer", "SFTTrainer"):
        values = trl_script.constants(calls.last("LLM"))
        if isinstance(model := (calls.last("LLM") or {}).get("*0"), str):
            values.setdefault("model", model)
        return vllm.read(values, version=version, is_call=True)
    if _is_hugging_face(calls):
        return trl_script.read(calls, version=version)
    shell = "\n".join(
        line.lstrip("# !")
        for line in source.splitlines()
        if "vllm serve" in line or "swift " in line
    )
    if shell and (found := _from_shell(parse_shell(shell), text, None, version, None)) is not None:
        return found
    raise _unknown()


def _is_hugging_face(calls: Calls) -> bool:
    return calls.has(*(name for names, _ in trl_script.TRAINERS for name in names))
