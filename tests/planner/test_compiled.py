"""torch.compile, selective checkpointing and float8: what stays of a layer, by hand, and published runs."""

from typing import Any

import pytest

from planner.errors import UsageError
from planner.families import model_spec_from_config
from planner.layer.costs import kept_costs
from planner.layer.cut import Graph, minimum_cut
from planner.layer.events import kept_events
from planner.layer.program import OpSettings
from planner.layer.tape import FREED
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import Recipe
from planner.units import GiB

H, INNER, KEYS, HEADS = 64, 176, 32, 4
SMALL = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
ALL = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
STATISTICS = 4 * HEADS
"""Attention's log-sum-exp, fp32."""


def spec(kind: str = "llama") -> ModelSpec:
    return model_spec_from_config({**SMALL, "model_type": kind}, name=kind, source="test")


def kept(kind: str = "llama", **settings: Any) -> float:
    model = spec(kind)
    chosen = OpSettings(**{"norm": model.norm, "compiled": "layer", "full": True, **settings})
    return kept_costs(model.layers[0], H, chosen).kept.per_token


def test_the_cut_takes_the_cheaper_side_and_what_may_not_be_computed_twice() -> None:
    graph = Graph()
    for number, weight in ((1, 8), (2, 4), (3, 6), (4, 5)):
        graph.tensor(number, weight)
    graph.fixed(1)
    graph.computed(2, 1)
    graph.computed(3, 2)
    graph.fixed(4)
    graph.needed(3)
    graph.needed(4)
    assert minimum_cut(graph) == {2, 4}


def test_a_compiled_layer_keeps_inputs_of_matmuls_and_their_results() -> None:
    # x, norm, query, attention, its projection, second norm; key, value; two roots; gate, up, product
    by_hand = 2 * (6 * H + 2 * KEYS + 3 * INNER) + 2 * 4 + STATISTICS
    assert kept() == by_hand == 1976


def test_norms_after_a_block_keep_what_they_normalise() -> None:
    # two more norms: four roots, and the down projection's result
    assert kept("gemma2") == 2 * (7 * H + 2 * KEYS + 3 * INNER) + 4 * 4 + STATISTICS


def test_in_a_graph_of_the_whole_model_the_residual_is_not_computed_twice() -> None:
    # Gemma: x + norm(projection) is used before and after a kernel, so it is kept beside the projection
    assert kept("gemma2", compiled="model") == kept("gemma2") + 2 * H
    assert kept(compiled="model") == kept()


def test_of_base_and_adapter_the_sum_is_kept() -> None:
    lora = {"full": False, "adapted": ALL, "rank": 4, "adapter": 2}
    by_hand = 2 * (6 * H + 2 * KEYS + 3 * INNER + 7 * 4) + 2 * 4 + STATISTICS
    assert kept(**lora) == by_hand == 2032
    two = {**lora, "adapted": frozenset({"q_proj", "v_proj"})}
    # frozen linears keep no input: of the MLP only gate and up, of the second norm nothing
    assert kept(**two) == 2 * (5 * H + 2 * KEYS + 2 * INNER + 2 * 4) + 2 * 4 + STATISTICS


def test_autocast_casts_an_input_once_for_the_linears_that_share_it() -> None:
    wide = {"residual": 4, "weight": 4, "grad": 4, "autocast": True}
    model = spec()
    found = kept_costs(
        model.layers[0], H, OpSettings(norm=model.norm, compiled="layer", full=True, **wide)
    ).kept
    assert found.per_token == 4 * H + 2 * (5 * H + 2 * KEYS + 3 * INNER) + 2 * 4 + STATISTICS
    assert found.constant == 2 * (2 * H * H + 2 * H * KEYS + 3 * H * INNER)  # weights' copies


def test_the_policy_keeps_attention_and_every_second_matmul() -> None:
    # x, query, value, attention, gate; in eager code the down projection's result too
    by_hand = 2 * (3 * H + KEYS + INNER) + STATISTICS
    assert kept(again="ops") == by_hand == 816
    assert kept(again="ops", compiled="") == by_hand + 2 * H
    assert kept(again="all") == kept(again="all", compiled="") == 2 * H


@pytest.mark.parametrize("compiled", ["", "layer", "model"])
@pytest.mark.parametrize("again", ["", "ops", "all"])
def test_events_free_what_they_make(compiled: str, again: str) -> None:
    model = spec()
    settings = OpSettings(norm=model.norm, full=True, compiled=compiled, again=again)
    events = kept_events(model.layers[0], H, settings)
    costs = kept_costs(model.layers[0], H, settings)
    live = {events.forward.x: 2.0 * H}
    for event in events.forward.events:
        if event.per_token == FREED:
            live.pop(event.block)
        else:
            live[event.block] = event.per_token
    live.pop(events.forward.out)
    assert sum(live.values()) == costs.kept.per_token
    live[events.backward.grad_out] = 2.0 * H
    for event in events.backward.events:
        if event.per_token == FREED:
            live.pop(event.block)
        else:
            assert event.block not in live
            live[event.block] = event.per_token
    live.pop(events.backward.x, None)
    assert live.pop(events.backward.grad_in) == 2 * H
    assert not any(live.values())  # weight gradients are constant


