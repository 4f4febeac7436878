"""The recipe in a plan's JSON: every choice made, and as a recipe the same run."""

import pytest

from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import Recipe
from planner.run.runfile import make_recipe

RUNS = [
    {"task": "sft"},
    {"task": "sft", "method": "full", "framework": "hf-trainer", "sharding": "fsdp2"},
    {"task": "sft", "method": "full", "framework": "axolotl", "sharding": "zero3", "context": 4096},
    {"task": "sft", "method": "full", "framework": "torchtitan", "sharding": "fsdp2"},
    {"task": "sft", "method": "qlora", "framework": "unsloth", "lora": {"rank": 64}},
    {"task": "grpo", "framework": "trl==1.9"},
    {"task": "grpo", "framework": "trl", "engine": {"kind": "vllm-push"}, "method": "full"},
    {"task": "grpo", "num_generations": 16, "prompt_length": 300},
    {"task": "dpo", "framework": "trl", "method": "full"},
    {"task": "kto"},
    {"task": "embed", "micro_batch_size": 32, "mini_batch": 4},
    {"task": "distill", "teacher": "llama-3.2-3b"},
    {"task": "ppo", "framework": "trl"},
    {"task": "serve", "framework": "vllm", "context": 8192},
]


@pytest.mark.parametrize("fields", RUNS, ids=lambda fields: f"{fields['task']}")
def test_the_recipe_of_a_plan_is_the_same_run(fields: dict[str, object]) -> None:
    model, machine = find_model("llama-3.2-1b"), make_machine("h100", gpus=2)
    first = plan(model, make_recipe(**fields), machine)
    written = first.to_dict()["recipe"]
    again = plan(model, Recipe.model_validate(written), machine)
    sizes = [(phase.name, phase.total_bytes) for phase in first.phases]
    assert [(phase.name, phase.total_bytes) for phase in again.phases] == sizes
    assert again.to_dict()["recipe"] == written
    for name in ("dtype", "micro_batch_size", "attention"):
        assert written[name] is not None
