"""What the allocator holds: the replayed run, never less than the tensors alive, never more than fits."""

import pytest

from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import Plan, plan
from planner.run.recipe import Recipe
from planner.units import GiB


def made(vram: str = "1000GiB", gpus: int = 1, **changes: object) -> Plan:
    values = {
        "method": "lora",
        "framework": "hf-trainer",
        "micro_batch_size": 4,
        "context": 4096,
        "checkpointing": "full",
    }
    recipe = Recipe.model_validate(values | changes)
    return plan(find_model("mistral-7b-v0.1"), recipe, make_machine(vram=vram, gpus=gpus))


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "offload"])
def test_reserved_is_at_least_the_live_peak(method, checkpointing):
    result = made(method=method, checkpointing=checkpointing)
    assert result.peak_bytes <= result.reserved_peak_bytes
    assert result.low_bytes <= result.reserved_peak_bytes
    assert result.reserved.on_card == result.reserved.with_room


def test_blocks_of_the_head_and_of_a_layer_are_both_held():
    result = made(method="full", optimizer="sgd")
    loss = {term.name: term.bytes for term in result.phase("loss").terms}
    # logits in 16 bits, their fp32 copy and log-softmax come in blocks that no layer's tensor fills
    assert result.reserved_peak_bytes > result.peak_bytes + loss["logits"] // 20


def test_a_full_card_makes_the_allocator_give_blocks_back():
    free = made()
    assert free.verdict == "fits"
    room = (free.needed_bytes + free.reserved_peak_bytes) / 2
    tight = made(vram=f"{room / GiB:.3f}GiB")
    assert tight.peak_bytes == free.peak_bytes
    # what the card's allocator holds at last, more than what is alive and less than with room
    assert free.peak_bytes < tight.reserved_peak_bytes < free.reserved_peak_bytes
    assert tight.reserved_peak_bytes <= tight.capacity_bytes
    assert tight.reserved.with_room == free.reserved_peak_bytes
    assert tight.verdict == "tight"
    # fragments beside what is alive, less than what an allocator with room keeps
    assert free.peak_bytes < free.needed_bytes < free.reserved_peak_bytes


def test_a_run_that_does_not_fit_states_what_it_would_need():
    result, free = made(vram="8GiB"), made()
    assert result.reserved_peak_bytes == free.reserved_peak_bytes
    assert not result.fits


def test_collectives_need_memory_outside_torch():
    one, two = made(), made(gpus=2, sharding="ddp")
    outside = [p.device_used_bytes - p.reserved_peak_bytes for p in (one, two)]
    assert outside[0] == one.machine.context_bytes
    assert outside[1] - outside[0] == 544 * 1024**2  # a pair with NVLink


def test_steps_of_two_lengths_hold_blocks_of_both():
    result = made(loss="full")
    same, mixed = result.reserved_over((4096, 4096)), result.reserved_over((2900, 4096))
    assert mixed.on_card > same.on_card == result.reserved_peak_bytes


def test_the_json_states_the_three_figures():
    document = made().to_dict()
    three = document["reserved"]
    assert three["low_bytes"] <= three["typical_bytes"] <= three["high_bytes"]
    assert three["typical_bytes"] == document["reserved_peak_bytes"]
