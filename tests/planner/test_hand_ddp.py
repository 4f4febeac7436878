"""DDP's bytes on one rank, computed by hand from the shapes of a small Llama."""

from typing import Any

import pytest

from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176 + 2 * 64
ROOT = 2 * 1000 * 64 + 64
ALL = 2 * (2 * LAYER + ROOT)
LARGEST = 2 * 1000 * 64


def planned(sharding: str = "ddp", framework: str = "hf-trainer", **fields: Any) -> Plan:
    settled: dict[str, Any] = {"method": "full", "checkpointing": "full", "context": 512, **fields}
    recipe = make_recipe(
        task="sft", framework=framework, sharding=sharding, micro_batch_size=1, **settled
    )
    spec = model_spec_from_config(CONFIG, name="toy")
    return plan(spec, recipe, make_machine("h100", gpus=4))


def term(result: Plan, phase: str, name: str) -> int:
    return sum(each.bytes for each in result.phase(phase).terms if each.name == name)


def test_buckets_are_there_from_the_first_forward_to_the_last_step() -> None:
    result = planned()
    assert term(result, "load", "communication") == 0  # before DDP is made
    for phase in ("forward", "loss", "backward", "step"):
        assert term(result, phase, "communication") == ALL
    assert term(result, "forward", "gradients") == 0
    assert term(result, "step", "gradients") == ALL


def test_nothing_is_doubled_where_gradients_are_views_of_the_buckets() -> None:
    result = planned(bucket_views=True)
    assert term(result, "step", "communication") == ALL
    assert term(result, "step", "gradients") == 0
    assert term(result, "backward", "gradients") <= LARGEST


@pytest.mark.parametrize(
    ("framework", "held"),
    [("hf-trainer", ALL), ("torchtune", 0)],  # the HF Trainer reduces the last micro-batch alone
)
def test_views_made_without_a_reduction_are_none(framework: str, held: int) -> None:
    """In no_sync the reducer does not see a gradient: it stays where autograd made it."""
    result = planned(framework=framework, bucket_views=True, gradient_accumulation=2)
    assert term(result, "forward", "gradients") == held
    assert term(result, "forward", "communication") == ALL


def test_only_what_is_trained_is_in_buckets() -> None:
    result = planned(method="lora", lora={"rank": 8, "targets": ["q_proj"]})
    assert term(result, "forward", "communication") == 2 * 4 * 8 * (64 + 64)


def test_a_trainer_that_replicates_by_fsdp2_copies_units_and_has_no_buckets() -> None:
    result = planned(framework="vramwise", loss="full")
    assert term(result, "step", "weights") == ALL
    assert term(result, "forward", "weights") == ALL + 2 * (ROOT + LAYER)
    assert term(result, "forward", "communication") == 0
    assert term(result, "step", "communication") == 0
    assert term(result, "step", "gradients") == ALL
    # the root's on their way out, and their sum
    assert term(result, "backward", "communication") in (2 * LAYER, 2 * ROOT)
