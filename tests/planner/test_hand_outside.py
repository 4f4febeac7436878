"""Outside torch's pool by hand: contexts and a communicator; and the sort behind an embedding's gradient."""

import pytest

from planner.allocator.pool import Chunk
from planner.machines.communicators import communicator
from planner.machines.machine import make_machine
from planner.machines.vllm_overheads import communicators, constant
from planner.plan import plan_resolved
from planner.replay.player import Player
from planner.replay.steps import Run
from planner.reserved import outside_bytes
from planner.terms.groups import communicators as communicators_of
from planner.units import MiB
from tests.planner.toys import LLAMA, choices


@pytest.mark.parametrize(
    ("card", "ranks", "size"),
    [
        ("a100-80gb", 1, 0),
        ("a100-80gb", 2, 544 * MiB),  # nccl#964
        ("a100-80gb", 3, 688 * MiB),
        ("a100-80gb", 64, 688 * MiB),  # by channels, not by ranks
        ("rtx-4090", 4, 182_536_110),  # no NVLink
    ],
)
def test_a_communicator_by_links(card: str, ranks: int, size: int) -> None:
    assert communicator(make_machine(card), ranks).typical == size


@pytest.mark.parametrize(
    ("card", "links"), [("v100-sxm2-32gb", True), ("a100-80gb", True), ("rtx-3090", False)]
)
def test_boards_of_300_gb_a_second_are_linked(card: str, links: bool) -> None:
    # V100's links have 300 GB/s; a pair of RTX 3090 112.5
    name = "communicators_nvlink_bytes" if links else "communicators_pcie_bytes"
    assert communicators(make_machine(card), 2) == constant(name)
    assert (communicator(make_machine(card), 4).typical == 688 * MiB) is links


@pytest.mark.parametrize(("quantization", "contexts"), [("gptq-4bit", 4), ("nf4", 1)])
def test_a_gptq_base_makes_a_context_of_every_process_on_every_gpu(
    quantization: str, contexts: int
) -> None:
    machine = make_machine("a100-80gb", gpus=4)
    fields = {"method": "qlora", "quantization": quantization, "sharding": "fsdp"}
    r = choices(LLAMA, machine, framework="fms-hf-tuning", **fields)
    assert outside_bytes(r, machine) == contexts * machine.context_bytes + 688 * MiB
    other = choices(LLAMA, machine, framework="hf-trainer", **fields)
    assert outside_bytes(other, machine) == machine.context_bytes + 688 * MiB


def test_the_sort_behind_an_embeddings_gradient_is_played() -> None:
    r = choices(LLAMA, method="full", optimizer="sgd", context=4096)
    for tokens, sorting in (
        (3_072, 0),
        # three of 4,096 indices, two of 1,000 runs, 1,409 places and partial sums of 64 x 4 B
        (4_096, 3 * 32_768 + 2 * 8_192 + 11_776 + 360_960),
    ):
        run = Run(LLAMA, r, Player())
        grads: list[Chunk] = []
        run._embedding_grad(tokens, grads, accumulate=False)
        assert run.player.device.peak_allocated_bytes == 128_000 + sorting
        assert len(grads) == 1


def test_every_group_of_a_rank_has_a_communicator_of_its_own() -> None:
    machine = make_machine("a100-80gb", gpus=16)
    fields = {"method": "full", "sharding": "fsdp2", "parallel": {"data_replicate": 2}}
    r = choices(LLAMA, machine, framework="hf-trainer", **fields)
    found = communicators_of(r, machine)
    assert [(group.name, group.size) for group, _ in found.groups] == [
        ("world", 16), ("shard", 8), ("replicate", 2),
    ]  # fmt: skip
    assert found.held.typical == (2 * 688 + 544) * MiB
    assert outside_bytes(r, machine) == machine.context_bytes + found.held.typical
    result = plan_resolved(LLAMA, r, machine)
    assert result.capacity_bytes == machine.vram_bytes - outside_bytes(r, machine)
    document = result.to_dict()["groups"]
    assert [group["typical_bytes"] for group in document] == [688 * MiB, 688 * MiB, 544 * MiB]


def test_vllm_beside_the_trainer_makes_groups_of_its_own() -> None:
    machine = make_machine("a100-80gb", gpus=8)
    engine = {"kind": "vllm-push", "tensor_parallel": 2}
    fields = {"task": "grpo", "method": "full", "sharding": "fsdp", "engine": engine}
    r = choices(LLAMA, machine, framework="trl", **fields)
    names = [group.name for group, _ in communicators_of(r, machine).groups]
    assert names == ["world", "vllm tensor"]
    served = choices(
        LLAMA, machine, framework="trl", **{**fields, "engine": {"kind": "vllm-server"}}
    )
    assert [group.name for group, _ in communicators_of(served, machine).groups] == ["world"]
