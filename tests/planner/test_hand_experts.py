"""Experts one by one, batched and grouped, by hand; what an uneven router adds, and what is refused."""

from typing import Any

import pytest

from planner.errors import UnsupportedError, UsageError
from planner.families import model_spec_from_config
from planner.layer.costs import kept_costs, no_grad_costs
from planner.layer.experts import loads, moe_block
from planner.layer.program import OpSettings, Program
from planner.layer.tape import Tape, largest
from planner.machines.machine import make_machine
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe
from planner.terms.counts import base_weights
from tests.planner.toys import CONFIG, LLAMA, MIXTRAL

# hidden 64, four experts of width 128, two a token: bytes a token in 16 bits
MOE = MIXTRAL.layers[0]
NARROW = model_spec_from_config(
    {
        **CONFIG,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 16,
    }
)
EAGER = OpSettings(experts="eager")
MANY = 10**6


def kept(settings: OpSettings) -> tuple[float, int]:
    """Return what the graph of the experts alone holds, a token and in all."""
    tape = Tape()
    x = tape.value(128)
    out = moe_block(Program(tape, settings), x, MOE, 64, 2)
    tape.drop(x, out)
    return tape.now().per_token, tape.now().constant


def test_a_loop_keeps_its_rows_sums_and_places() -> None:
    # softmax 16, ids 80; a row each of two experts: its place 16, gate and up 512, silu 256, the result 128,
    # its weight 4 B, and what is added 128 (index_add_ saves it for its shape)
    assert kept(EAGER)[0] == 16 + 80 + 2 * (16 + 512 + 256 + 128 + 4 + 128)
    # grouped: no places, nothing in 16 bits beside the result; the weights of two rows
    assert kept(OpSettings())[0] == 16 + 80 + 8 + 2 * (512 + 256 + 128)


def test_batched_copies_the_matrices_of_a_row_s_expert_for_every_row() -> None:
    copies = 2 * 3 * 128 * 64 * 2  # two rows x gate, up and down x 16 bits
    assert kept(OpSettings(experts="batched_mm"))[0] == kept(OpSettings())[0] + copies


def test_before_ampere_the_input_of_a_grouped_matmul_is_kept_and_the_weight_s_gradient_made() -> (
    None
):
    fallback = OpSettings(experts="fallback")
    assert kept(fallback)[0] == kept(OpSettings())[0] + 2 * (128 + 256)
    constants = [
        largest(kept_costs(MOE, 64, s).backward, 0).constant for s in (OpSettings(), fallback)
    ]
    assert constants[1] - constants[0] == 2 * 4 * 2 * 128 * 64  # gate and up of four experts


def test_a_stack_s_gradient_is_made_whole_in_every_round() -> None:
    backward = kept_costs(MOE, 64, EAGER._replace(full=True)).backward
    grouped = kept_costs(MOE, 64, OpSettings(full=True)).backward
    peaks = [largest(points, 0) for points in (backward, grouped)]
    stacks = 2 * 4 * 2 * 128 * 64
    # another of gate's and up's, and one expert's own
    assert peaks[0].constant == stacks + stacks // 4
    assert peaks[1].constant == 0


@pytest.mark.parametrize(
    ("imbalance", "capacity", "expected"),
    [
        (False, 0.0, (0.5, 0.5, 0.5, 0.5)),
        (True, 0.0, (1.0, 1.0)),
        (True, 1.0, (0.5, 0.5, 0.5, 0.5)),
        (True, 1.5, (0.75, 0.75, 0.5)),
        (True, 5.0, (1.0, 1.0)),
    ],
)
def test_the_rows_of_each_expert(
    imbalance: bool, capacity: float, expected: tuple[float, ...]
) -> None:
    assert loads(MOE.mlp, imbalance=imbalance, capacity=capacity) == pytest.approx(expected)


def test_the_fullest_expert_decides_what_a_forward_needs() -> None:
    even, worst = (
        largest(no_grad_costs(MOE, 64, EAGER._replace(imbalance=uneven)), MANY).per_token
        for uneven in (False, True)
    )
    # when the second expert's gate and up are made: its place 16, rows 128 and they 512; the first one's are
    # still bound, and what it added in fp32: half of them where tokens are spread evenly
    assert worst - even == 0.5 * (16 + 128 + 2 * 512 + 256)


