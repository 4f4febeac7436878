"""Every task by hand: its rows, its head, the models beside it, its phases."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UsageError
from planner.plan import Plan
from planner.run.recipe import Reference, Task
from planner.run.tasks import TASKS
from tests.planner.toys import (
    CONFIG,
    LLAMA,
    PARAMETERS,
    TRAINING_CUBLAS,
    choices,
    gpus,
    host,
    planned,
    terms,
)

FULL: dict[str, Any] = {"method": "full", "checkpointing": "full", "optimizer": "adamw"}
LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 8}, "checkpointing": "full"}
HEAD = 64_000
"""Parameters of the vocabulary's head."""
SCORED = PARAMETERS - HEAD + 64
"""With a head of one number: [1, 64]."""


def names(result: Plan) -> list[str]:
    return [phase.name for phase in result.phases]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 128}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("task", "sequences", "phases"),
    [
        ("dpo", 6, ["reference"]),
        ("kto", 3, ["score", "reference"]),
        ("orpo", 6, []),
        ("simpo", 6, []),
        ("reward", 6, []),
        ("rerank", 3, []),
    ],
)
def test_rows_and_phases_of_a_task(task: str, sequences: int, phases: list[str]) -> None:
    assert choices(**LORA, task=task, micro_batch_size=3).sequences == sequences
    found = names(planned(**LORA, task=task, micro_batch_size=3))
    assert found == ["load", *phases, "forward", "loss", "backward", "step"]


def test_an_algorithm_of_pairs_is_the_task_of_its_name() -> None:
    for name, task in (
        ("kto", Task.KTO),
        ("ORPO", Task.ORPO),
        ("simpo", Task.SIMPO),
        ("cpo", Task.ORPO),
    ):
        r = choices(**LORA, task="dpo", algorithm=name)
        assert (r.task, r.algorithm) == (task, name)
    assert choices(**LORA, task="dpo", algorithm="ipo").task is Task.DPO
    assert set(TASKS) == set(Task)


def test_a_reference_is_a_copy_visits_or_comes_from_before() -> None:
    copy = planned(**FULL, task="dpo")
    assert terms(copy, "forward")["weights"] == 2 * 2 * PARAMETERS
    away = planned(**FULL, task="dpo", reference="offloaded")
    assert terms(away, "forward")["weights"] == 2 * PARAMETERS
    assert terms(away, "reference")["weights"] == 2 * 2 * PARAMETERS
    assert host(away)["weights"] == 2 * PARAMETERS
    stored = planned(**FULL, task="dpo", reference="precomputed")
    # before training: no optimizer states, no graph of the policy
    assert set(terms(stored, "reference")) <= {"weights", "overhead", "activations", "logits"}
    assert terms(stored, "reference")["weights"] == 2 * PARAMETERS
    assert host(stored) == {}


def test_the_policys_graph_waits_for_the_reference_where_it_runs_after() -> None:
    after = planned(**LORA, task="dpo").phase("reference")
    first = planned(**LORA, task="dpo", framework="vramwise").phase("reference")
    held = "the policy's graph, held meanwhile"
    assert held in " ".join(term.formula for term in after.terms)
    assert held not in " ".join(term.formula for term in first.terms)


def test_a_reward_model_has_no_vocabulary() -> None:
    result = planned(**FULL, task="reward")
    assert terms(result, "load")["weights"] == 2 * SCORED
    assert terms(result, "step")["optimizer"] >= 2 * 2 * SCORED
    # 32 tokens: a number each, its gradient, and that of 64 hidden, all bf16
    assert terms(result, "loss")["logits"] == 2 * 32 * 2 + 32 * 64 * 2
    assert any(
        "logits" in note for note in planned(**FULL, task="reward", loss="chunked").assumptions
    )


