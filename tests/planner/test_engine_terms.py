"""KV caches and engine budgets: exact where the engine's rules are."""

from typing import Any

import pytest

from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe
from planner.terms.engine import SLOT_RANKS, engine_costs, lora_slot_bytes
from planner.terms.kv_cache import bytes_per_token, sequence_bytes, state_bytes
from planner.units import GiB
from tests.planner import toys
from tests.planner.toys import choices, planned

MACHINE = make_machine("h100-sxm")
LLAMA = catalogue_model("llama-3.1-8b")


def grpo(model: str = "llama-3.1-8b", **fields: Any) -> Plan:
    defaults = {"task": "grpo", "framework": "trl", "dtype": "bf16", "context": 8192}
    return plan(catalogue_model(model), make_recipe(**{**defaults, **fields}), MACHINE)


def term(result: Plan, phase: str, name: str) -> int:
    return sum(t.bytes for t in result.phase(phase).terms if t.name == name)


def test_grouped_query_cache() -> None:
    assert bytes_per_token(LLAMA) == 2 * 32 * 8 * 128 * 2
    assert bytes_per_token(LLAMA, "fp8") == 32 * 8 * 128 * 2
    assert sequence_bytes(LLAMA, 20_480) / GiB == 2.5
    assert sequence_bytes(LLAMA, 17, block=16) == 32 * bytes_per_token(LLAMA)


def test_recurrent_layers_have_a_state_and_no_growth() -> None:
    model = catalogue_model("mamba2-130m")
    assert bytes_per_token(model) == 0
    assert sequence_bytes(model, 10) == sequence_bytes(model, 100_000) == state_bytes(model) > 0


def test_windows_cap_only_their_layers() -> None:
    model = catalogue_model("gemma-2-9b")
    full = sequence_bytes(model, 100_000, capped=False)
    assert sequence_bytes(model, 100_000) < 0.6 * full
    assert sequence_bytes(model, 4096) == sequence_bytes(model, 4096, capped=False)


def test_transformers_generates_on_the_training_model() -> None:
    result = grpo(engine={"kind": "transformers"}, micro_batch_size=4, gradient_accumulation=2)
    assert term(result, "rollout", "engine") == 0
    # TRL generates the whole generation batch at once
    assert term(result, "rollout", "kv_cache") == 8 * sequence_bytes(LLAMA, 8192)


def test_pushing_needs_a_second_copy_and_sharing_does_not() -> None:
    pushed = grpo(engine={"kind": "vllm-push"}, micro_batch_size=1)
    shared = grpo(engine={"kind": "vllm-shared"}, micro_batch_size=1)
    difference = term(pushed, "rollout", "engine") - term(shared, "rollout", "engine")
    assert difference == 2 * LLAMA.parameters


def test_utilisation_is_a_budget() -> None:
    result = grpo(engine={"kind": "vllm-push", "gpu_memory_utilization": 0.5}, micro_batch_size=1)
    spent = term(result, "rollout", "engine") + term(result, "rollout", "kv_cache")
    # weights of the engine are inside the budget; the trainer's own are not
    inside = spent + LLAMA.parameters * 2 - 2 * LLAMA.parameters
    assert inside == pytest.approx(0.5 * MACHINE.vram_bytes, rel=0.01)


def test_sleep_gives_back_what_its_level_says() -> None:
    def resident(level: int) -> int:
        engine = {"kind": "vllm-push", "sleep_level": level}
        return term(grpo(engine=engine, micro_batch_size=1), "backward", "engine")

    assert resident(0) > 15 * GiB
    assert resident(1) == resident(2) < 2 * GiB
    slept = grpo(engine={"kind": "vllm-push", "sleep_level": 1}, micro_batch_size=1)
    assert any(t.name == "engine" and t.bytes == 2 * LLAMA.parameters for t in slept.host_terms)
    dropped = grpo(engine={"kind": "vllm-push", "sleep_level": 2}, micro_batch_size=1)
    assert not any(t.name == "engine" for t in dropped.host_terms)


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    result = grpo(engine={"kind": "vllm-push", "gpu_memory_utilization": 0.2}, context=65536)
    assert not result.fits
    assert "does not hold one sequence of 65,536 tokens" in result.why
    assert result.to_dict()["verdict"] == "does not fit"


