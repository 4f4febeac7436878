"""Selective checkpointing: the plan against the same step traced, phase by phase."""

from dataclasses import replace
from typing import Any

import pytest

from planner.errors import UnsupportedError
from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.phases import budget
from planner.run.recipe import Checkpointing, Recipe
from planner.run.resolve import resolve
from planner.run.resolved import Resolved
from profiler.subjects.from_recipe import step_options
from profiler.subjects.hf_sft import HfSft
from profiler.trace import trace

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MACHINE = make_machine("a100-80gb")
MODEL = model_spec_from_config(CONFIG, name="tiny", source="test")


def chosen(**fields: Any) -> Resolved:
    recipe = Recipe(
        framework="hf-trainer",
        method="full",
        micro_batch_size=2,
        context=1024,
        attention="flash",
        **fields,
    )
    return resolve(MODEL, recipe, MACHINE)


@pytest.mark.parametrize(
    "kind", [Checkpointing.SELECTIVE_OP, Checkpointing.SELECTIVE_LAYER], ids=str
)
def test_plan_and_trace_agree(kind: Checkpointing) -> None:
    # transformers has the step, torchtitan the policy
    r = replace(chosen(), checkpointing=kind, checkpoint_every=2)
    measured = {
        phase.name: phase.peak_bytes for phase in trace(HfSft(step_options(r, CONFIG))).phases
    }
    for phase in budget(MODEL, r, MACHINE).phases:
        if phase.name in ("forward", "loss", "backward", "step"):
            assert phase.total_bytes == pytest.approx(measured[phase.name], rel=0.005), phase.name


def test_a_compiled_step_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="compile cannot be traced") as refused:
        step_options(chosen(compile=True), CONFIG)
    assert refused.value.hint