def planned(**fields: Any) -> Plan:
    usual: dict[str, Any] = {"method": "lora", "framework": "peft-loop", "context": 4096}
    usual |= {"lora": {"targets": "attention"}, "checkpointing": "full"}
    return plan(NARROW, make_recipe(**{**usual, **fields}), make_machine("h100-sxm"))


def test_a_plan_says_both_ends_of_a_loop() -> None:
    eager, grouped = planned(experts_implementation="eager"), planned()
    assert eager.imbalance_bytes > 0
    assert grouped.imbalance_bytes == 0
    note = next(n for n in eager.assumptions if n.startswith("experts one after another"))
    assert "4,096 tokens x 2 / 4 = 2,048 rows each; at worst 4,096 (a token chooses" in note
    assert not any("experts one after" in n for n in grouped.assumptions)
    balanced = eager.high_bytes - eager.imbalance_bytes
    assert balanced == int(eager.reserved.with_room * eager.interval("reserved", 1.0)[1])
    assert eager.to_dict()["imbalance_bytes"] == eager.imbalance_bytes
    capped = planned(experts_implementation="eager", expert_capacity_factor=1.5)
    assert 0 < capped.imbalance_bytes < eager.imbalance_bytes
    assert any("3,072 (1.5 x 2,048 by the capacity factor)" in n for n in capped.assumptions)
    assert planned(experts_implementation="eager", expert_capacity_factor=1).imbalance_bytes == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"expert_capacity_factor": 0.9}, "expert_capacity_factor"),
        ({"expert_capacity_factor": 1.25}, "expert_capacity_factor: grouped_mm has every row"),
        (
            {"expert_capacity_factor": 1.25, "framework": "trl", "experts_implementation": "eager"},
            "expert_capacity_factor: TRL.* drops no tokens",
        ),
        (
            {"framework": "trl==0.15.2", "experts_implementation": "batched_mm"},
            "experts_implementation: batched_mm is not in",
        ),
        ({"experts_implementation": "sonic"}, "experts_implementation"),
    ],
)
def test_what_experts_cannot_do_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(**fields)


def test_before_transformers_5_each_expert_is_a_linear_that_is_quantised() -> None:
    old, new = (
        planned(method="qlora", framework=name, lora={"targets": ("q_proj",)})
        for name in ("trl==0.15.2", "trl")
    )
    assert old.resolved.experts == "modules"
    packed = [base_weights(NARROW, p.resolved).quantized_parameters for p in (old, new)]
    assert packed[0] - packed[1] == 3 * 98_304  # the experts of three layers
    oss = model_spec_from_config({"model_type": "gpt_oss", "num_hidden_layers": 2})
    found = plan(
        oss,
        make_recipe(method="qlora", framework="trl==0.15.2", dtype="bf16"),
        make_machine("h100-sxm"),
    )
    assert (found.resolved.experts, found.resolved.linear_experts) == ("eager", False)


def test_on_a_card_before_ampere_the_plan_says_what_runs() -> None:
    found = plan(MIXTRAL, make_recipe(method="lora", framework="hf-trainer"), make_machine("t4"))
    assert found.resolved.experts == "fallback"
    assert any("grouped_mm starts with compute capability 8.0" in n for n in found.assumptions)
    dense = plan(LLAMA, make_recipe(method="lora", framework="hf-trainer"), make_machine("t4"))
    assert dense.resolved.experts == ""


def test_adapters_on_fused_experts_take_no_dropout() -> None:
    experts = {"targets": "all-linear", "dropout": 0.05}
    with pytest.raises(UnsupportedError, match=r"lora\.dropout: 0\.05, but PEFT has no dropout"):
        planned(lora=experts)
    with pytest.raises(UnsupportedError, match="fused experts"):
        planned(
            lora={
                **experts,
                "targets": ("q_proj",),
                "target_parameters": ("mlp.experts.down_proj",),
            }
        )
    assert planned(lora={**experts, "targets": "attention"}).peak_bytes
    assert planned(lora=experts, framework="ms-swift").peak_bytes  # lists linears itself
    # before transformers 5 each expert was a list of linears
    assert planned(lora=experts, framework="peft-loop==4.49").peak_bytes
