"""vLLM's own ranks: what each holds, by hand, and degrees that would be refused."""

from typing import Any

import pytest

from planner.errors import UsageError
from planner.importers import import_config
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.runfile import make_recipe
from planner.terms.groups import communicators
from planner.terms.vllm_profile import layer_width
from planner.terms.vllm_weights import vllm_weights
from tests.planner.toys import LLAMA, MIXTRAL, choices, gpus

EXPERTS = 3 * 4 * 3 * 8_192  # layers, experts, matrices


def served(count: int = 8, model: Any = LLAMA, **engine: Any) -> Any:
    return choices(model, gpus(count), task="serve", framework="vllm", engine=engine)


def test_data_parallel_engines_share_experts_and_nothing_else() -> None:
    one, four = served(1, MIXTRAL), served(4, MIXTRAL, data_parallel=4)
    saved = vllm_weights(MIXTRAL, one).modules - vllm_weights(MIXTRAL, four).modules
    assert saved == 2 * EXPERTS * 3 // 4
    # by width or whole, the part is the same
    whole = served(4, MIXTRAL, data_parallel=4, expert_parallel=True)
    assert vllm_weights(MIXTRAL, whole) == vllm_weights(MIXTRAL, four)
    both = served(4, MIXTRAL, tensor_parallel=2, data_parallel=2)
    halved = served(2, MIXTRAL, tensor_parallel=2)
    more = vllm_weights(MIXTRAL, halved).modules - vllm_weights(MIXTRAL, both).modules
    assert more == 2 * EXPERTS // 4
    # a dense model is there as often as there are engines
    assert vllm_weights(LLAMA, served(4, data_parallel=4)) == vllm_weights(LLAMA, served(1))


def test_their_tokens_come_together_for_the_experts() -> None:
    layer = MIXTRAL.layers[0]
    one, two = served(1, MIXTRAL), served(2, MIXTRAL, data_parallel=2)
    # what attention put out, two residuals, the experts' sum; gate and up 256 and their product for 2 experts
    alone = 2 * (256 + 128)
    assert layer_width(MIXTRAL, layer, one) == 64 + 2 * 64 + 64 + alone
    # experts half as wide for two ranks' rows; these gathered, and their sums before they are scattered
    together = 2 * 2 * (128 + 64) + 2 * 2 * 64
    found = layer_width(MIXTRAL, layer, two) - layer_width(MIXTRAL, layer, one)
    assert found == together - alone


def test_each_degree_has_a_communicator() -> None:
    machine = gpus(8)
    r = served(8, MIXTRAL, tensor_parallel=2, pipeline_parallel=2, data_parallel=2)
    named = {group.name: group.size for group, _ in communicators(r, machine).groups}
    assert named == {"vllm tensor": 2, "vllm pipeline": 2, "vllm data": 2}


def test_weights_that_nccl_takes_to_a_server_need_a_communicator() -> None:
    def named(**engine: Any) -> dict[str, int]:
        r = choices(LLAMA, gpus(1), task="grpo", engine={"kind": "vllm-server", **engine})
        return {group.name: group.size for group, _ in communicators(r, gpus(1)).groups}

    assert named() == named(transfer="ipc") == {}
    assert named(transfer="nccl") == {"vllm weight transfer": 2}


def test_a_server_on_the_trainers_gpu_is_said_not_to_be_planned() -> None:
    def notes(transfer: str) -> tuple[str, ...]:
        recipe = make_recipe(task="grpo", engine={"kind": "vllm-server", "transfer": transfer})
        return plan(find_model("llama-3.1-8b"), recipe, make_machine("h100")).not_modeled

    assert any(note.startswith("transfer ipc: the server") for note in notes("ipc"))
    assert notes("nccl") == notes("folder")


