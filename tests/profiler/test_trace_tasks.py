"""Plan and trace of preferences, reward models, distillation, embeddings and evaluation, phase by phase."""

from typing import Any

import pytest

from planner.families import model_spec_from_config
from planner.machines.machine import Machine
from planner.models.catalogue import load_catalogue
from planner.plan import plan
from planner.run.runfile import make_recipe
from planner.units import GiB
from profiler.compare import compare
from profiler.subjects.build import shorten
from profiler.trace import trace
from trainer.dry_run import subject_for

LORA: dict[str, Any] = {"method": "lora", "framework": "trl"}
CASES: dict[str, dict[str, Any]] = {
    "dpo": {**LORA, "task": "dpo"},
    "kto": {**LORA, "task": "kto", "method": "full"},
    "orpo": {**LORA, "task": "orpo"},
    "reward": {**LORA, "task": "reward"},
    "distill": {**LORA, "task": "distill", "teacher": "smollm2-360m"},
    "embed": {"task": "embed", "method": "full", "framework": "hf-trainer"},
    "GradCache": {"task": "embed", "method": "full", "framework": "hf-trainer", "mini_batch": 1},
    "GradCache, accumulated": {
        "task": "embed",
        "method": "full",
        "framework": "hf-trainer",
        "mini_batch": 1,
        "gradient_accumulation": 2,
    },
    "kto, accumulated": {**LORA, "task": "kto", "method": "full", "gradient_accumulation": 2},
    "dpo, accumulated": {**LORA, "task": "dpo", "method": "full", "gradient_accumulation": 2},
    "sft, accumulated": {"method": "full", "framework": "hf-trainer", "gradient_accumulation": 2},
    "sft, units": {
        "method": "full",
        "framework": "hf-trainer",
        "gradient_accumulation": 2,
        "sharding": "fsdp2",
    },
    "sft, ours": {"method": "full", "framework": "vramwise", "gradient_accumulation": 2},
    "evaluation": {
        "method": "lora",
        "framework": "hf-trainer",
        "evaluation": {"samples": 4, "batch_size": 1, "logits": True},
    },
}
FAST = ("dpo", "reward", "evaluation", "sft, accumulated", "sft, ours", "sft, units")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_every_phase_of_a_task_is_as_large_as_planned(name: str) -> None:
    config = shorten(load_catalogue()["smollm2-135m"]["config"], 2)
    recipe = make_recipe(**{"dtype": "bf16", "context": 128, "micro_batch_size": 2, **CASES[name]})
    model = model_spec_from_config(config, name=name, source="test")
    gpus = 2 if "sharding" in CASES[name] else 1
    planned = plan(model, recipe, Machine(vram_bytes=1024 * GiB, num_gpus=gpus))
    found = compare(planned, trace(subject_for(planned.resolved, recipe, config)))
    for cell in found.totals:
        if cell.phase != "load":
            assert cell.error is not None, cell
            assert abs(cell.error) < 0.02, cell
