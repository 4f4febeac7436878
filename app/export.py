"""A run as people take it away: run.yaml (with a train section), the command line, other tools."""

import shlex
from pathlib import Path
from typing import Any

from app.runs import Run
from planner.errors import VramwiseError
from planner.run.recipe import Method, Recipe, RunFile, Task
from planner.run.runfile import run_file_text
from planner.verbs.options import OPTIONS, RECIPE_FIELDS
from trainer.config import parse_run

DATASETS: dict[str, dict[str, Any]] = {
    "arithmetic": {"dataset": {"name": "arithmetic"}, "rewards": ["exact"]},
    "gsm8k": {"dataset": {"name": "gsm8k", "chat": True}, "rewards": ["numeric"]},
    "my own file": {"dataset": {"name": "data.jsonl"}, "rewards": ["exact"]},
}
"""What a run may learn from; "arithmetic" is made on the spot and needs no network."""
ANSWERS = {"completion_column": "answer"}
"""SFT on a built-in task learns its answers."""
LEARNING_RATES = {Method.FULL: 1e-6, Method.LORA: 1e-5, Method.QLORA: 1e-5}
PROMPTS_PER_STEP = 8
TRAINABLE = (Task.GRPO, Task.SFT)
NAMED = {
    "lora_targets": "lora.targets",
    "lora_target_parameters": "lora.target_parameters",
    "lora_modules_to_save": "lora.modules_to_save",
}
"""Options whose value is a list of names, and their fields."""


def train_section(run: Run, *, dataset: str, steps: int) -> dict[str, Any]:
    """Return the train section of a run file."""
    chosen = dict(DATASETS[dataset])
    section: dict[str, Any] = {"output": f"runs/{run.model.name.split('/')[-1]}", **chosen}
    if run.recipe.task is Task.SFT:
        section.pop("rewards")
        if dataset != "my own file":
            section["dataset"] = {**section["dataset"], **ANSWERS}
    else:
        section["prompts_per_step"] = PROMPTS_PER_STEP
    section |= {"steps": steps, "lr": LEARNING_RATES[run.recipe.method]}
    return section


def run_yaml(run: Run, *, dataset: str = "arithmetic", steps: int = 100) -> tuple[str, str]:
    """Return run.yaml and, if `vramwise train` would refuse it, why."""
    file = run.file
    if run.recipe.task not in TRAINABLE:
        return run_file_text(file), f"the trainer does GRPO and SFT, not {run.recipe.task.value}"
    file = file.model_copy(update={"train": train_section(run, dataset=dataset, steps=steps)})
    return run_file_text(file), trainer_refusal(file)


def trainer_refusal(file: RunFile) -> str:
    """Return why `vramwise train` would refuse a run file, or ""."""
    try:
        parse_run(file.model_dump(mode="json", exclude_defaults=True), root=Path("."))
    except VramwiseError as error:
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return ""


def command_line(run: Run) -> tuple[str, list[str]]:
    """Return the `vramwise plan` line of a run, and the settings that have no flag."""
    words = ["vramwise", "plan", run.model_name]
    machine = run.section
    given = {"gpu": machine.gpu, "vram": machine.vram, "host_ram": machine.host_ram}
    given["gpus"] = str(machine.gpus) if machine.gpus > 1 else None
    given["nodes"] = str(machine.nodes) if machine.nodes else None
    for name, value in given.items():
        if value is not None:
            words += [_flag(name), value]
    chosen = _chosen(run.recipe)
    for name in OPTIONS:
        path = NAMED.get(name) or RECIPE_FIELDS.get(name, name)
        if path in chosen:
            words += _words(name, chosen.pop(path))
    return shlex.join(words), sorted(chosen)


def _chosen(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that are not at their defaults, sections flattened."""
    found: dict[str, Any] = {}
    for name, value in recipe.model_dump(mode="json", exclude_defaults=True).items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    if recipe.task is Task.SFT:  # the default of a recipe, but worth saying
        found["task"] = recipe.task.value
    if recipe.task is Task.SERVE:  # which the command line takes for vLLM's otherwise
        found["framework"] = recipe.framework
    found.setdefault("method", recipe.method.value)
    return found


def _flag(name: str, *, off: bool = False) -> str:
    declared: str = OPTIONS[name].__metadata__[0].default
    on, _, negative = declared.partition("/")
    return negative if off else on


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [_flag(name, off=not value)]
    text = ",".join(value) if isinstance(value, list) else str(value)
    return [_flag(name), text]