def test_a_teacher_stays_waits_or_is_elsewhere(folder: str) -> None:
    teacher = 2 * (128_000 + 128_000 + 128 + 3 * (16_384 * 0 + _layer(128)))
    base = {
        **LORA,
        "task": "distill",
        "teacher": folder,
        "loss": "chunked",
        "completion_length": 16,
    }
    stays = planned(**base, context=None, prompt_length=4)
    assert terms(stays, "load")["weights"] == 2 * PARAMETERS + teacher
    assert "teacher" in names(stays)
    waits = planned(**base, context=None, prompt_length=4, teacher_placement="offloaded")
    assert terms(waits, "load")["weights"] == 2 * PARAMETERS
    assert terms(waits, "teacher")["weights"] == 2 * PARAMETERS + teacher
    assert host(waits)["weights"] == teacher
    served = planned(
        **base, context=None, prompt_length=4, teacher_placement="served", teacher_top_k=10
    )
    assert "teacher" not in names(served)
    alone = planned(**LORA, loss="chunked", context=20)
    # 20 rows x 10 tokens x (8 id + 4 log-probability + 3 x 4 of the loss)
    more = terms(served, "loss")["logits"] - terms(alone, "loss")["logits"]
    assert more == 20 * 10 * 24


def _layer(hidden: int) -> int:
    """Parameters of a layer of the toy at another width: q, k, v, o of heads of 32; MLP 128; two norms."""
    head = hidden // 4
    return hidden * hidden * 2 + 2 * 2 * head * hidden + 3 * 128 * hidden + 2 * hidden


def test_gkd_holds_seventeen_tensors_of_the_logits_size(folder: str) -> None:
    result = planned(**LORA, task="distill", teacher=folder, mixed_precision="bf16", loss="full")
    assert terms(result, "loss")["logits"] == 16 * 1_000 * 17 * 4


def test_ppo_trains_a_critic_beside_the_policy() -> None:
    fields = {"completion_length": 8, "prompt_length": 8, "context": None, "beta": 0.1}
    result = planned(**FULL, task="ppo", **fields)
    assert names(result) == [
        "load", "rollout", "score", "reference", "reward",
        "forward", "loss", "backward", "critic", "step",
    ]  # fmt: skip
    # policy, reference and two models of one number, all bf16
    assert terms(result, "load")["weights"] == 2 * (2 * PARAMETERS + 2 * SCORED)
    step = terms(result, "step")
    assert step["gradients"] == 2 * (PARAMETERS + SCORED)
    assert terms(result, "forward")["optimizer"] == 2 * 2 * (PARAMETERS + SCORED)
    # the critic's backward finds the policy's gradients
    assert terms(result, "critic")["gradients"] > 2 * PARAMETERS
    judged = planned(**FULL, task="ppo", **fields, reward_model="none")
    assert terms(judged, "load")["weights"] == 2 * (2 * PARAMETERS + SCORED)


def test_a_critic_of_its_own_worker_leaves_the_policy_alone() -> None:
    fields = {"completion_length": 8, "prompt_length": 8, "context": None}
    together = planned(**FULL, task="ppo", **fields)
    apart = planned(**FULL, task="ppo", **fields, framework="verl")
    assert terms(apart, "critic")["gradients"] == 4 * SCORED  # fp32, and none of the policy's
    graph = [t.formula for t in together.phase("forward").terms if t.name == "activations"]
    assert "the critic's graph" in graph[0]
    assert "the critic's graph" not in str([t.formula for t in apart.phase("forward").terms])


def test_embeddings_hold_every_texts_graph_or_one_mini_batch() -> None:
    base = {**LORA, "task": "embed", "context": None, "prompt_length": 8, "completion_length": 16}
    r = choices(**base, micro_batch_size=4, negatives=2)
    assert [tuple(column) for column in r.columns] == [(4, 8), (4, 16), (4, 16), (4, 16)]
    assert r.tokens == 4 * (8 + 3 * 16)
    assert planned(**base).spec.head is None
    whole = planned(**base, micro_batch_size=4)
    cached = planned(**base, micro_batch_size=4, mini_batch=1)
    assert "score" in names(cached)
    assert "score" not in names(whole)
    one = planned(**base, micro_batch_size=1, mini_batch=1)
    held = terms(cached, "forward")
    assert held["activations"] == terms(one, "forward")["activations"]
    # the mini-batches before left gradients
    assert held["gradients"] == terms(one, "step")["gradients"]
    assert choices(**base, micro_batch_size=4, mini_batch=1).grad_accum == 4


