"""Degrees of a layout: they multiply to the machine, and what does not divide is refused by name."""

import pytest

from planner.errors import UsageError
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.run.parallel import divides_layers, layout_of
from planner.run.resolve import resolve
from planner.run.runfile import make_recipe
from tests.planner.toys import LLAMA


def laid(model, gpus, sharding="fsdp2", task="sft", **degrees):
    recipe = make_recipe(task=task, method="full", sharding=sharding, parallel=degrees)
    return layout_of(model, recipe, gpus)


def test_what_is_not_said_is_the_rest_of_the_gpus() -> None:
    layout = laid(LLAMA, 16, data_replicate=2, tensor=2)
    assert (layout.data_shard, layout.data, layout.gpus) == (4, 8, 16)
    assert laid(LLAMA, 8, data_shard=-1) == laid(LLAMA, 8, data_shard=8) == laid(LLAMA, 8)
    assert laid(LLAMA, 8, sharding="ddp").data_replicate == 8
    names = {group.name: group.size for group in layout.groups}
    assert names == {"world": 16, "shard": 4, "replicate": 2, "tensor": 2}


def test_experts_are_divided_inside_a_stage() -> None:
    model = find_model("qwen3-30b-a3b")
    layout = laid(model, 16, tensor=2, expert=4, expert_tensor=1)
    assert (layout.data_shard, layout.expert_data) == (8, 4)
    assert laid(model, 16, tensor=2, expert=4).expert_tensor == 2


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tensor": 3}, "tensor 3 = 3 ranks, not the 8"),
        ({"tensor": 16}, "tensor 16 = 16 ranks, not the 8"),
        ({"data_shard": 4}, "data_shard 4 = 4 ranks, not the 8"),
        ({"tensor": 4}, "tensor: 4 does not divide the 2 key-value heads"),
        ({"context": 8, "context_kind": "ulysses"}, "does not divide the 4 attention heads"),
        ({"pipeline": 4}, "makes 4 stages of 3 layers"),
        ({"pipeline": 2}, "does not divide the 3 layers into 2 stages"),
        ({"expert": 2}, "divides experts, and toy is dense"),
        ({"sequence": True}, "needs tensor ranks"),
        ({"virtual_stages": 2}, "needs pipeline above 1"),
    ],
)
def test_a_degree_that_does_not_divide_is_named(degrees, words) -> None:
    with pytest.raises(UsageError) as error:
        laid(LLAMA, 8, **degrees)
    assert words in error.value.message


def test_a_layer_count_may_count_embedding_and_head() -> None:
    assert divides_layers(126, 8)
    assert divides_layers(32, 8)
    assert not divides_layers(32, 5)


@pytest.mark.parametrize(
    ("sharding", "degrees", "words"),
    [
        ("zero3", {"data_replicate": 2}, "zero3 divides over all ranks"),
        ("none", {"data_shard": 4}, "sharding none divides nothing"),
    ],
)
def test_an_engine_that_does_not_divide_so_is_named(sharding, degrees, words) -> None:
    with pytest.raises(UsageError, match=words):
        laid(LLAMA, 8, sharding, **degrees)


def test_groups_that_hold_the_same_shard_hold_a_shard_of_the_group() -> None:
    machine = make_machine(vram="80GiB", gpus=8)
    recipe = {"task": "sft", "method": "full", "sharding": "fsdp2"}
    halves = resolve(LLAMA, make_recipe(**recipe, parallel={"data_replicate": 2}), machine)
    assert halves.placement.weight_shards == halves.placement.state_shards == 4
    assert resolve(LLAMA, make_recipe(**recipe), machine).placement.weight_shards == 8


def test_serving_has_its_own_degrees() -> None:
    with pytest.raises(UsageError, match=r"parallel\.tensor: 2 is training's"):
        laid(LLAMA, 2, "none", "serve", tensor=2)


def test_a_number_of_ranks_that_keep_a_layer_divides_them() -> None:
    recipe = make_recipe(task="sft", sharding="fsdp2", reshard_after_forward=3)
    with pytest.raises(UsageError, match="reshard_after_forward: 3 does not divide the 8"):
        layout_of(LLAMA, recipe, 8)
