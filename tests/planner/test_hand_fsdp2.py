"""FSDP2's bytes on one rank, computed by hand from the shapes of a small Llama."""

from typing import Any

import pytest

from planner.errors import UsageError
from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe
from planner.units import parse_bytes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176 + 2 * 64
ROOT = 2 * 1000 * 64 + 64
HEAD = 1000 * 64 + 64  # with the final norm: what is reduced last but has its gradient first


def planned(ranks: int, **fields: Any) -> Plan:
    settled: dict[str, Any] = {
        "framework": "hf-trainer", "method": "full", "checkpointing": "full", "context": 4096, **fields
    }  # fmt: skip
    recipe = make_recipe(task="sft", sharding="fsdp2", micro_batch_size=1, **settled)
    return plan(
        model_spec_from_config(CONFIG, name="toy"), recipe, make_machine("h100", gpus=ranks)
    )


def term(result: Plan, phase: str, name: str) -> int:
    return sum(each.bytes for each in result.phase(phase).terms if each.name == name)


def test_every_phase_of_a_rank() -> None:
    result = planned(8)
    shard = 2 * (2 * LAYER + ROOT) // 8
    assert term(result, "load", "weights") == shard
    assert term(result, "forward", "weights") == shard + 2 * (ROOT + LAYER)
    assert term(result, "forward", "communication") == 2 * LAYER
    assert term(result, "loss", "weights") == shard + 2 * ROOT
    assert term(result, "loss", "communication") == 2 * LAYER
    assert term(result, "step", "gradients") == shard
    assert term(result, "step", "communication") == 0


def test_short_samples_meet_the_roots_buffer_at_the_first_layer() -> None:
    result = planned(8, context=16)
    assert term(result, "forward", "communication") == 2 * (ROOT + LAYER)
    assert term(result, "forward", "activations") == 2 * 16 * 64


def test_backward_has_the_next_layers_buffer_and_whole_gradients() -> None:
    result = planned(8, context=8192)
    assert term(result, "backward", "communication") == 2 * LAYER
    # largest in the last layer's MLP, when down_proj's gradient exists; the head's waits for the root
    assert term(result, "backward", "gradients") == 2 * (64 * 176 + HEAD)


def test_gradients_wait_whole_for_the_last_micro_batch() -> None:
    once, more = planned(8), planned(8, gradient_accumulation=4)
    assert term(once, "forward", "gradients") == 0
    assert term(more, "forward", "gradients") == 2 * (2 * LAYER + ROOT)
    assert term(more, "step", "gradients") == 2 * (2 * LAYER + ROOT) // 8


def test_fp32_shards_are_gathered_and_reduced_in_16_bits() -> None:
    result = planned(8, mixed_precision="bf16")
    assert term(result, "load", "weights") == 4 * (2 * LAYER + ROOT) // 8
    assert term(result, "loss", "communication") == 2 * LAYER
    assert term(result, "step", "gradients") == 4 * (2 * LAYER + ROOT) // 8


@pytest.mark.parametrize(("ranks", "a", "b"), [(8, 2 * 64, 8 * 16), (512, 1 * 64, 1 * 16)])
def test_adapters_are_cut_in_whole_rows(ranks: int, a: int, b: int) -> None:
    """A of rank 16 has 16 rows: on 512 ranks the first sixteen hold one each."""
    fields = {"method": "lora", "lora": {"rank": 16, "targets": ["q_proj"]}, "dtype": "bf16"}
    result = planned(ranks, **fields)
    assert term(result, "load", "adapters") == 2 * 4 * (a + b)


def test_several_gpus_without_a_layout_are_said_to_hold_a_copy_each() -> None:
    spec = model_spec_from_config(CONFIG, name="toy")
    recipe = make_recipe(task="sft", method="full", framework="hf-trainer")
    said = plan(spec, recipe, make_machine("h100", gpus=8)).assumptions
    assert any("8 GPUs without --shard" in note and "fsdp2" in note for note in said)
    alone = plan(spec, recipe, make_machine("h100")).assumptions
    assert not any("--shard" in note for note in alone)


def test_a_tower_is_in_the_root_unit() -> None:
    model = catalogue_model("qwen2.5-vl-3b")
    recipe = make_recipe(task="sft", method="full", framework="hf-trainer", sharding="fsdp2")
    result = plan(model, recipe, make_machine("h100", gpus=2))
    assert model.towers
    assert term(result, "load", "weights") == 2 * model.parameters // 2
    root = model.parameters - sum(layer.count * layer.parameters for layer in model.layers)
    gathered = term(result, "loss", "weights") - term(result, "load", "weights")
    assert gathered == 2 * root


def test_layers_that_are_not_resharded_stay_whole_until_their_backward() -> None:
    shard = 2 * (2 * LAYER + ROOT) // 8
    result = planned(8, reshard_after_forward=False)
    # in the forward the second layer runs while the first one stays; then both stay
    assert term(result, "forward", "weights") == shard + 2 * (ROOT + 2 * LAYER)
    assert term(result, "loss", "weights") == shard + 2 * (ROOT + 2 * LAYER)
    assert term(result, "step", "weights") == shard
    assert term(result, "backward", "weights") == shard + 2 * (ROOT + 2 * LAYER)
    # nothing is gathered again, so nothing is asked for ahead
    assert term(result, "backward", "communication") < 2 * LAYER