def test_a_server_elsewhere_costs_nothing_here() -> None:
    result = grpo(engine={"kind": "vllm-server"})
    assert term(result, "rollout", "engine") == term(result, "rollout", "kv_cache") == 0


def test_adapter_slots_round_the_rank_up() -> None:
    def slot(rank: int, method: str = "lora") -> int:
        result = grpo(method=method, lora={"rank": rank}, engine={"kind": "vllm-push"})
        return lora_slot_bytes(LLAMA, result.resolved)

    assert slot(9) == slot(16) == 2 * slot(8)
    assert slot(16, "full") == 0
    assert slot(SLOT_RANKS[-1] + 1) > slot(SLOT_RANKS[-1])


def test_serving_takes_its_utilisation_and_tp_splits_it() -> None:
    recipe = make_recipe(task="serve", framework="vllm", context=8192)
    one = plan(LLAMA, recipe, MACHINE)
    assert one.peak_bytes == pytest.approx(0.92 * MACHINE.vram_bytes, rel=0.01)
    two = plan(
        LLAMA,
        make_recipe(task="serve", framework="vllm", context=8192, engine={"tensor_parallel": 2}),
        make_machine("h100-sxm", gpus=2),
    )
    # half of everything but the norms, 65 x 4,096, and the rotary table, 131,072 x 128 x 2 B
    norms, table = 65 * 4096, 131072 * 128 * 2
    assert term(two, "load", "weights") == LLAMA.parameters + norms + table
    assert term(two, "rollout", "kv_cache") > term(one, "rollout", "kv_cache")


def test_stated_kv_bytes_bypass_the_budget() -> None:
    engine = {"kind": "vllm-push", "kv_bytes": 3 * GiB}
    result = grpo(engine=engine, micro_batch_size=1)
    assert term(result, "rollout", "kv_cache") == 3 * GiB
    costs = engine_costs(LLAMA, result.resolved, MACHINE, 0)
    assert costs.kv.bytes == 3 * GiB
    assert "the size stated" in costs.kv.formula


def test_our_own_pushed_copy_of_trained_weights_is_dropped_asleep():
    fields = {
        "task": "grpo",
        "framework": "vramwise",
        "context": 64,
        "engine": {"kind": "vllm-push"},
    }
    full, lora = (choices(toys.LLAMA, **fields, method=method) for method in ("full", "lora"))
    assert (full.sleep_level, lora.sleep_level) == (2, 1)
    # asked for it stays, and in verl's hands it is verl's
    asked = choices(
        toys.LLAMA, **{**fields, "engine": {"kind": "vllm-push", "sleep_level": 1}}, method="full"
    )
    assert asked.sleep_level == 1
    host = [term.bytes for term in planned(toys.LLAMA, **fields, method="full").host_terms]
    assert 484_224 not in host  # no copy of the weights waits there (test_hand_engine.py)


@pytest.mark.parametrize("kind", ["vllm-push", "vllm-shared"])
def test_a_4_bit_policy_that_our_trainer_refuses_is_named_in_the_plan(kind):
    fields = {"task": "grpo", "method": "qlora", "context": 64, "engine": {"kind": kind}}
    said = planned(toys.LLAMA, framework="vramwise", **fields).assumptions
    assert any(
        f"refuses this run: recipe.engine.kind: {kind} cannot generate" in note for note in said
    )
    assert not any(
        "refuses this run" in note
        for note in planned(toys.LLAMA, framework="trl", **fields).assumptions
    )
