import json
import math

import pytest
import torch

from planner.errors import UsageError, VramwiseError
from trainer.config import parse_run

HELD_OUT = {"name": "arithmetic", "options": {"digits": 1, "size": 6, "seed": 1}}
DIGITS = "def reward(completions, **k):\n    return [float(any(c.isdigit() for c in t)) for t in completions]\n"


@pytest.fixture
def grpo(document, tmp_path):
    """Return a function that makes a GRPO document with held-out sums; digits pay."""
    (tmp_path / "mine.py").write_text(DIGITS, encoding="utf-8")

    def make(*, recipe=None, train=None, **evaluation):
        base = {"validation": HELD_OUT, "eval_every": 1, "rewards": ["mine.py:reward"]}
        return document(recipe=recipe, train={**base, "evaluation": evaluation, **(train or {})})

    return make


@pytest.fixture
def sft(document, tmp_path):
    """Return a function that makes an SFT document with held-out sums."""
    rows = [
        {"prompt": f"{left} + {right} =", "completion": f" {left + right}\n"}
        for left in range(10)
        for right in range(10)
    ]
    for name, part in (("train", rows[:80]), ("held", rows[80:])):
        text = "\n".join(json.dumps(row) for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def make(*, recipe=None, train=None, **evaluation):
        made = document(
            recipe={"task": "sft", "context": 64, **(recipe or {})},
            train={
                "dataset": "train.jsonl",
                "validation": str(tmp_path / "held.jsonl"),
                "eval_every": 2,
                "lr": 0.01,
                "rewards": [],
                "evaluation": evaluation,
                **(train or {}),
            },
        )
        for key in ("num_generations", "prompt_length", "completion_length"):
            del made["recipe"][key]
        return made

    return make


def lines(tmp_path):
    text = (tmp_path / "out" / "evaluations.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_held_out_rewards_come_by_function_with_pass_at_k_and_intervals(
    grpo, train_run_of, tmp_path
):
    made = grpo(generations=4, k=[1, 2, 4], on_start=True)
    made["train"]["rewards"].append({"name": "length", "options": {"high": 6}, "weight": 0.5})
    result = train_run_of(made)
    logged = lines(tmp_path)
    assert [line["step"] for line in logged] == [0, 1, 2] == [e["step"] for e in result.evaluations]
    for line in logged:
        assert (line["samples"], line["generations"]) == (6, 4)
        assert line["pass@1"] <= line["pass@2"] <= line["pass@4"]
        for name in ("pass@1", "pass@4", "rewards/reward", "rewards/length", "reward"):
            assert line[f"{name}/low"] <= line[name] <= line[f"{name}/high"]
        # every completion passes or does not: the mean reward is pass@1
        assert line["pass@1"] == pytest.approx(line["rewards/reward"])
        total = line["rewards/reward"] + 0.5 * line["rewards/length"]
        assert line["reward"] == pytest.approx(total)


def test_perplexity_is_that_of_transformers_on_the_same_rows(sft, train_run_of, tmp_path):
    from transformers import AutoModelForCausalLM

    from trainer.data import load_samples
    from trainer.model import load_tokenizer
    from trainer.sft_data import read_examples

    made = sft(train={"steps": 2}, recipe={"method": "full"})
    result = train_run_of(made)
    (figures,) = result.evaluations
    _, train = parse_run(made, root=tmp_path)
    examples = read_examples(
        load_samples(train.validation, root=tmp_path),
        load_tokenizer(made["model"]),
        train.validation,
        limit=64,
        loss_on="completion",
    )
    folder = result.output / "checkpoints" / "step-00000002"
    model = AutoModelForCausalLM.from_pretrained(folder)
    total, count = 0.0, 0
    for row in range(len(examples)):
        ids = torch.tensor([examples[row].token_ids])
        labels = torch.where(torch.tensor([examples[row].scored]), ids, -100)
        number = int((labels != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * number
        count += number
    assert figures["tokens"] == count
    assert figures["loss"] == pytest.approx(total / count, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert figures["perplexity/low"] < figures["perplexity"] < figures["perplexity/high"]


def test_the_best_weights_are_kept_and_a_run_that_gets_no_better_stops(sft, train_run_of, tmp_path):
    """A gain has to be above 10, which only the first evaluation's is."""
    evaluation = {"save_best": True, "patience": 2, "min_delta": 10.0}
    result = train_run_of(sft(**evaluation, train={"steps": 20, "eval_every": 1}))
    assert result.exhausted
    assert (result.best_step, result.steps, len(result.evaluations)) == (1, 3, 3)
    assert (result.output / "checkpoints" / "step-00000003").is_dir()
    best = result.output / "checkpoints" / "best"
    noted = json.loads((best / "evaluation.json").read_text(encoding="utf-8"))
    assert noted["step"] == result.best_step
    # it is a checkpoint like any other: its loss is the one that was noted
    from trainer.evaluate import EvalSettings, evaluate

    again = evaluate(str(best), EvalSettings())
    assert again["figures"]["loss"] == pytest.approx(noted["figures"]["loss"], rel=1e-5)


@pytest.mark.parametrize(("metric", "best"), [("loss", 2), ("reward", 1)])
def test_better_is_smaller_for_a_loss_and_larger_for_a_reward(sft, tmp_path, metric, best):
    from trainer.preflight import prepare
    from trainer.validation import Validation

    run, train = parse_run(sft(save_best=True, metric=metric, patience=2), root=tmp_path)
    ready = prepare(run, train, held_out=1)
    values = iter([3.0, 1.0, math.nan, 2.0, 5.0])
    validation = Validation(ready, tmp_path, lambda done: {metric: next(values)})
    validation.open(0)
    stopped = next(step for step in range(1, 6) if validation.run(step) and validation.exhausted)
    validation.close()
    assert validation.best_step == best
    assert stopped == best + 2
    noted = json.loads((tmp_path / "checkpoints" / "best" / "evaluation.json").read_text())
    assert noted["step"] == best


def test_a_resumed_run_goes_on_with_the_best_so_far(sft, train_run_of, tmp_path):
    first = train_run_of(sft(save_best=True, train={"steps": 4}))
    # as if it had been stopped after two more steps
    second = train_run_of(sft(save_best=True, train={"steps": 6}), resume=True)
    assert [line["step"] for line in lines(tmp_path)] == [2, 4, 6]
    state = json.loads(
        (first.output / "checkpoints" / "step-00000006" / "state.json").read_text(encoding="utf-8")
    )
    assert state["evaluation"]["best"] == min(line["loss"] for line in lines(tmp_path))
    assert second.best_step is not None


@pytest.mark.parametrize(("task", "low", "high"), [("grpo", 0.75, 1.1), ("sft", 0.92, 1.05)])
def test_an_evaluation_is_a_planned_phase_and_rehearsed(grpo, sft, tmp_path, task, low, high):
    """Every head has keys of its own here: no fused CUDA kernel takes grouped fp32 keys, so that a plan
    holds the scores in full, which the CPU's kernel never makes (the other models here: 0.6 of the plan).

    GRPO's prompts are prefilled before the cache has grown to its end; the plan adds both.
    """
    from trainer.preflight import prepare
    from trainer.small_model import make_small_model

    own = make_small_model(tmp_path / "own-keys", chat=True, num_key_value_heads=4)
    made = (grpo if task == "grpo" else sft)(train={"preflight": True}) | {"model": str(own)}
    run, train = parse_run(made, root=tmp_path)
    ready = prepare(run, train, held_out=6)
    planned, measured = ready.planned_bytes["evaluation"], ready.measured_bytes["evaluation"]
    assert low * planned < measured < high * planned
    without = prepare(run, train.model_copy(update={"validation": None}))
    assert "evaluation" not in without.planned_bytes | without.measured_bytes


def test_the_tokenizer_is_loaded_once_for_both_data_sets(sft, train_run_of, monkeypatch):
    """Before the policy, which brings its own."""
    import trainer.sft

    loads, load = [], trainer.sft.load_tokenizer
    monkeypatch.setattr(
        trainer.sft, "load_tokenizer", lambda *a, **k: loads.append(a) or load(*a, **k)
    )
    assert not hasattr(__import__("trainer.validation").validation, "load_tokenizer")
    train_run_of(sft(train={"steps": 1}))
    assert len(loads) == 1


def test_an_evaluation_out_of_memory_is_done_again_smaller(
    sft, train_run_of, tmp_path, monkeypatch
):
    """A device that holds 40 tokens of an evaluation: the figures are those of one that holds them all."""
    import trainer.evaluation

    plain = train_run_of(sft(train={"output": "plain"})).evaluations[-1]
    whole, sizes = trainer.evaluation.hidden_rows, []

    def small(policy, batch):
        sizes.append(batch.num_tokens)
        if batch.num_tokens > 40:
            raise torch.OutOfMemoryError("no")
        return whole(policy, batch)

    monkeypatch.setattr(trainer.evaluation, "hidden_rows", small)
    result = train_run_of(sft())
    assert max(sizes) > 40, "the first try was larger"
    assert result.evaluations[-1]["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert result.metrics[-1]["budget_tokens"] > 40, "training's own micro-batches are as before"


def test_an_evaluation_that_alone_does_not_fit_is_refused(sft, tmp_path):
    from dataclasses import replace

    from trainer.evaluation_phase import check_evaluation_fits
    from trainer.preflight import prepare

    run, train = parse_run(sft(), root=tmp_path)
    planned = prepare(run, train, held_out=6).plan
    with pytest.raises(VramwiseError, match=r"train.validation: an evaluation needs"):
        check_evaluation_fits(replace(planned, capacity_bytes=1), prompts=6)


@pytest.mark.parametrize("kind", ["grpo", "sft", "messages"])
def test_a_validation_row_that_is_trained_on_is_named(grpo, sft, train_run_of, tmp_path, kind):
    if kind == "grpo":
        overlap = {**HELD_OUT, "options": {"digits": 1, "size": 64}}
        made = grpo(train={"validation": overlap})
        said = "row 1 of arithmetic is row 1"
    else:
        rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
        held = [{"prompt": "a", "completion": "b"}, rows[7]]
        if kind == "messages":
            talk = [
                [{"role": "user", "content": t}, {"role": "assistant", "content": t}] for t in "abc"
            ]
            held = [{"messages": talk[2]}, {"messages": talk[1]}]
            rows = [{"messages": turn} for turn in [talk[0]] * 7 + [talk[1]]]
        for name, part in (("train", rows), ("held", held)):
            text = "\n".join(json.dumps(row) for row in part)
            (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
        made = sft()
        said = r"row 2 of .*held.jsonl is row 8"
    with pytest.raises(UsageError, match=said) as caught:
        train_run_of(made)
    assert caught.value.message.startswith("train.validation")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("train", "evaluation", "said"),
    [
        ({"validation": None}, {"save_best": True}, "train.evaluation: there is nothing"),
        ({"validation": None, "evaluation": {}}, {}, "nothing to evaluate on"),
        ({}, {"k": [2]}, "pass@2 needs 2 generations"),
        ({}, {"pass_reward": "exakt"}, "pass_reward: 'exakt' is no reward"),
        ({}, {"metric": "accuracy"}, "metric: 'accuracy' is not measured"),
        ({"validation": {"name": "nowhere.jsonl"}}, {}, "train.validation: no such file"),
    ],
    ids=["no data", "no data either", "k", "reward", "metric", "file"],
)
def test_what_cannot_be_evaluated_is_said(grpo, train_run_of, train, evaluation, said):
    with pytest.raises(UsageError, match=said) as caught:
        train_run_of(grpo(train=train, **evaluation))
    assert "\n" not in caught.value.message


def test_sft_refuses_what_only_completions_have(sft, train_run_of):
    with pytest.raises(UsageError, match=r"evaluation.generations: SFT evaluates the loss"):
        train_run_of(sft(generations=4))
