"""Whose memory a plan shows: the distinct ranks, the fullest one and why."""

from typing import Any

from planner.machines.machine import make_machine
from planner.plan import Plan, plan
from planner.report import text
from planner.run.runfile import make_recipe
from tests.planner.toys import LLAMA


def planned(gpus: int, **fields: Any) -> Plan:
    settled = {"method": "full", "context": 512, "micro_batch_size": 1, **fields}
    return plan(LLAMA, make_recipe(task="sft", **settled), make_machine("h100", gpus=gpus))


def test_ranks_that_are_alike_are_one() -> None:
    result = planned(8, framework="hf-trainer", sharding="fsdp2")
    kinds = result.to_dict()["ranks"]
    assert kinds == [
        {"rank": 0, "count": 8, "role": "all alike", "peak_bytes": result.peak_bytes,
         "peak_phase": result.peak_phase}
    ]  # fmt: skip
    said = text(result)
    assert "rank 0 of 8 (all alike), shard 8; groups: world 8" in said
    assert "rank 0" not in text(planned(1, framework="hf-trainer"))


def test_the_fullest_stage_is_the_one_shown_and_said_why() -> None:
    parallel = {"pipeline": 3}
    result = planned(6, framework="megatron", parallel=parallel, gradient_accumulation=6)
    kinds = result.to_dict()["ranks"]
    assert [kind["rank"] for kind in kinds] == [0, 2, 4]
    assert sum(kind["count"] for kind in kinds) == 6
    assert result.peak_bytes == max(kind["peak_bytes"] for kind in kinds)
    fullest = max(kinds, key=lambda kind: kind["peak_bytes"])
    assert f"rank {fullest['rank']} of 6 is shown, the fullest: stage" in text(result)
    assert text(result).count("stage 2 of 3: 1 layers") == 1


def test_the_range_of_a_pool_begins_no_higher_than_what_is_alive() -> None:
    """FSDP2's streams have pools of their own: what is reserved is far above the peak."""
    result = planned(8, framework="torchtitan", sharding="fsdp2")
    assert result.reserved_peak_bytes > 1.2 * result.peak_bytes
    assert result.low_bytes <= result.peak_bytes <= result.high_bytes