def test_layers_resharded_over_two_ranks_leave_halves() -> None:
    shard = 2 * (2 * LAYER + ROOT) // 8
    result = planned(8, reshard_after_forward=2)
    assert term(result, "forward", "weights") == shard + 2 * (ROOT + LAYER) + LAYER
    assert term(result, "loss", "weights") == shard + 2 * ROOT + 2 * LAYER
    assert planned(8, reshard_after_forward=8).peak_bytes == planned(8).peak_bytes


def test_reduce_dtype_is_that_of_the_buffers_and_of_what_waits_for_the_last_micro_batch() -> None:
    plain, wide = (planned(8, context=1, **fields) for fields in ({}, {"reduce_dtype": "fp32"}))
    # the root's weights are divided again before its gradients are copied in, whole ones beside their copy
    assert term(wide, "backward", "communication") == 4 * ROOT
    assert term(wide, "backward", "gradients") == 2 * ROOT + 2 * 2 * LAYER // 8
    # else it is fuller before, beside the first layer and the second one's gradients on their way
    assert term(plain, "backward", "communication") == 2 * LAYER
    assert term(plain, "backward", "weights") == 2 * (2 * LAYER + ROOT) // 8 + 2 * (ROOT + LAYER)
    waiting = planned(8, reduce_dtype="fp32", gradient_accumulation=2)
    assert term(waiting, "forward", "gradients") == 4 * (2 * LAYER + ROOT)
    # with a sum at every micro-batch the shards alone wait
    summed = planned(8, reduce_dtype="fp32", gradient_accumulation=2, accumulate_sync=True)
    assert term(summed, "forward", "gradients") == 2 * (2 * LAYER + ROOT) // 8


def test_replicas_hold_the_same_shard_and_their_sum_until_the_backward_ends() -> None:
    """Eight GPUs in two groups of four: shards of a quarter."""
    result = planned(8, context=16, parallel={"data_replicate": 2})
    assert term(result, "load", "weights") == 2 * (2 * LAYER + ROOT) // 4
    assert term(result, "backward", "communication") == 2 * LAYER
    wide = planned(8, context=16, parallel={"data_replicate": 2}, reduce_dtype="fp32")
    more = 4 * 2 * LAYER // 4  # every layer's sum in fp32, beside its cast
    # copied in, and reduced beside the cast; the head's whole one outlives the copy (foreach_reduce's loop)
    assert term(wide, "backward", "communication") == 4 * ROOT + 4 * ROOT // 4 + more
    shards = 2 * (2 * LAYER + ROOT) // 4
    assert term(wide, "backward", "gradients") == shards + 2 * (HEAD - 64)
    assert term(wide, "backward", "weights") == shards


def test_the_heads_whole_gradient_is_made_at_the_loss() -> None:
    result = planned(8, context=2)
    assert term(result, "loss", "gradients") == 2 * (HEAD - 64)
    # then it is added to that of the micro-batches before, or stays beside it in another dtype
    added = planned(8, context=2, gradient_accumulation=2)
    assert term(added, "loss", "gradients") == 2 * (2 * LAYER + ROOT) + 2 * (HEAD - 64)
    apart = planned(8, context=2, gradient_accumulation=2, reduce_dtype="fp32")
    assert term(apart, "loss", "gradients") == 4 * (2 * LAYER + ROOT) + 2 * (HEAD - 64)


def test_a_stage_between_the_first_and_the_last_has_no_root_unit_to_reduce() -> None:
    config = CONFIG | {"num_hidden_layers": 6}
    recipe = make_recipe(
        task="sft", method="full", framework="torchtitan", sharding="fsdp2", context=512,
        parallel={"pipeline": 3}, gradient_accumulation=3,
    )  # fmt: skip
    found = plan(model_spec_from_config(config, name="toy"), recipe, make_machine("h100", gpus=6))
    assert [each.count for each in found.ranks] == [2, 2, 2]


def test_replicas_alone_copy_units_through_no_flat_buffer() -> None:
    result = planned(8, context=16, parallel={"data_replicate": 8})
    assert term(result, "load", "weights") == 2 * (2 * LAYER + ROOT)
    assert term(result, "forward", "communication") == 0
    assert term(result, "forward", "weights") == 2 * (2 * LAYER + ROOT) + 2 * (ROOT + LAYER)


def test_a_split_that_no_group_of_ranks_has_is_refused() -> None:
    with pytest.raises(UsageError, match="3 does not divide the 8 ranks"):
        planned(8, reshard_after_forward=3)


def test_how_4_bit_weights_must_be_stored_to_be_divided_is_said() -> None:
    said = [note for note in planned(8, method="qlora").assumptions if "quant_storage" in note]
    codes = 2 * (LAYER - 2 * 64) // 2  # half a byte each; more with the maxima of their blocks
    more = said[0].split()[-3:-1]
    assert "over 8 ranks" in said[0]
    assert codes * 7 / 8 < parse_bytes("".join(more)) < codes * 7 / 8 * 1.2
    for fields in ({"method": "lora"}, {"method": "qlora", "framework": "vramwise"}):
        notes = planned(8, **fields).assumptions
        assert not any("quant_storage" in note for note in notes)
