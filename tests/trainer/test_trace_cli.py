"""`vramwise trace` on a tiny model: tables, JSON, run files, refusals."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli import app

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def trace(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_own_step_without_a_gpu_stands_beside_its_plan(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "recording.json"
    result = trace(model, "--method", "lora", "--context", 64, "--json", "--save", saved)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    names = [phase["name"] for phase in document["phases"]]
    assert names == ["load", "forward", "loss", "backward", "step"]
    weights = [cell for cell in document["compare"]["terms"] if cell["term"] == "weights"]
    assert weights
    assert all(abs(cell["error"]) < 0.01 for cell in weights)
    assert json.loads(saved.read_text(encoding="utf-8"))["subject"] == "vramwise-sft"


def test_grpo_and_reference_steps_are_traced(model: Path) -> None:
    own = trace(model, "--task", "grpo", "--context", 96, "--generations", 2, "--steps", 1)
    assert own.exit_code == 0, own.output
    assert "vramwise-grpo: peak" in own.stdout
    other = trace(model, "--framework", "hf-trainer", "--context", 64, "--steps", 1)
    assert other.exit_code == 0, other.output
    assert "largest at the peak" in other.stdout


def test_a_run_file_is_traced(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {model}\nrecipe: {{task: sft, method: full, context: 64}}\n", encoding="utf-8"
    )
    result = trace(run, "--steps", 1)
    assert result.exit_code == 0, result.output
    assert "optimizer" in result.stdout


def test_a_small_gpu_fails_at_a_named_operator(model: Path) -> None:
    result = trace(model, "--method", "full", "--context", 64, "--vram", "512KiB", "--steps", 1)
    assert result.exit_code == 0, result.output
    assert "Out of memory" in result.stdout
    assert "CUDA out of memory. Tried to allocate" in result.stdout


def test_refusals_are_one_line(model: Path) -> None:
    result = trace(model, "--task", "dpo", "--context", 64)
    assert result.exit_code != 0
    assert "dpo" in str(result.exception or result.output)
