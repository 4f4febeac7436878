"""verl's actor dtype and offload between phases, the rollout's tensor parallelism, and an entropy's copies."""

import pytest

from planner.accuracy.rl_rows import predict_rl
from planner.accuracy.rows import Layout, Row
from planner.importers import import_config
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import Plan, plan
from planner.run.recipe import EngineSection, LoraSection, OffloadSection, Recipe
from planner.run.runfile import make_recipe
from planner.units import GiB
from planner.verbs.options import OPTIONS, describe

MODEL = catalogue_model("qwen3-4b")
CARD = make_machine("rtx-5090", gpus=4)


def _plan(**fields: object) -> Plan:
    given = {
        "task": "grpo",
        "method": "full",
        "framework": "verl",
        "sharding": "fsdp",
        "prompt_length": 512,
        "completion_length": 256,
        "engine": {"gpu_memory_utilization": 0.25},
        **fields,
    }
    return plan(MODEL, make_recipe(**given), CARD)


def _bytes(result: Plan, phase: str, name: str) -> int:
    return sum(term.bytes for term in result.phase(phase).terms if term.name == name)


def test_the_actor_is_held_in_the_dtype_that_is_asked_for() -> None:
    # verl default: fp32, a quarter of the model a card; fsdp_config.model_dtype=bfloat16: 2 B
    assert _bytes(_plan(), "load", "weights") == MODEL.parameters * 4 // 4
    bf16 = _plan(dtype="bf16")
    assert _bytes(bf16, "load", "weights") == MODEL.parameters * 2 // 4
    # weights, gradients, two states and the foreach temporary: 5 x 2 B / 4; a run printed 9.38 GiB
    step = bf16.phase("step").total_bytes
    assert step == pytest.approx(5 * 2 * MODEL.parameters / 4, rel=0.025)  # and cuBLAS, graphs
    # accelerate makes trained weights fp32 under mixed precision
    trl = _plan(dtype="bf16", framework="hf-trainer", mixed_precision="bf16")
    assert _bytes(trl, "load", "weights") == MODEL.parameters


def test_what_is_offloaded_between_phases_is_back_for_the_step() -> None:
    there = _plan(dtype="bf16")
    away = _plan(dtype="bf16", optimizer_offload=True, offload=OffloadSection(parameters=True))
    assert away.phase("step") == there.phase("step")
    assert away.phase("backward") == there.phase("backward")
    weights, states = (_bytes(there, "forward", name) for name in ("weights", "optimizer"))
    assert _bytes(away, "rollout", "weights") == _bytes(away, "rollout", "optimizer") == 0
    standing = _bytes(there, "rollout", "weights") + _bytes(there, "rollout", "optimizer")
    freed = there.phase("rollout").total_bytes - away.phase("rollout").total_bytes
    assert freed == standing
    # log-probabilities need the weights, not the states
    assert _bytes(away, "score", "weights") == _bytes(there, "score", "weights") > 0
    assert _bytes(away, "score", "optimizer") == 0
    assert weights
    assert away.host_peak_bytes == 4 * standing  # of four ranks
    assert states


def test_states_alone_may_wait() -> None:
    away = _plan(optimizer_offload=True)
    assert _bytes(away, "rollout", "optimizer") == 0
    assert _bytes(away, "rollout", "weights") > 0
    elsewhere = _plan(optimizer_offload=True, framework="trl")
    assert _bytes(elsewhere, "step", "optimizer") == 0  # kept on the host there


def test_a_verl_script_hands_its_offload_on() -> None:
    found = import_config(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-4B "
        "actor_rollout_ref.actor.fsdp_config.param_offload=True "
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True "
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"
    )
    recipe = found.run.recipe
    assert (recipe.optimizer_offload, recipe.offload.parameters, recipe.dtype) == (
        True,
        True,
        "bf16",
    )


def test_the_rollouts_tensor_parallelism_has_a_flag() -> None:
    flags = dict.fromkeys(OPTIONS) | {
        "offline": True, "gpu": "h100-sxm", "task": "grpo", "engine": "vllm-push", "engine_tensor_parallel": 2,
    }  # fmt: skip
    described = describe("qwen3-4b", flags)
    assert described.run.recipe.engine.tensor_parallel == 2


@pytest.mark.parametrize("framework", ["peft-loop", "verl"])
def test_an_entropy_copies_full_logits(framework: str) -> None:
    fields: dict[str, object] = {"framework": framework, "sharding": "none", "dtype": "bf16"}
    fields["gradient_accumulation"] = 2  # else the head's new gradient is the larger moment
    without, taken = _plan(**fields), _plan(**fields, entropy=True)
    more = _bytes(taken, "loss", "logits") - _bytes(without, "loss", "logits")
    each = {"peft-loop": 4 * 4, "verl": 2 * 2}[framework]  # four fp32 copies; softmax and product
    assert more == 768 * MODEL.vocab * each


def test_an_entropy_of_parts_is_not_read() -> None:
    chunked = plan(
        MODEL,
        Recipe(
            task="grpo", method="lora", lora=LoraSection(), framework="vramwise", entropy=True,
            loss="chunked", engine=EngineSection(kind="transformers"),
        ),
        CARD,
    )  # fmt: skip
    assert any("not read" in note and "entropy" in note for note in chunked.assumptions)


def _rl_row(**fields: str) -> Row:
    given = {
        "model": "Qwen/Qwen2.5-3B-Instruct",
        "method": "full",
        "dtype": "fp32 master, bf16 compute (verl FSDP default)",
        "algo": "grpo",
        "framework": "verl (recipe.agentic)",
        "gpu": "L20 48GB",
        "num_gpus": "2",
        "sharding": "fsdp 2, param+optimizer offload",
        "num_generations": "4",
        "prompt_len": "4096",
        "completion_len": "4096",
        "grad_ckpt": "full",
        "vllm": "colocate TP2",
        "quantity_measured": "peak_allocated",
        "phase": "update_actor",
        **fields,
    }
    return Row(Layout.RL, given)


def test_a_published_update_is_read_off_its_phases() -> None:
    # "5 x 3.086B x 4 B / 2": a run on two L20 printed 28.8 GiB though everything was offloaded
    assert predict_rl(_rl_row()).value == pytest.approx(28.8 * GiB, rel=0.01)
    load = predict_rl(_rl_row(phase="load"))
    assert load.value == pytest.approx(3_085_938_688 * 4 / 2, rel=0.001)


def test_an_old_ms_swift_is_planned_by_its_own_law() -> None:
    row = _rl_row(framework="ms-swift", framework_version="3.1.1", sharding="zero3", method="lora")
    made = predict_rl(row)
    assert made.plan is not None
    assert made.plan.resolved.framework.name == "ms-swift-3.1"
