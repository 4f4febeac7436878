"""Recommendations: every cell is planned again and fits, nothing is paired that does not hold together."""

import json
from typing import Any

import pytest

from app.cli import main
from planner.answers.cards import cards_for_model, cards_for_run
from planner.answers.longest import contexts
from planner.answers.ranking import RULE, release_of, worth
from planner.answers.recommend import (
    Recommendation,
    comfortable,
    recommend,
    runner,
    setting,
    starts,
)
from planner.answers.unchanged import settle
from planner.machines.machine import Machine, make_machine
from planner.models.catalogue import catalogue_model, catalogue_names
from planner.models.spec import ModelSpec
from planner.plan import plan
from planner.replay.steps import replay_run
from planner.run.runfile import make_recipe


def some(*names: str) -> Any:
    return lambda name, model: name in names


def check(rows: list[Recommendation], machine: Machine) -> None:
    """Plan every cell of every row: it fits, with the bytes, batch and context that the row says."""
    for row in rows:
        model = catalogue_model(row.model)
        assert row.at_least is not None
        for cell in (row, row.at_least):
            made = plan(model, make_recipe(**cell.recipe), machine)
            assert made.fits, (row.model, row.method, cell.settings)
            assert (made.peak_bytes, made.resolved.seq_tokens) == (cell.peak_bytes, cell.context)
            if made.resolved.trains:
                assert made.resolved.batch == cell.batch
            assert not model.longest or cell.context <= model.longest
        assert row.context >= row.at_least.context


@pytest.mark.parametrize("task", ["sft", "grpo", "serve"])
def test_every_cell_fits_and_says_one_plan(task: str) -> None:
    machine = make_machine("rtx-4090")
    names = ("qwen3-8b", "phi-3-medium-4k", "mamba2-130m")
    rows = recommend(machine, task=task, wanted=some(*names))
    assert {row.model for row in rows} == set(names)
    check(rows, machine)
    assert [row.score for row in rows] == sorted((row.score for row in rows), reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "grpo", "dpo", "serve"])
@pytest.mark.parametrize(
    ("gpu", "gpus", "least"),
    [("rtx-3060-12gb", 1, 2048), ("rtx-4090", 1, 16384), ("t4", 1, 1024), ("h100-sxm", 8, 8192)],
)
def test_every_cell_of_the_catalogue_fits(task: str, gpu: str, gpus: int, least: int) -> None:
    machine = make_machine(gpu, gpus=gpus)
    rows = recommend(machine, task=task, least_context=least)
    assert len(rows) > 20
    check(rows, machine)


def test_a_3090_takes_qwen3_8b_grpo_at_16k() -> None:
    rows = recommend(
        make_machine("rtx-3090"), task="grpo", least_context=16384, wanted=some("qwen3-8b")
    )
    row = next(row for row in rows if row.method == "qlora")
    assert row.context == catalogue_model("qwen3-8b").longest == 40960
    assert "--max-num-seqs" in row.flags
    assert any("waves" in price for price in row.prices)
    assert row.at_least is not None
    assert row.at_least.context == 16384


def test_settings_are_slowed_down_only_where_needed() -> None:
    rows = recommend(make_machine("h100-sxm"), wanted=some("llama-3.2-1b"))
    lora = next(row for row in rows if row.method == "lora")
    assert lora.at_least is not None
    assert lora.at_least.prices == ()
    assert lora.at_least.recipe["checkpointing"] == "none"
    assert lora.at_least.batch > 1


@pytest.mark.parametrize(
    ("gpu", "task", "names"),
    [
        ("rtx-4090", "dpo", ["smollm3-3b"]),
        ("rtx-3060-12gb", "dpo", ["phi-4-mini"]),
        ("rtx-3060-12gb", "serve", ["qwen3-8b"]),
        pytest.param("rtx-4090", "sft", ["llama-3.1-8b", "qwen3-32b"], marks=pytest.mark.slow),
        pytest.param("rtx-3060-12gb", "grpo", ["qwen3-vl-8b"], marks=pytest.mark.slow),
    ],
)
def test_the_context_is_the_longest_of_its_own_settings(
    gpu: str, task: str, names: list[str]
) -> None:
    """The same settings do not fit one step of the context further: not even a replay's fragments decide."""
    machine = make_machine(gpu)
    rows = recommend(machine, task=task, wanted=some(*names))
    assert rows
    for row in rows:
        model = catalogue_model(row.model)
        steps = contexts(2048, model.longest)
        assert row.context in steps
        for later in [step for step in steps if step > row.context][:1]:
            recipe = make_recipe(**{**row.recipe, "context": later})
            assert not plan(model, recipe, machine).fits, (row.model, row.method, row.context)


