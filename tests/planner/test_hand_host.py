"""Host memory by hand: DeepSpeed's buffers, FSDP's pinned shards, swapping to a disk.

The toy has 239,040 parameters; over four ranks a shard is 59,760, its largest tensor 64,000.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UsageError
from planner.importers import launch_document
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import Plan, plan
from planner.report import text
from planner.run.runfile import make_recipe
from tests.planner.toys import LLAMA, gpus

FULL: dict[str, Any] = {
    "framework": "hf-trainer",
    "method": "full",
    "optimizer": "adamw",
    "micro_batch_size": 1,
    "context": 64,
    "checkpointing": "full",
}


def offloaded(count: int = 4, **fields: Any) -> Plan:
    return plan(LLAMA, make_recipe(**{**FULL, "optimizer_offload": True, **fields}), gpus(count))


def host(result: Plan) -> dict[str, int]:
    return {term.name: term.bytes for term in result.host_terms}


def on_device(result: Plan, phase: str) -> dict[str, int]:
    return {term.name: term.bytes for term in result.phase(phase).terms}


STATES = 4 * 12 * 59_760  # four ranks: fp32 master and two fp32 states
STAGES: list[tuple[dict[str, Any], dict[str, int]]] = [
    # stage 3: fp32 gradients and a 16-bit buffer where they arrive
    ({"sharding": "zero3"}, {"optimizer": STATES, "gradients": 4 * (239_040 + 119_520)}),
    # stage 2: fp32 gradients; a 16-bit copy of the shard and one of the largest gradient
    (
        {"sharding": "zero2"},
        {"optimizer": STATES, "gradients": 4 * 239_040, "weights": 4 * (119_520 + 128_000)},
    ),
    # several micro-batches are summed in 16 bits on the host
    (
        {"sharding": "zero2", "gradient_accumulation": 4},
        {
            "optimizer": STATES,
            "gradients": 4 * (239_040 + 119_520),
            "weights": 4 * (119_520 + 128_000),
        },
    ),
    # page-locked: each buffer a power of two, but for the states, which the optimizer makes itself
    (
        {"sharding": "zero2", "offload": {"pinned": True}},
        {"optimizer": 4 * (262_144 + 478_080), "gradients": 4 * 262_144, "weights": 4 * 262_144},
    ),
    # offload_param: the 16-bit shard of 119,520 B, page-locked by DeepSpeed whatever the config says
    (
        {"sharding": "zero3", "offload": {"parameters": True}},
        {"optimizer": STATES, "gradients": 4 * 358_560, "weights": 4 * 131_072},
    ),
    # swapped: four pinned buffers of the largest group; gradients stay
    (
        {"sharding": "zero3", "offload": {"device": "nvme"}},
        {"optimizer": 4 * 4 * 262_144, "gradients": 4 * 358_560},
    ),
]


@pytest.mark.parametrize(("fields", "expected"), STAGES)
def test_deepspeeds_buffers(fields: dict[str, Any], expected: dict[str, int]) -> None:
    assert host(offloaded(**fields)) == expected


def test_parameters_on_a_disk() -> None:
    result = offloaded(sharding="zero3", offload={"parameters": True, "device": "nvme"})
    # all 59,760 are under max_in_cpu; five buffers of 10^8 elements x 2 B: 2^28 each
    assert host(result)["weights"] == 4 * (119_520 + 5 * 2**28)


def test_what_is_left_on_the_device() -> None:
    plain = offloaded(sharding="zero3", optimizer_offload=False)
    moved = offloaded(sharding="zero3")
    assert on_device(plain, "step")["gradients"] == 119_520
    # the largest gradient; the bucket, 5 x 10^8 elements, is communication's
    assert on_device(moved, "step")["gradients"] == 2 * 64_000
    assert on_device(moved, "step")["communication"] == 10**9
    assert "optimizer" not in on_device(moved, "step")
    parts = {"persistence": 64, "live": 100_000, "reuse": 0}
    away = offloaded(sharding="zero3", offload={"parameters": True}, buckets=parts)
    assert "weights" not in on_device(away, "step")
    # 100,000 elements and 7 norms of 64; while a group is gathered (the default prefetch takes all that
    # is ahead), its part comes from the host: all 238,592 that are not norms, of 4 ranks a quarter
    assert on_device(away, "forward")["weights"] == 2 * (100_000 + 448) + 2 * 238_592 // 4


def test_fsdps_pinned_shards() -> None:
    result = offloaded(
        sharding="fsdp",
        mixed_precision="bf16",
        optimizer_offload=False,
        offload={"parameters": True},
    )
    # fp32 shards: 128,064 B outside the layers -> 131,072; 36,992 B a layer -> 65,536
    shards = 131_072 + 3 * 65_536
    assert host(result) == {
        "weights": 4 * shards,
        "gradients": 4 * shards,
        "optimizer": 4 * 478_080,
    }
    assert on_device(result, "step")["gradients"] == 36_992
    assert "weights" not in on_device(result, "load")


def test_a_node_holds_eight_ranks() -> None:
    eight, sixteen = (host(offloaded(count, sharding="zero3")) for count in (8, 16))
    assert eight["optimizer"] == 8 * 12 * 29_880
    assert sixteen["optimizer"] == 8 * 12 * 14_940


def test_the_step_that_was_killed_on_64_gib() -> None:
    """8.03 B parameters with offload_optimizer on one GPU: 18 B each and the largest gradient."""
    model = catalogue_model("llama-3.1-8b")
    machine = make_machine("a100-80gb", host_ram="64GiB")
    for sharding in ("none", "zero2"):  # transformers' Trainer offloads by DeepSpeed only
        recipe = make_recipe(**{**FULL, "optimizer_offload": True, "sharding": sharding})
        result = plan(model, recipe, machine)
        assert result.host_peak_bytes == 18 * 8_030_261_248 + 2 * 128_256 * 4_096
        assert result.verdict == "does not fit"
        assert "host RAM: needs 135.60 GiB" in text(result)


def test_our_own_trainer_keeps_states_only() -> None:
    result = offloaded(1, framework="vramwise", master_weights=False)
    assert set(host(result)) == {"optimizer"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sharding": "zero2", "offload": {"parameters": True}}, "offload.parameters: zero2"),
        ({"sharding": "fsdp", "offload": {"device": "nvme"}}, "offload.device: fsdp"),
    ],
)
def test_what_no_engine_offloads(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        offloaded(**fields)


def test_deepspeeds_file_says_where_and_how(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "reduce_bucket_size": "auto",
    }
    path.write_text(json.dumps({"zero_optimization": zero}))
    assert launch_document(path)["recipe"] == {
        "sharding": "zero3",
        "optimizer_offload": True,
        "offload": {"parameters": True, "device": "nvme", "pinned": True},
    }


def test_accelerates_fsdp_offload_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_offload_params: true\n"
    )
    assert launch_document(path)["recipe"] == {"sharding": "fsdp", "offload": {"parameters": True}}
