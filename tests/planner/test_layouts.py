"""Layouts of several GPUs: which fit, in which order, and why the others lose; traffic by hand."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import app
from planner.answers.layouts import Tried, laid_out, layouts
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.report import layout_line, layout_table
from planner.run.runfile import make_recipe
from planner.speed.traffic import Sent, traffic
from planner.units import format_bytes
from tests.planner.toys import LLAMA, choices

GiB = 2**30


def search(name: str, gpus: int, fitting: int = 1, **fields: Any) -> list[Tried]:
    recipe = make_recipe(
        task="sft", framework="hf-trainer", **{"micro_batch_size": 1, "context": 4096, **fields}
    )
    machine = make_machine("h100-sxm", gpus=gpus)
    return layouts(catalogue_model(name), recipe, machine, fitting=fitting)


def test_llama_70b_trained_whole_on_8_gpus_keeps_its_states_on_the_host() -> None:
    found = search("llama-3.1-70b", 8, method="full", fitting=2)
    first = found[0]
    assert first.plan is not None
    assert first.plan.fits
    assert first.update["optimizer_offload"] is True
    assert (first.framework, first.why) == ("hf-trainer", "")
    # second: weights on the host too, which is more over the slow link
    assert found[1].update["offload.parameters"] is True
    assert "the host's memory" in found[1].why
    on_gpu = next(each for each in found if each.words == "shard 8, fsdp2, full checkpointing")
    assert on_gpu.plan is not None
    assert not on_gpu.plan.fits
    assert "backward" in on_gpu.why
    assert on_gpu.key < first.key  # less over slow links, and so before it, had it room


def test_405b_by_qlora_on_8_gpus() -> None:
    first = search("llama-3.1-405b", 8, method="qlora", context=2048)[0]
    assert first.plan is not None
    assert first.plan.fits
    assert first.update["checkpointing"] == "full"
    assert first.plan.resolved.placement.weight_shards == 8


def test_a_mixture_of_235b_on_two_nodes_is_divided_over_all_16() -> None:
    found = search("qwen3-235b-a22b", 16, method="lora")
    first = found[0]
    assert first.plan is not None
    assert first.words == "shard 16, fsdp2, full checkpointing"
    halves = next(each for each in found if each.words.startswith("shard 8 x replicate 2"))
    assert (
        halves.traffic.network < first.traffic.network
    )  # adapters alone cross, and it has no room
    assert halves.why


def test_a_million_tokens_of_an_8b_on_8_gpus_share_the_sequence() -> None:
    first = search("llama-3.1-8b", 8, method="full", context=2**20)[0]
    assert first.plan is not None
    assert first.plan.fits
    assert first.words == "context 8, ulysses, fsdp2, offload checkpointing, chunked loss"
    # a step still has eight sequences, one after another now
    assert first.recipe.gradient_accumulation == 8


def test_the_flags_of_a_layout_are_its_recipe() -> None:
    first = search("llama-3.1-8b", 16, method="full", context=8192)[0]
    assert first.flags == "--shard fsdp2 --reshard-after-forward false --checkpointing full"
    assert first.recipe.reshard_after_forward is False
    document = json.loads(json.dumps(first.to_dict()))
    assert document["network_bytes"] == first.traffic.network > 0
    assert document["fits"] is True


def test_a_run_with_a_layout_is_not_asked_for_one() -> None:
    eight = make_machine("h100", gpus=8)
    assert not laid_out(make_recipe(method="full"), eight)
    assert laid_out(make_recipe(method="full"), make_machine("h100"))
    assert laid_out(make_recipe(method="full", sharding="fsdp2"), eight)
    assert laid_out(make_recipe(method="full", parallel={"tensor": 2}), eight)
    assert laid_out(make_recipe(task="serve"), eight)


@pytest.mark.parametrize(
    ("ranks", "stride", "far", "near"),
    [
        (8, 1, 0, 700),  # inside a node of eight
        (16, 1, 50, 700),  # half of it is in the other node, fetched once by eight ranks
        (2, 8, 400, 0),  # each rank's only peer is in the other node
        (4, 1, 0, 600),
        (1, 1, 0, 0),
    ],
)
def test_what_a_collective_brings_over_each_link(
    ranks: int, stride: int, far: int, near: int
) -> None:
    assert Sent(800, ranks, stride).by_link(8) == (far, near)


def test_traffic_of_a_sharded_step_by_hand() -> None:
    machine = make_machine("a100-80gb", gpus=4)
    fields = {"method": "full", "sharding": "fsdp2", "framework": "hf-trainer"}
    moved = traffic(LLAMA, choices(LLAMA, machine, **fields), machine.node_gpus)
    whole = 478_080  # 239,040 parameters x 2 B: gathered twice, reduced once
    assert moved[:3] == (0, 0, 3 * whole * 3 // 4)
    kept = traffic(LLAMA, choices(LLAMA, machine, **fields, reshard_after_forward=False), 4)
    assert kept.node == 2 * whole * 3 // 4
    copies = traffic(LLAMA, choices(LLAMA, machine, **{**fields, "sharding": "ddp"}), 4)
    assert copies.node == 2 * whole * 3 // 4


def test_what_alone_is_too_much_is_not_planned() -> None:
    found = search("llama-3.1-405b", 8, method="qlora", context=2048)
    whole = next(each for each in found if each.words == "replicate 8, ddp")
    assert whole.plan is None
    assert "alone take 235" in whole.why


def test_plan_without_a_layout_says_so_and_shows_the_best() -> None:
    line = ["plan", "llama-3.1-8b", "--method", "full", "--framework", "hf-trainer", "--gpu", "h100",
            "--gpus", "8", "--batch-size", "1", "--context", "4096"]  # fmt: skip
    said = CliRunner().invoke(app, line).stdout
    assert "8 GPUs without --shard: a whole copy on each" in said
    assert "Best layout: shard 8, fsdp2" in said
    stated = CliRunner().invoke(app, [*line, "--shard", "fsdp2"]).stdout
    assert "Best layout" not in stated
    document = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    assert document["layouts"][0]["fits"] is True


def test_host_memory_that_nobody_stated_is_said() -> None:
    found = [each.to_dict() for each in search("llama-3.1-70b", 8, method="full")]
    need = format_bytes(found[0]["host_peak_bytes"])
    assert f"host memory is not judged: {need} a node" in layout_table(found)
    assert "not judged" not in layout_table(found, 2**40)
    assert "not judged" in layout_line(search("llama-3.1-70b", 8, method="full"))
