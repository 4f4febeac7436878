"""Command lines that start a training tool: TRL's verbs and scripts, and launchers of a YAML file."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.importers import llamafactory, trl
from planner.importers.launch import Launch, from_words, read_launch_file
from planner.importers.loading import flatten, load_yaml, read_text
from planner.importers.settings import Imported
from planner.importers.shell import flags
from planner.run.recipe import Task

_VERBS = {
    "sft": Task.SFT,
    "grpo": Task.GRPO,
    "dpo": Task.DPO,
    "kto": Task.KTO,
    "reward": Task.REWARD,
    "rloo": Task.GRPO,
}
_LAUNCH_ONLY = ("config_file", "num_processes", "accelerate_config", "dataset_name")


@dataclass(frozen=True, kw_only=True)
class Nested:
    """A config that a command line names, with the overrides that follow it."""

    document: dict[str, Any]
    comment: str
    """The command and its environment, as a comment: GPU counts and recipe names are there."""
    path: Path


def trl_command(
    command: list[str], *, path: Path | None, version: str | None, launch: Launch | None
) -> Imported | None:
    """Return the run of a `trl sft` line or a launched TRL script, or None for another command."""
    position = _script_position(command)
    if position is None:
        return None
    task, index = position
    values = {key.replace("-", "_"): value for key, value in flags(command[index + 1 :]).items()}
    spread = launch or _launch_of({**flags(command[:index]), **values}, path)
    values = {**_config_values(values.pop("config", None), path), **values}
    read = {key: value for key, value in values.items() if key not in _LAUNCH_ONLY}
    found = trl.read(read, task=task, version=version, launch=spread)
    named = {key: values[key] for key in ("dataset_name",) if key in values}
    return replace(found, values={**found.values, **named})


def _script_position(command: list[str]) -> tuple[Task, int] | None:
    names = [Path(word).name for word in command]
    if names[0] == "trl" and len(names) > 1 and names[1] in _VERBS:
        return _VERBS[names[1]], 1
    for index, name in enumerate(names):
        if match := re.fullmatch(r"(?:run_)?(sft|grpo|dpo|kto|rloo)\w*\.py", name):
            return _VERBS[match.group(1)], index
    return None


def _launch_of(words: dict[str, object], path: Path | None) -> Launch | None:
    name = str(words.get("config_file") or words.get("accelerate_config") or "")
    if path is not None and name and (file := path.parent / name).is_file():
        return read_launch_file(file)
    found = from_words(f"{name} num_processes={words.get('num_processes', '')}")
    return found if found.sharding or found.gpus else None


def _config_values(name: Any, path: Path | None) -> dict[str, Any]:
    if not isinstance(name, str) or path is None or not (path.parent / name).is_file():
        return {}
    document = load_yaml(read_text(path.parent / name)[0])
    return flatten(document) if isinstance(document, dict) else {}


def llamafactory_command(command: list[str], *, version: str | None) -> Imported | None:
    """Return the run of a `llamafactory-cli train --flags` line, or None."""
    values = flags(command)
    names = {Path(word).name for word in command[:4]}
    if names & {"llamafactory-cli", "lmf", "train_bash.py"} and "model_name_or_path" in values:
        return llamafactory.read(values, version=version)
    return None


def nested_config(
    command: list[str], environment: dict[str, str], path: Path | None
) -> Nested | None:
    """Return the YAML file that a launcher's command names, overrides applied, or None."""
    names = [Path(word).name for word in command]
    if (
        not {"llamafactory-cli", "axolotl", "tune", "swift"} & set(names)
        and "axolotl.cli.train" not in command
    ):
        return None
    files = [word for word in command if word.endswith((".yaml", ".yml"))]
    if path is None or not files or not (inner := path.parent / files[0]).is_file():
        return None
    text, _ = read_text(inner)
    document = load_yaml(text)
    if not isinstance(document, dict):
        return None
    overrides: dict[str, Any] = {}
    for word in command[command.index(files[0]) + 1 :]:
        key, equals, value = word.partition("=")
        if equals and not key.startswith("-"):
            overrides[key] = load_yaml(value)
    flagged = flags(command[command.index(files[0]) + 1 :])
    overrides |= {key.replace("__", "."): value for key, value in flagged.items()}
    heads = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("#"))
    settings = " ".join(f"{key}={value}" for key, value in environment.items())
    comment = f"# {' '.join(command)} {settings}\n{heads}"
    return Nested(document={**flatten(document), **overrides}, comment=comment[:20_000], path=inner)
