"""Teaches a small model one-digit sums by SFT, but not well: the demo's GRPO does the rest."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from trainer import checkpoint as checkpoints
from trainer.config import parse_run
from trainer.session import Say
from trainer.sft import train_sft
from trainer.small_model import make_small_model
from trainer.tasks.arithmetic import ArithmeticTask

SFT_STEPS = 250
SFT_BATCH = 64
DATA_FILE = "sums.jsonl"


def teach_small_model(folder: Path, *, say: Say, steps: int = SFT_STEPS) -> None:
    """Write a model to `folder` that answers some one-digit sums right; whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        root = Path(scratch)
        make_small_model(root / "base", hidden=128, layers=3, heads=4, intermediate=256)
        (root / DATA_FILE).write_text("\n".join(_lines(steps * SFT_BATCH)), encoding="utf-8")
        run, train = parse_run(_document(root, steps), root=root)
        say(f"teaching a small model one-digit sums: {steps} SFT steps")
        result = train_sft(run, train, root=root)
        taught = checkpoints.latest(result.output).path
        for name in ("training.pt", "state.json"):
            (taught / name).unlink()
        if folder.exists():
            shutil.rmtree(folder)
        taught.rename(folder)


def _lines(count: int) -> list[str]:
    """Return bare sums with their answers, as JSON lines."""
    task = ArithmeticTask(digits=1, examples=0, size=count, seed=1)
    rows = (task[index] for index in range(count))
    return [
        json.dumps({"prompt": row["prompt"], "completion": f" {row['answer']}\n"}) for row in rows
    ]


def _document(root: Path, steps: int) -> dict[str, Any]:
    return {
        "model": str(root / "base"),
        "recipe": {
            "task": "sft",
            "method": "full",
            "dtype": "fp32",
            "context": 64,
            "micro_batch_size": SFT_BATCH,
            "checkpointing": "none",
        },
        "train": {
            "output": "taught",
            "dataset": DATA_FILE,
            "steps": steps,
            "lr": 2e-3,
            "warmup_steps": 20,
            "schedule": "cosine",
            "preflight": False,
            "save_every": 0,
        },
    }