def planned(model: str, gpus: int = 1, **fields: Any) -> Plan:
    machine = make_machine("a100-80gb" if gpus == 1 else "h100-sxm", gpus=gpus)
    return plan(catalogue_model(model), Recipe(**fields), machine)


TUNE: dict[str, Any] = {
    "framework": "torchtune",
    "method": "full",
    "compile": True,
    "context": 4096,
    "micro_batch_size": 2,
}
CHUNKED: dict[str, Any] = {**TUNE, "loss": "chunked"}


@pytest.mark.parametrize(
    ("published", "fields"),
    [
        (51.0, TUNE),
        (42.9, CHUNKED),
        (24.9, {**CHUNKED, "checkpointing": "full"}),
        (23.1, {**CHUNKED, "checkpointing": "full", "optimizer_in_backward": True}),
        (
            8.5,
            {
                **CHUNKED,
                "method": "lora",
                "checkpointing": "offload",
                "lora": {"rank": 8},
            },
        ),
    ],
)
def test_torchtunes_compiled_runs(published: float, fields: dict[str, Any]) -> None:
    # torchtune README, Llama 3.2 3B on one A100: peak active memory
    assert planned("llama-3.2-3b", **fields).allocated_peak_bytes == pytest.approx(
        published * GiB, rel=0.02
    )


def test_torchtunes_plain_loss_is_not_compiled() -> None:
    # compile_loss returns the compiled loss and the recipes drop it
    loss = planned("llama-3.2-3b", **TUNE).phase("loss")
    (logits,) = [term for term in loss.terms if term.name == "logits"]
    assert logits.bytes == 8192 * 128256 * 12


def test_torchtitan_compiles_its_loss_since_2025() -> None:
    fields = {"method": "full", "compile": True, "sharding": "fsdp", "context": 8192}
    sizes = {}
    for framework in ("torchtitan==0.0.2", "torchtitan"):
        loss = planned("llama-3.1-8b", 8, framework=framework, **fields).phase("loss")
        (sizes[framework],) = [term.bytes for term in loss.terms if term.name == "logits"]
    assert sizes["torchtitan"] == 8192 * 128256 * 4  # logits and their gradient, 16 bits each
    assert sizes["torchtitan==0.0.2"] == 8192 * 128256 * 12
    eager = planned("llama-3.1-8b", 8, framework="torchtitan", compile_loss=False, **fields).phase(
        "loss"
    )
    assert eager.total_bytes - 8192 * 128256 * 8 == pytest.approx(
        planned("llama-3.1-8b", 8, framework="torchtitan", **fields).phase("loss").total_bytes,
        rel=1e-3,
    )


def test_every_second_layer_checkpointed_keeps_the_others_whole() -> None:
    model, machine = spec(), make_machine("a100-80gb")
    fields: dict[str, Any] = {"framework": "torchtitan", "method": "full", "context": 512}
    acts = {}
    for kind in ("none", "full", "selective-layer"):
        result = plan(model, Recipe(checkpointing=kind, checkpoint_every=2, **fields), machine)
        (acts[kind],) = [
            term.bytes for term in result.phase("loss").terms if term.name == "activations"
        ]
    layer = (acts["none"] - acts["full"]) / 4
    assert acts["selective-layer"] == pytest.approx(acts["full"] + 2 * layer)


def test_compiled_float8_keeps_no_input_that_a_fused_cast_can_make_again() -> None:
    # both norms and gate * up are cast to float8 in the backward, from what they are made of
    # attention's result is a kernel's own: its cast is kept beside it
    assert kept(float8=True) == kept() - 2 * (2 * H + INNER) + H
    # in eager code autograd has them in 16 bits
    assert kept(float8=True, compiled="") == kept(compiled="")
    model = spec()
    settings = OpSettings(norm=model.norm, full=True, compiled="layer", float8=True)
    costs = kept_costs(model.layers[0], H, settings)
    # the running linear's weight, a byte an element
    assert max(point.constant for point in costs.forward) == H * INNER


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compile": True}, "compile: vramwise's own trainer does not do it"),
        ({"framework": "trl", "float8": "rowwise", "method": "full"}, "float8: TRL"),
        ({"framework": "torchtitan", "float8": "rowwise"}, "float8: method lora"),
        ({"framework": "trl", "checkpointing": "selective-op"}, "checkpointing selective-op: TRL"),
        (
            {
                "framework": "torchtitan",
                "method": "full",
                "float8": "rowwise",
                "float8_all_gather": True,
            },
            "float8_all_gather: torchao gathers",
        ),
        ({"framework": "torchtitan", "float8_all_gather": True}, "float8_all_gather: nothing"),
    ],
)
def test_what_a_framework_cannot_do_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        plan(spec(), Recipe(**fields), make_machine("h100-sxm"))
    assert refused.value.hint


def test_float8_needs_a_card_that_has_it() -> None:
    fields = {"framework": "torchtitan", "method": "full", "float8": "tensorwise"}
    with pytest.raises(UsageError, match=r"NVIDIA A100.* has no float8"):
        plan(spec(), Recipe(**fields), make_machine("a100-80gb"))