@pytest.mark.parametrize(
    ("name", "count", "engine", "said"),
    [
        ("llama-3.3-70b", 2, {"tensor_parallel": 3}, "engine.tensor_parallel: 3 needs 3 GPUs"),
        (
            "llama-3.3-70b",
            8,
            {"tensor_parallel": 4, "pipeline_parallel": 4},
            "engine.tensor_parallel: 4 needs 16 GPUs",
        ),
        ("llama-3.1-8b", 2, {"data_parallel": 4}, "engine.data_parallel: 4 needs 4 GPUs"),
        (
            "llama-3.3-70b",
            8,
            {"tensor_parallel": 3},
            "engine.tensor_parallel: 3 does not divide the 64 attention heads",
        ),
        (
            "qwen2.5-14b",
            8,
            {"tensor_parallel": 5},
            "engine.tensor_parallel: 5 neither divides nor repeats the 8 key-value heads",
        ),
        (
            "qwen3-30b-a3b",
            28,
            {"tensor_parallel": 4, "data_parallel": 7},
            "engine.tensor_parallel: 4 x data_parallel 7 does not divide an expert's 768",
        ),
        (
            "llama-3.1-8b",
            64,
            {"pipeline_parallel": 64},
            "engine.pipeline_parallel: 64 makes more stages than the model's 32 layers",
        ),
        (
            "llama-3.1-8b",
            2,
            {"expert_parallel": True},
            "engine.expert_parallel: True divides experts",
        ),
    ],
)
def test_degrees_that_do_not_divide_are_refused_by_name(
    name: str, count: int, engine: dict[str, Any], said: str
) -> None:
    recipe = make_recipe(task="serve", framework="vllm", engine=engine)
    with pytest.raises(UsageError, match=said):
        plan(find_model(name), recipe, make_machine("h100-sxm", gpus=count))


def test_gpus_without_work_are_said() -> None:
    def notes(count: int, **engine: int) -> list[str]:
        recipe = make_recipe(task="serve", framework="vllm", engine=engine)
        return [
            note for note in plan(LLAMA, recipe, gpus(count)).assumptions if "serve nothing" in note
        ]

    assert notes(8) == [
        "7 of 8 GPUs serve nothing: tensor 1 x pipeline 1 x data 1; --tensor-parallel divides the model, "
        "--data-replicate repeats it"
    ]
    assert notes(1) == notes(4, tensor_parallel=2, data_parallel=2) == []


def test_a_server_apart_is_not_the_trainers_machine() -> None:
    fields = {"task": "grpo", "framework": "trl", "num_generations": 8, "micro_batch_size": 8}
    for kind in ("vllm-server", "vllm-push"):
        recipe = make_recipe(**fields, engine={"kind": kind, "tensor_parallel": 2})
        if kind == "vllm-server":
            assert plan(LLAMA, recipe, gpus(1)).phases
            continue
        with pytest.raises(UsageError, match=r"machine\.gpus is 1"):
            plan(LLAMA, recipe, gpus(1))
        # each of the trainer's GPUs belongs to one engine
        assert plan(LLAMA, recipe, gpus(4)).phases
        with pytest.raises(UsageError, match=r"tensor_parallel: 2 does not divide the 3 GPUs"):
            plan(LLAMA, recipe, gpus(3))


def test_vllms_own_words() -> None:
    text = "vllm serve Qwen/Qwen3-30B-A3B -tp 2 -dp 4 --enable-expert-parallel"
    run = import_config(text).run
    engine = run.recipe.engine
    assert (engine.tensor_parallel, engine.data_parallel, engine.expert_parallel) == (2, 4, True)
    assert run.machine.gpus == 8


def test_latent_attention_was_never_chunked_in_0_7() -> None:
    model = find_model("deepseek-r1")
    for framework, tokens in (("vllm-0.7", 128_000), ("vllm-0.10", 8_192)):
        recipe = {"task": "serve", "framework": framework, "context": 128_000}
        r = choices(model, make_machine("h100-sxm"), **recipe)
        assert r.max_num_batched_tokens == tokens
