"""Nine people and what they came for, each by the command line alone: a right answer, and what to do next."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.runfile import load_run_file, make_recipe

Output = pytest.CaptureFixture[str]


def ask(capsys: Output, *arguments: str, code: int = 0) -> str:
    assert main([*arguments]) == code
    return capsys.readouterr().out


def document(capsys: Output, *arguments: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(ask(capsys, *arguments, "--json"))
    return parsed


def test_a_newcomer_with_a_16_gb_laptop(capsys: Output) -> None:
    """Knows the memory of the laptop and nothing else."""
    rows = document(capsys, "recommend", "--gpu", "16 GB", "--limit", "1")["rows"]
    assert rows[0]["parameters"] > 5e9
    assert rows[0]["released"] >= "2025"
    first = rows[0]["at_least"]["flags"].split()
    line = ["plan", rows[0]["model"], *first, "--gpu", "16 GB", "--check"]
    assert ask(capsys, *line).startswith("FITS")


def test_a_lab_with_eight_h100(capsys: Output) -> None:
    """Wants a 70B model in full or with adapters, and forgot to shard it."""
    line = ["plan", "llama 3.3 70b", "--gpu", "h100", "--gpus", "8", "--method", "full"]
    out = ask(capsys, *line)
    assert "nothing is divided" in out
    levers = out.partition("Best levers")[2].partition("assumed")[0]
    assert "sharding=fsdp2" in levers
    assert "method=" not in levers  # what keeps the result comes first
    rows = document(capsys, "recommend", "llama-3.3-70b", "--gpu", "h100", "--gpus", "8")["rows"]
    assert {row["method"] for row in rows} == {"full", "lora", "qlora"}
    for row in rows:
        machine = make_machine("h100", gpus=8)
        made = plan(catalogue_model("llama-3.3-70b"), make_recipe(**row["recipe"]), machine)
        assert made.fits
    lora = next(row for row in rows if row["method"] == "lora")
    assert "fsdp2" in lora["layout"]


def test_someone_with_an_error_log(capsys: Output, tmp_path: Path) -> None:
    """PowerShell wrote the log, in UTF-16."""
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 23.51 GiB of which 512.00 MiB is free. Process 1 has 22.99 GiB memory in use. Of "
        "the allocated memory 21.50 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch "
        "but unallocated.\n"
    )
    path = tmp_path / "log.txt"
    path.write_bytes(b"\xff\xfe" + text.encode("utf-16-le"))
    found = document(capsys, "explain", str(path), "--model", "llama-3.1-8b", "--gpu", "rtx-4090")
    assert found["parsed"]["tried_bytes"] == 2 << 30
    assert found["causes"]
    assert found["fixes"]


def test_a_reinforcement_learner_on_a_3090(capsys: Output) -> None:
    """Was told that 16K does not go; it does, in waves, and the price is said."""
    line = [
        "recommend",
        "qwen3 8b",
        "--gpu",
        "rtx-3090",
        "--task",
        "rl",
        "--context",
        "16k",
        "--limit",
        "2",
    ]
    rows = document(capsys, *line)["rows"]
    qlora = next(row for row in rows if row["method"] == "qlora")
    assert qlora["context"] >= 16384
    assert "waves" in ask(capsys, *line)


def test_someone_who_serves(capsys: Output) -> None:
    """Wants to know how many requests go at once, and what to change when none does."""
    fits = document(
        capsys, "plan", "qwen3-8b", "--gpu", "rtx-4090", "--task", "inference", "--context", "8k"
    )
    assert fits["serving"]["kv_tokens"] > 8192
    assert fits["serving"]["max_concurrency"] > 1
    out = ask(capsys, "plan", "qwen3-32b", "--gpu", "h100", "--task", "serve", "--context", "40960")
    assert "What makes it start" in out
    assert "--kv-cache-dtype fp8" in out


def test_someone_with_a_mac(capsys: Output) -> None:
    """Is not told to offload to the memory that is the GPU's already, nor to use what MPS has not."""
    out = ask(
        capsys,
        "plan",
        "llama-3.1-8b",
        "--gpu",
        "MacBook M4 Pro 48GB",
        "--method",
        "full",
        "--checkpointing",
        "none",
    )
    levers = out.partition("Best levers")[2].partition("assumed")[0]
    assert "offload" not in levers
    assert "8bit" not in levers
    assert "cuBLAS" not in out


def test_someone_who_rents_by_the_hour(capsys: Output) -> None:
    """Has a model and no card yet."""
    out = ask(capsys, "plan", "llama-3.1-8b", "--method", "qlora", "--context", "8k")
    assert "the cheapest first" in out
    assert "rtx-4090" in out
    assert "the smallest that takes it: rtx-" in out
    found = document(capsys, "recommend", "llama-3.1-8b", "--context", "8k", "--limit", "2")["rows"]
    usd = [row["spent"]["usd_middle"] for row in found]
    assert usd == sorted(usd)


def test_a_user_of_another_trainer(capsys: Output, tmp_path: Path) -> None:
    """Pastes the command as it stands, and takes the plan back as that tool's settings."""
    command = [
        "trl",
        "sft",
        "--model_name_or_path",
        "Qwen/Qwen3-8B",
        "--use_peft",
        "--load_in_4bit",
        "--max_length",
        "4096",
    ]
    run = tmp_path / "run.yaml"
    ask(capsys, "plan", *command, "--gpu", "24 GB", "--save", str(run))
    assert load_run_file(run).recipe.method == "qlora"
    text = ask(
        capsys, "plan", "qwen3 8b", "--gpu", "24 GB", "--method", "qlora", "--export", "axolotl"
    )
    assert "base_model: Qwen/Qwen3-8B" in text


def test_someone_with_an_old_card(capsys: Output) -> None:
    """A T4 has no bf16: said, and what is recommended for it does not use it."""
    out = ask(capsys, "plan", "qwen3-4b", "--gpu", "colab t4", "--method", "qlora")
    assert "no bf16 units" in out
    rows = document(capsys, "recommend", "qwen3-4b", "--gpu", "t4")["rows"]
    assert rows
    assert all(row["recipe"]["dtype"] == "fp16" for row in rows)
