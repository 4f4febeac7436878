"""Run documents of the two-rank tests: ragged samples, and more of them than divide evenly."""

import json

import pytest


@pytest.fixture
def sft_document(small_model, tmp_path):
    """Return a function that makes an SFT document with 7 samples a step."""
    rows = [
        {"prompt": f"{a} + {b} =", "completion": f" {a + b}\n" * (1 + a * b % 4)}
        for a in range(10)
        for b in range(10)
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def make(*, train=None, **recipe):
        return {
            "model": str(small_model),
            "recipe": {
                "task": "sft",
                "method": "lora",
                "dtype": "fp32",
                "context": 64,
                "micro_batch_size": 2,
                "lora": {"rank": 4},
            }
            | recipe,
            "train": {
                "output": str(tmp_path / "out"),
                "dataset": {"name": str(path)},
                "rewards": [],
                "steps": 20,
                "lr": 1e-2,
                "preflight": False,
                "print_completions": 0,
                "prompts_per_step": 7,
            }
            | (train or {}),
        }

    return make


@pytest.fixture
def grpo_document(document):
    """Return a function that makes a GRPO document with 5 prompts a step."""

    def make(*, train=None, **recipe):
        return document(
            recipe={"micro_batch_size": 2} | recipe,
            train={"prompts_per_step": 5, "lr": 1e-2, "steps": 20} | (train or {}),
        )

    return make
