"""What each rank holds, by hand; and that no term decides it a second time."""

import ast
from pathlib import Path

import pytest

from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import Plan, plan
from planner.run.placement import DIVIDES, place
from planner.run.recipe import BucketsSection, Method, Recipe, Sharding, Task
from planner.run.zero import zero

ROOT = Path(__file__).parents[2]
MODEL = find_model("llama-3.2-1b")
PARAMETERS = 1_235_814_400


def placed(sharding: Sharding, ranks: int = 8, **choices: bool | Method):
    usual = {"method": Method.FULL, "quantized": False, "autocast": False, "loads_whole": False}
    usual["zero"] = zero(sharding, BucketsSection(), BucketsSection(), MODEL.hidden)
    return place(sharding, ranks, **{"shards": ranks, **usual, **choices})


def run(sharding: Sharding, **recipe: object) -> Plan:
    fields = {"task": Task.SFT, "method": Method.FULL, "context": 512, **recipe}
    return plan(
        MODEL,
        Recipe(sharding=sharding, gradient_accumulation=2, framework="torchtune", **fields),
        make_machine("a100-80gb", gpus=8),
    )


def size(result: Plan, phase: str, term: str) -> int:
    return {t.name: t.bytes for t in result.phase(phase).terms}[term]


def test_every_scheme_is_decided() -> None:
    assert set(DIVIDES) == set(Sharding)


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "states"),
    [
        (Sharding.NONE, 1, 1, 1),
        (Sharding.DDP, 1, 1, 1),
        (Sharding.ZERO1, 1, 1, 8),
        (Sharding.ZERO2, 1, 8, 8),
        (Sharding.ZERO3, 8, 8, 8),
        (Sharding.FSDP, 8, 8, 8),
    ],
)
def test_shards_and_the_bytes_they_make(
    sharding: Sharding, weights: int, gradients: int, states: int
) -> None:
    here = placed(sharding)
    assert (here.weight_shards, here.gradient_shards, here.state_shards) == (
        weights,
        gradients,
        states,
    )
    result = run(sharding)
    deepspeed = here.zero is not None
    assert size(result, "load", "weights") == 2 * PARAMETERS // weights
    # ZeRO-1 gives back all but its own before it makes fp32 copies; and keeps fp32 masters and states
    held = states if deepspeed else gradients
    assert size(result, "step", "gradients") == 2 * PARAMETERS // held
    assert size(result, "forward", "optimizer") == (12 if deepspeed else 4) * PARAMETERS // states


def test_one_rank_holds_everything_whatever_the_scheme() -> None:
    alone = placed(Sharding.NONE, ranks=1)
    assert all(placed(sharding, ranks=1, autocast=True) == alone for sharding in Sharding)


def test_adapters_of_a_quantised_base_stay_outside_fsdp() -> None:
    here = placed(Sharding.FSDP, method=Method.QLORA, quantized=True)
    assert (here.weight_shards, here.gradient_shards, here.state_shards) == (8, 1, 1)
    plain = placed(Sharding.FSDP, method=Method.LORA)
    assert (plain.weight_shards, plain.gradient_shards, plain.state_shards) == (8, 8, 8)


def test_what_fsdp_does_and_zero_does_not() -> None:
    fsdp = placed(Sharding.FSDP, method=Method.LORA, autocast=True, loads_whole=True)
    zero = placed(Sharding.ZERO3, method=Method.LORA, autocast=True, loads_whole=True)
    assert (fsdp.fp32_shards, fsdp.holds_frozen_inputs, fsdp.loads_whole) == (True, True, True)
    assert (zero.fp32_shards, zero.holds_frozen_inputs, zero.loads_whole) == (False, False, False)
    assert fsdp.gathers
    assert fsdp.gathered_layers == zero.gathered_layers == 1
    assert not placed(Sharding.FSDP, method=Method.FULL).holds_frozen_inputs
    assert size(run(Sharding.FSDP, mixed_precision="bf16"), "load", "weights") == PARAMETERS // 2


def test_gradients_are_reduced_where_there_is_a_scheme_and_another_rank() -> None:
    assert not placed(Sharding.NONE).reduces
    assert not placed(Sharding.DDP, ranks=1).reduces
    assert placed(Sharding.DDP).reduces
    assert not placed(Sharding.DDP).gathers


def test_no_term_asks_which_scheme_it_is() -> None:
    """planner/run/placement.py decides; terms, phases and the pool read its numbers."""
    rooms = ("planner", "planner/terms", "planner/replay")
    files = [path for room in rooms for path in (ROOT / room).glob("*.py")]
    named = [
        path.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and any(a.name == "Sharding" for a in node.names)
    ]
    assert named == []
