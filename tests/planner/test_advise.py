"""Advice: single changes, the shortest combination, and limits exact to one."""

import pytest

from planner.answers.advise import advise, apply, changes, combination, levers, limits
from planner.answers.recommend import LAYOUTS, SERVING, TRAINING, _best, recommend
from planner.machines.machine import Machine, make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.recipe import Checkpointing, Recipe
from planner.run.runfile import make_recipe

MODEL = catalogue_model("llama-3.2-1b")


def recipe(**fields: object) -> Recipe:
    return make_recipe(**{"method": "lora", "framework": "hf-trainer", "context": 4096, **fields})


def small_card() -> Machine:
    return make_machine(vram="12GiB")


def test_every_lever_saves_what_it_says() -> None:
    run, machine = recipe(micro_batch_size=4), small_card()
    base = plan(MODEL, run, machine)
    found = levers(MODEL, run, machine, base)
    assert len(found) >= 5
    assert [a.saved_bytes for a in found] == sorted((a.saved_bytes for a in found), reverse=True)
    for advice in found:
        again = plan(MODEL, apply(run, advice.change), machine)
        assert base.peak_bytes - again.peak_bytes == advice.saved_bytes > 0
        assert advice.change.price


def test_changes_that_alter_the_result_say_so() -> None:
    run = recipe(method="full")
    resolved = plan(MODEL, run, small_card()).resolved
    flags = {change.name: change.changes_objective for change in changes(resolved, run)}
    assert flags["method=lora"] is True
    assert flags["checkpointing=full"] is False
    assert next(flag for name, flag in flags.items() if name.startswith("context=")) is True


def test_apply_reaches_into_sections() -> None:
    run = recipe()
    resolved = plan(MODEL, run, small_card()).resolved
    rank = next(c for c in changes(resolved, run) if c.name.startswith("lora.rank"))
    assert apply(run, rank).lora.rank == run.lora.rank // 2
    assert apply(run, rank).context == run.context
    ck = next(c for c in changes(resolved, run) if c.name == "checkpointing=full")
    assert apply(run, ck).checkpointing is Checkpointing.FULL


def test_the_shortest_combination_fits_and_no_shorter_one_does() -> None:
    run = recipe(micro_batch_size=8, method="full", optimizer="adamw")
    machine = small_card()
    base = plan(MODEL, run, machine)
    assert not base.fits
    singles = levers(MODEL, run, machine, base)
    found = combination(MODEL, run, machine, singles)
    assert found is not None
    group, result = found
    assert result.fits
    if len(group) > 1:
        assert not any(advice.plan.fits for advice in singles)


def test_limits_are_exact_to_one() -> None:
    run, machine = recipe(micro_batch_size=1, checkpointing="full"), small_card()
    found = limits(MODEL, run, machine, plan(MODEL, run, machine))
    for name, field in (("context", "context"), ("micro_batch_size", "micro_batch_size")):
        for key, verdicts in ((name, {"fits", "tight"}), (f"{name}_safe", {"fits"})):
            most = found[key]
            at = plan(MODEL, run.model_copy(update={field: most}), machine)
            over = plan(MODEL, run.model_copy(update={field: most + 1}), machine)
            assert at.verdict in verdicts
            assert over.verdict not in verdicts
    assert found["context_safe"] <= found["context"]


def test_advise_for_a_run_that_fits_and_one_that_cannot() -> None:
    fits = advise(MODEL, recipe(micro_batch_size=1), make_machine("h100-sxm"))
    assert fits["fits"]
    assert fits["combination"] is None
    assert fits["largest"]["context"] > 4096
    hopeless = advise(catalogue_model("llama-3.1-405b"), recipe(), make_machine(vram="8GiB"))
    assert not hopeless["fits"]
    assert hopeless["combination"] is None
    assert hopeless["largest"]["context"] == 0


def test_host_ram_counts() -> None:
    run = recipe(method="full", optimizer_offload=True, micro_batch_size=1)
    roomy = plan(MODEL, run, make_machine("h100-sxm", host_ram="64GiB"))
    tight = plan(MODEL, run, make_machine("h100-sxm", host_ram="1GiB"))
    assert roomy.fits
    assert not tight.fits
    assert "host RAM" in tight.why


@pytest.mark.parametrize("task", ["sft", "grpo", "serve"])
def test_recommendations_really_fit(task: str) -> None:
    machine = make_machine("rtx-4090")
    rows = recommend(machine, task=task)
    assert len(rows) > 20
    assert [row.parameters for row in rows] == sorted((r.parameters for r in rows), reverse=True)
    variants = SERVING if task == "serve" else TRAINING
    framework = "vllm" if task == "serve" else "vramwise"
    for row in rows[:5] + rows[-5:]:
        run = make_recipe(
            task=task,
            framework=framework,
            micro_batch_size=1,
            context=row.context,
            **variants[row.method],
        )
        assert plan(catalogue_model(row.model), run, machine).verdict == "fits"


def test_recommendations_on_several_gpus_are_divided_and_said() -> None:
    machine = make_machine("h100-sxm", gpus=16)
    model = catalogue_model("llama-3.1-70b")
    recipe = make_recipe(task="sft", method="lora", micro_batch_size=1)
    tried = [layout.of(recipe, machine) for layout in LAYOUTS]
    plans = [_best(model, machine, "lora", each, 2048) for each in tried if each is not None]
    assert plans[0] is None  # a copy on each GPU
    said = [found.said() for found in plans[1:] if found is not None]
    assert [row.layout for row in said] == ["shard 8 x replicate 2, fsdp2", "shard 16, fsdp2"]
    assert said[0].peak_bytes > said[1].peak_bytes
    assert [layout.of(recipe, make_machine("h100-sxm", gpus=8)) for layout in LAYOUTS][1] is None