def test_what_its_price_puts_behind_the_last_row_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed: list[str] = []

    def spied(model: ModelSpec, *args: Any, **more: Any) -> Any:
        replayed.append(model.name)
        return replay_run(model, *args, **more)

    monkeypatch.setattr("planner.reserved.replay_run", spied)
    machine, names = make_machine("rtx-4090"), ("mistral-small-22b", "glm-4-9b-0414")
    assert (
        worth(names[0], catalogue_model(names[0])).score
        > worth(names[1], catalogue_model(names[1])).score
    )

    def rows(limit: int | None) -> list[Recommendation]:
        wanted = some(*names)
        return recommend(machine, task="grpo", least_context=8192, wanted=wanted, limit=limit)

    first = rows(1)
    assert set(replayed) == {"glm-4-9b-0414"}
    assert rows(None)[:1] == first
    assert set(replayed) == set(names)


@pytest.mark.parametrize(
    ("name", "method", "layout"),
    [
        ("llama-3.3-70b", "lora", "shard 8, fsdp2"),
        ("llama-3.3-70b", "full", "shard 8, fsdp2"),
        ("llama-3.2-1b", "lora", "replicate 8, ddp"),
    ],
)
def test_several_gpus_are_sharded_where_they_need_it(name: str, method: str, layout: str) -> None:
    """The row's settings at the context that was asked for, without the search for its longest."""
    machine, model = make_machine("h100-sxm", gpus=8), catalogue_model(name)
    found = comfortable(model, starts("sft", method, "vramwise", machine), machine, 2048, "sft")
    assert found is not None
    assert setting(found).layout == layout
    assert found.plan.tensors_fit


@pytest.mark.slow
def test_several_gpus_are_sharded() -> None:
    machine = make_machine("h100-sxm", gpus=8)
    rows = recommend(machine, wanted=some("llama-3.3-70b", "llama-3.2-1b"))
    check(rows, machine)
    layout = {(row.model, row.method): row.at_least.layout for row in rows if row.at_least}
    assert layout["llama-3.3-70b", "lora"] == "shard 8, fsdp2"
    assert layout["llama-3.3-70b", "full"] == "shard 8, fsdp2"
    assert layout["llama-3.2-1b", "lora"] == "replicate 8, ddp"


def test_several_gpus_serve_as_engines_that_share_a_model() -> None:
    machine = make_machine("h100-sxm", gpus=8)
    served = recommend(machine, task="serve", wanted=some("llama-3.3-70b"))
    check(served, machine)
    layouts = {row.method: row.at_least.layout for row in served if row.at_least}
    assert layouts["serve"] == "tensor 2 x 4 engine(s)"


@pytest.mark.slow
def test_the_largest_model_goes_where_another_trainer_loads_it_in_parts() -> None:
    machine = make_machine("h100-sxm", gpus=8)
    rows = recommend(machine, wanted=some("llama-3.1-405b"))
    check(rows, machine)
    row = next(row for row in rows if row.method == "qlora")
    assert "by hf-trainer" in row.layout
    for flag in ("--framework hf-trainer", "--double-quant", "--shard fsdp2"):
        assert flag in row.flags


def test_a_card_without_bf16_is_given_fp16() -> None:
    rows = recommend(make_machine("t4"), wanted=some("qwen3-4b"))
    assert rows
    assert all("--dtype fp16" in row.flags for row in rows)


def test_offloads_are_not_offered_where_host_and_gpu_share_memory() -> None:
    machine = make_machine("m4 max 64gb")
    rows = recommend(machine, wanted=some("qwen3-8b"))
    check(rows, machine)
    assert rows
    assert not any("offload" in row.flags for row in rows)


def test_younger_and_broader_models_come_first() -> None:
    def value(name: str) -> float:
        return worth(name, catalogue_model(name)).score

    assert value("qwen3-8b") > value("llama-2-7b")
    assert value("qwen2.5-7b") > value("qwen2.5-coder-7b")
    assert value("qwen3-14b") > value("starcoder2-15b")
    assert worth("qwen3-8b", catalogue_model("qwen3-8b")).at(1024) == value("qwen3-8b") - 1.5
    assert all(release_of(name) for name in catalogue_names())


@pytest.mark.slow
def test_the_best_rows_are_those_of_the_whole_list() -> None:
    machine = make_machine("rtx-3060-12gb")

    def few(name: str, model: ModelSpec) -> bool:
        return name.startswith(("qwen3-", "llama-3"))

    every = recommend(machine, wanted=few)
    assert [row.to_dict() for row in recommend(machine, wanted=few, limit=5)] == [
        row.to_dict() for row in every[:5]
    ]