def test_evaluation_keeps_logits_until_they_are_fetched() -> None:
    base = {**LORA, "context": 16, "mixed_precision": "none"}
    loss_only = planned(**base, evaluation={"samples": 8, "batch_size": 2})
    # 2 x 16 tokens: logits, their fp32 copy and the log-softmax
    assert terms(loss_only, "evaluate")["logits"] == 32 * 1_000 * (2 + 4 + 4)
    kept = planned(**base, evaluation={"samples": 8, "batch_size": 2, "logits": True})
    one = 32 * 1_000 * 2
    # four batches before a batch's loss, more than twice four when they are joined
    assert terms(kept, "evaluate")["logits"] == max(2 * 4 * one, 4 * one + 32 * 1_000 * 10)
    # numpy has no bf16
    assert host(kept)["logits"] == 8 * 16 * 1_000 * 4
    fetched = planned(
        **base,
        evaluation={"samples": 8, "batch_size": 2, "logits": True, "accumulation_steps": 1},
    )
    assert terms(fetched, "evaluate")["logits"] == 32 * 1_000 * 10
    assert "evaluate" not in names(planned(**base))


def test_saving_gathers_what_is_sharded_and_resuming_needs_the_host() -> None:
    alone = planned(**FULL, save="whole", resume=True)
    assert names(alone)[-2:] == ["save", "resume"]
    assert terms(alone, "save") == {
        "weights": 2 * PARAMETERS,
        "optimizer": 2 * 2 * PARAMETERS,
        "overhead": TRAINING_CUBLAS,
    }
    assert terms(alone, "resume") == terms(alone, "save")
    assert host(alone)["weights"] == 2 * PARAMETERS
    sharded = planned(LLAMA, gpus(2), **FULL, sharding="fsdp", save="whole")
    # half, and what the forward gathers: embeddings, head and norm 128,064, a layer 36,992
    assert terms(sharded, "save")["weights"] == PARAMETERS + 2 * (128_064 + 36_992)
    assert host(sharded)["weights"] == 2 * PARAMETERS  # the first rank alone makes it
    parts = planned(LLAMA, gpus(2), **FULL, sharding="fsdp", save="sharded")
    assert terms(parts, "save")["weights"] == PARAMETERS


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": "sft", "teacher": "llama-3.2-1b"}, "teacher: has no effect with task sft"),
        ({"task": "dpo", "negatives": 2}, "negatives: has no effect with task dpo"),
        ({"task": "rerank", "mini_batch": 2}, "mini_batch: has no effect with task rerank"),
        (
            {"task": "grpo", "value_model": "llama-3.2-1b"},
            "value_model: has no effect with task grpo",
        ),
        ({"task": "distill"}, "teacher: task distill needs one"),
        (
            {"task": "distill", "teacher": "llama-3.2-1b"},
            "teacher: llama-3.2-1b has 128,256 tokens",
        ),
        ({"task": "distill", "teacher": "no-such-model"}, "teacher: "),
        (
            {"task": "distill", "teacher": "llama-3.2-1b", "teacher_top_k": 5},
            "teacher_top_k: a teacher on this machine",
        ),
    ],
)
def test_a_field_of_another_task_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        planned(**{**LORA, **fields})
    assert error.value.message.startswith(said)
    assert "\n" not in error.value.message


def test_reference_defaults() -> None:
    assert choices(**LORA, task="kto").reference is Reference.ADAPTER_OFF
    assert choices(**FULL, task="kto").reference is Reference.SEPARATE
    assert choices(**LORA, task="orpo").reference is Reference.NONE
    notes = planned(**LORA, task="orpo", reference="separate").assumptions
    assert any("only grpo, dpo, kto and ppo have a reference: reference" in note for note in notes)
