"""What the allocator holds: pools add up, the capacity stops them, the peak is never undercut."""

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
def test_reserved_lies_between_the_live_peak_and_the_upper_end(method, checkpointing):
    result = made(method=method, checkpointing=checkpointing)
    assert result.low_bytes < result.peak_bytes <= result.reserved_peak_bytes <= result.high_bytes


def test_head_and_layer_blocks_add_up_though_never_alive_together():
    result = made()
    loss, backward = result.phase("loss"), result.phase("backward")
    kept = {term.name: term.bytes for term in loss.terms}["activations"]
    layer = {term.name: term.bytes for term in backward.terms}["activations"] - kept
    assert layer > GiB
    assert result.reserved_peak_bytes > loss.total_bytes + layer


def test_a_full_card_makes_the_allocator_give_blocks_back():
    free = made()
    tight = made(vram=f"{free.peak_bytes / GiB + 1.5:.3f}GiB")
    assert tight.peak_bytes == free.peak_bytes
    assert free.peak_bytes <= tight.reserved_peak_bytes < free.reserved_peak_bytes
    assert tight.reserved_peak_bytes <= tight.capacity_bytes
    assert tight.verdict == "tight"


def test_a_run_that_does_not_fit_reserves_its_peak():
    result = made(vram="8GiB")
    assert result.reserved_peak_bytes == result.peak_bytes
    assert not result.fits


def test_collectives_need_memory_outside_torch():
    one, two = made(), made(gpus=2, sharding="ddp")
    outside = [p.device_used_bytes - p.reserved_peak_bytes for p in (one, two)]
    assert outside[0] == one.machine.context_bytes
    assert outside[1] - outside[0] == 800 * 1024**2


def test_many_small_gradients_share_the_head_s_blocks():
    result = made(method="full", optimizer="adamw")
    parts = {
        name: {term.name: term.bytes for term in result.phase(name).terms}
        for name in ("forward", "loss", "backward", "step")
    }
    step_work = parts["step"]["optimizer"] - parts["forward"]["optimizer"]
    apart = (
        parts["forward"]["weights"]
        + parts["forward"]["optimizer"]
        + parts["backward"]["activations"]
        + parts["loss"]["logits"]
        + parts["step"]["gradients"]
        + step_work
    )
    assert result.reserved_peak_bytes < apart * 1.05