def test_limit_and_rule_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["recommend", "--gpu", "rtx-4090", "--limit", "2"]
    assert main([*line, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == 2
    assert document["rule"] == RULE
    first = document["rows"][0]
    assert first["context"] >= first["at_least"]["context"] == 2048
    assert main(line) == 0
    out = capsys.readouterr().out
    assert RULE in out
    assert "leaves the result as it is" in out
    command = out.strip().splitlines()[-1].partition("vramwise ")[2]
    assert main([*command.split(), "--gpu", "rtx-4090", "--check", "--json"]) == 0


@pytest.mark.slow
def test_gpus_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "llama-3.1-8b", "--context", "8k", "--limit", "9", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 9
    usd = [row["spent"]["usd_middle"] for row in rows]
    assert usd == sorted(usd)
    for row in rows:
        recipe = make_recipe(**row["setting"]["recipe"])
        made = plan(catalogue_model("llama-3.1-8b"), recipe, make_machine(row["gpu"]))
        assert made.fits
        assert made.peak_bytes == row["peak_bytes"]
    assert main(["recommend", "llama-3.1-8b", "--limit", "3"]) == 0
    assert "the cheapest first" in capsys.readouterr().out


@pytest.mark.slow
def test_cards_for_a_run_as_it_is() -> None:
    model, recipe = catalogue_model("llama-3.1-8b"), make_recipe(method="lora", context=4096)
    cards = {card.gpu: card for card in cards_for_run(model, recipe)}
    assert cards["rtx-4090"].fits
    assert cards["rtx-3060-12gb"].verdict == "does not fit"
    assert cards["rtx-3060-12gb"].headroom_bytes < 0
    assert [card.gpu for card in cards_for_model(model, limit=1)] != []


def test_a_mistake_in_the_run_is_said_where_no_card_is_named(capsys) -> None:
    line = "plan llama-3.1-8b --framework hf-trainer --method full --gpus 8 --shard fsdp2"
    assert main([*line.split(), "--reshard-after-forward", "3"]) == 2
    said = capsys.readouterr()
    assert "reshard_after_forward: 3 does not divide the 8 ranks" in said.err + said.out


@pytest.mark.parametrize("card", [["--gpu", "rtx-4090"], []])
def test_a_context_beyond_the_model_s_own_is_said(
    card: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", "phi-3-medium-4k", *card, "--context", "64k"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("phi-3-medium-4k reads 4,096 tokens at most; --context asks for 65,536")


@pytest.mark.parametrize("asked", [["--gpu", "rtx-4090"], ["qwen3-0.6b"]])
def test_an_unknown_framework_is_no_card_without_models(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", *asked, "--framework", "unsloht"]) == 2
    assert "did you mean unsloth" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "framework", "others"),
    [
        ("grpo", "hf-trainer", "axolotl, ms-swift, torchtune, trl, unsloth, verl, vramwise have"),
        ("serve", "hf-trainer", "vllm have"),
        ("sft", "vllm", "vramwise have"),
        ("dpo", "vramwise", "axolotl, llamafactory"),
    ],
)
@pytest.mark.parametrize("asked", [["--gpu", "rtx-4090"], ["qwen3-0.6b"]])
def test_a_framework_without_the_task_is_refused_by_name(
    asked: list[str], task: str, framework: str, others: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", *asked, "--task", task, "--framework", framework]) == 2
    err = capsys.readouterr().err
    assert f"framework: {framework} has no {task} of its own" in err
    assert others in err


@pytest.mark.parametrize(
    ("task", "family"),
    [("sft", "vramwise"), ("dpo", "trl"), ("embed", "hf-trainer"), ("serve", "vllm")],
)
def test_without_a_framework_rows_are_of_the_first_that_has_the_task(
    task: str, family: str
) -> None:
    assert runner(task, None) == family
    (row,) = recommend(make_machine("rtx-4090"), task=task, wanted=some("qwen3-0.6b"), limit=1)
    assert row.recipe.get("framework", "vramwise") == family


def test_a_serving_release_is_kept() -> None:
    card = make_machine("rtx-4090")
    (row,) = recommend(
        card, task="serve", framework="vllm==0.11.0", wanted=some("qwen3-0.6b"), limit=1
    )
    assert row.recipe["framework"] == "vllm==0.11.0"


def test_megatron_is_recommended_without_what_it_cannot_be_planned_with() -> None:
    rows = recommend(
        make_machine("h100-sxm"), framework="megatron", wanted=some("qwen3-0.6b", "mamba2-130m")
    )
    assert {(row.model, row.method) for row in rows} == {("qwen3-0.6b", "full")}


def test_the_methods_that_a_framework_does_not_plan_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recommend", "qwen3-0.6b", "--gpu", "rtx-4090", "--framework", "megatron"]) == 0
    out = capsys.readouterr().out
    for method in ("lora", "qlora"):
        assert f"method: {method} cannot be planned under Megatron-LM yet" in out
    assert main(["recommend", "qwen3-0.6b", "--gpu", "rtx-4090"]) == 0
    assert "cannot be planned" not in capsys.readouterr().out


def test_a_model_too_large_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "llama-3.1-405b", "--gpu", "rtx-4090"]) == 0
    assert "llama-3.1-405b fits NVIDIA GeForce RTX 4090" in capsys.readouterr().out


def test_a_run_that_cannot_be_helped_is_none() -> None:
    machine = make_machine(vram="8GiB")
    assert settle(catalogue_model("llama-3.1-70b"), make_recipe(method="qlora"), machine) is None


def test_a_lever_that_a_machine_sets_aside_is_not_offered_for_ever() -> None:
    """A processor has no second memory: offloaded checkpoints stay where they are."""
    machine = Machine(vram_bytes=2 << 30, context_bytes=0, cpu=True)
    recipe = make_recipe(task="sft", method="full", context=1 << 16, framework="vramwise")
    assert settle(catalogue_model("llama-3.1-8b"), recipe, machine) is None
