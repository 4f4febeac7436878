"""Outside torch's pool by hand: contexts and a communicator; and the sort behind an embedding's gradient."""

import pytest

from planner.allocator.pool import Chunk
from planner.machines.communicators import communicator
from planner.machines.machine import make_machine
from planner.replay.player import Player
from planner.replay.steps import Run
from planner.reserved import outside_bytes
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
