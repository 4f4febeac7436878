"""A context above what the model was made for: said with the scaling it needs, or refused."""

from dataclasses import replace
from typing import Any

import pytest

from planner.errors import UsageError
from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model, load_catalogue
from planner.plan import plan
from planner.run.recipe import Recipe, Task

CARD = make_machine("h200")


def _scaled(rope: dict[str, Any] | None, **more: Any) -> Any:
    config = {**load_catalogue()["qwen2.5-0.5b"]["config"], "rope_scaling": rope, **more}
    return model_spec_from_config(config, name="scaled")


def _said(model: Any, task: Task, context: int) -> str:
    planned = plan(model, Recipe(task=task, context=context), CARD)
    return " ".join(note for note in planned.assumptions if "positions" in note or "YaRN" in note)


def test_above_the_models_positions_is_said_with_the_scaling() -> None:
    llama = catalogue_model("llama-2-7b")
    assert _said(llama, Task.SFT, 4096) == ""
    said = _said(llama, Task.SFT, 10_000)
    assert "above the 4,096 positions" in said
    assert '"factor": 2.5, "original_max_position_embeddings": 4096' in said


def test_vllm_refuses_what_vllm_refuses() -> None:
    llama = catalogue_model("llama-2-7b")
    assert plan(llama, Recipe(task=Task.SERVE, context=4096), CARD).peak_bytes
    with pytest.raises(UsageError, match="vLLM refuses such a max_model_len"):
        plan(llama, Recipe(task=Task.SERVE, context=4097), CARD)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, 32768),
        ({"rope_type": "linear", "factor": 2.0}, 65536),
        ({"type": "dynamic", "factor": 4}, 131072),
        ({"rope_type": "llama3", "factor": 8.0}, 32768),
        ({"rope_type": "longrope", "factor": 8.0}, 32768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"full": {"rope_type": "linear", "factor": 2.0}, "sliding": {}}, 65536),
        ({"rope_type": "linear", "factor": "x"}, 32768),
    ],
)
def test_scaling_of_the_config_counts(rope: dict[str, Any] | None, longest: int) -> None:
    assert _scaled(rope).longest == longest


def test_yarn_under_vllm_needs_the_field_too() -> None:
    yarn = _scaled({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})
    assert "raise that field" in _said(yarn, Task.SERVE, 100_000)
    assert _said(yarn, Task.SFT, 100_000) == ""


def test_a_learned_table_ends() -> None:
    gpt2 = catalogue_model("gpt2")
    assert gpt2.learned_positions
    with pytest.raises(UsageError, match="learned table of 1,024 positions"):
        plan(gpt2, Recipe(task=Task.SFT, context=2048), CARD)


def test_no_limit_no_word() -> None:
    model = replace(catalogue_model("llama-2-7b"), max_position=0)
    assert _said(model, Task.SFT, 100_000) == ""
