"""What people take away: run.yaml that the trainer and the planner take, and a true command line."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from app.cli import app as command
from app.export import DATASETS, command_line, run_yaml
from app.runs import DEFAULTS, run_of
from planner.plan import plan
from planner.run.runfile import load_run_file, machine_of
from trainer.config import read_run

RUNS: list[dict[str, Any]] = [
    {},
    {"task": "sft", "method": "lora", "batch": 4, "packing": "yes"},
    {"task": "sft", "method": "full", "optimizer": "adamw-8bit", "gpu": "own size", "vram": 30.0},
    {"model": "llama-3.2-1b", "rank": 64, "prompt": 300, "generations": 4, "ram": 64.0},
    {"framework": "trl", "batch": 8, "checkpointing": "offload", "targets": "q_proj,v_proj"},
    {"task": "serve", "model": "qwen2.5-3b", "utilization": 0.8, "seqs": 32},
    {"task": "dpo", "beta": 0.2},
]


@pytest.mark.parametrize("values", RUNS, ids=str)
def test_run_yaml_plans_to_the_same_bytes(values: dict[str, Any], tmp_path: Path) -> None:
    run = run_of({**DEFAULTS, **values})
    file = tmp_path / "run.yaml"
    file.write_text(run_yaml(run)[0])
    again = load_run_file(file)
    planned = plan(run.model, again.recipe, machine_of(again.machine))
    assert planned.peak_bytes == plan(run.model, run.recipe, run.machine).peak_bytes


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("values", RUNS[:4], ids=str)
def test_the_trainer_takes_run_yaml(values: dict[str, Any], dataset: str, tmp_path: Path) -> None:
    run = run_of({**DEFAULTS, **values})
    text, refused = run_yaml(run, dataset=dataset, steps=3)
    assert refused == ""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    read, train = read_run(file)
    assert read.recipe == run.recipe
    assert train.steps == 3


def test_what_the_trainer_refuses_is_said() -> None:
    _, refused = run_yaml(run_of({**DEFAULTS, "task": "dpo"}))
    assert "not dpo" in refused
    _, refused = run_yaml(run_of({**DEFAULTS, "loss": "full"}))
    assert "recipe.loss" in refused


@pytest.mark.parametrize("values", RUNS, ids=str)
def test_the_command_line_says_the_same_run(values: dict[str, Any], tmp_path: Path) -> None:
    run = run_of({**DEFAULTS, **values})
    line, left_out = command_line(run)
    words = shlex.split(line)
    saved = tmp_path / "run.yaml"
    result = CliRunner().invoke(command, [*words[1:], "--save", str(saved)])
    assert result.exit_code == 0, result.output
    again = yaml.safe_load(saved.read_text())
    wanted = run.recipe.model_dump(mode="json", exclude_defaults=True)
    if not left_out:
        assert again["recipe"] == wanted
    assert load_run_file(saved).machine == run.section
