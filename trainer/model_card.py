"""The README.md of a pushed model: what it was trained on and how, planned beside measured memory, evaluations."""

import importlib.metadata
import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from planner.run.recipe import Method, RunFile
from planner.run.runfile import load_run_file
from planner.units import format_bytes
from trainer.metrics import METRICS_FILE, read_metrics
from trainer.validation import EVALUATIONS_FILE

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
UNSAID = ("output", "overwrite", "callbacks", "push_to_hub", "report_to", "project", "run_name")
"""Parts of the train section that say nothing about the model."""
MEASURED = ("allocated_bytes", "resident_bytes")
PACKAGES = ("vramwise", "torch", "transformers", "peft")


def model_card(output: Path, *, step: int, merged: bool = False) -> str:
    """Return the card of the checkpoint after `step` steps of the run in `output`."""
    run = load_run_file(output / "run.yaml")
    adapters = run.recipe.method is not Method.FULL and not merged
    matter: dict[str, Any] = {
        "library_name": "peft" if adapters else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["vramwise", str(run.recipe.task), str(run.recipe.method)],
    }
    if is_hub_id(run.model):
        matter["base_model"] = run.model
    dataset = _dataset(run)
    if is_hub_id(dataset):
        matter["datasets"] = [dataset]
    kind = "Adapters" if adapters else "A model"
    parts = [
        f"---\n{yaml.safe_dump(matter, sort_keys=False)}---",
        f"# {output.resolve().name}",
        f"{kind} of {_local(run.model)}, trained by {str(run.recipe.task).upper()} on {_local(dataset)} "
        f"for {step} steps with vramwise.",
        f"## Settings\n\n```yaml\n{_settings(run)}```",
        _memory(output, step),
        _evaluation(output, step),
        f"## Versions\n\n{', '.join(_versions())}, Python packages.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def is_hub_id(name: str) -> bool:
    """Return whether `name` is that of a repository, not of something on this machine."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


def _dataset(run: RunFile) -> str:
    given = (run.train or {}).get("dataset", "")
    name = str(given.get("name", "") if isinstance(given, dict) else given)
    return "openai/gsm8k" if name == "gsm8k" else name


def _local(name: str) -> str:
    """Return a path's last part: where it lies on somebody's machine is nobody's business."""
    return name if is_hub_id(name) or "/" not in name else Path(name).name


def _settings(run: RunFile) -> str:
    train = {key: value for key, value in (run.train or {}).items() if key not in UNSAID}
    document = run.model_dump(mode="json", exclude_unset=True)
    document = {"model": run.model, "recipe": document.get("recipe", {}), "train": train}
    return yaml.safe_dump(_shortened(document), sort_keys=False)


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(each) for each in value]
    is_path = isinstance(value, str) and (value.startswith(("/", "~")) or "/../" in f"/{value}/")
    return Path(value).name if is_path else value


def _memory(output: Path, step: int) -> str:
    planned: dict[str, int] = {}
    measured: dict[str, int] = {}
    how = ""
    for line in read_metrics(output / METRICS_FILE):
        if line["step"] >= step:
            break
        for key, value in line.items():
            _, _, rest = key.partition("memory/")
            phase, _, name = rest.partition("/")
            if name == "planned_bytes":
                planned[phase] = max(value, planned.get(phase, 0))
            elif name in MEASURED:
                how = name.removesuffix("_bytes")
                measured[phase] = max(value, measured.get(phase, 0))
    rows = [
        f"| {phase} | {format_bytes(size)} | {format_bytes(measured[phase])} |"
        for phase, size in planned.items()
        if phase in measured
    ]
    if not rows:
        return ""
    head = f"## Memory\n\nThe largest of each phase.\n\n| phase | planned | {how} |\n|---|---|---|"
    return "\n".join([head, *rows])


def _evaluation(output: Path, step: int) -> str:
    path = output / EVALUATIONS_FILE
    lines = [line for line in read_metrics(path) if line["step"] <= step]
    if not lines:
        return ""
    last = lines[-1]
    rows = []
    for name, value in last.items():
        if f"{name}/low" not in last or value is None or not math.isfinite(value):
            continue
        rows.append(f"| {name} | {value:.4g} | {last[f'{name}/low']:.4g} to {last[f'{name}/high']:.4g} |")  # fmt: skip
    head = (
        f"## Evaluation\n\nAfter {last['step']} steps, {last['samples']:.0f} samples held out.\n\n"
    )
    return "\n".join([f"{head}| figure | value | 95% interval |\n|---|---|---|", *rows])


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def read_step(checkpoint: Path) -> int:
    """Return the steps done before a checkpoint, the best one's too."""
    for name in ("state.json", "evaluation.json"):
        if (checkpoint / name).exists():
            return int(json.loads((checkpoint / name).read_text(encoding="utf-8"))["step"])
    return 0
