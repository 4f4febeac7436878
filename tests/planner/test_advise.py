"""Advice: single changes, the shortest combination, and limits exact to one."""

import pytest

from planner.answers.advise import advise, apply, changes, combination, levers, limits, usefulness
from planner.machines.machine import Machine, make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.recipe import Checkpointing, Recipe
from planner.run.runfile import make_recipe

MODEL = catalogue_model("llama-3.2-1b")
MODEL_8B = catalogue_model("llama-3.1-8b")


def recipe(**fields: object) -> Recipe:
    return make_recipe(**{"method": "lora", "framework": "hf-trainer", "context": 4096, **fields})


def small_card() -> Machine:
    return make_machine(vram="12GiB")


def test_every_lever_saves_what_it_says() -> None:
    run, machine = recipe(micro_batch_size=4), small_card()
    base = plan(MODEL, run, machine)
    found = levers(MODEL, run, machine, base)
    assert len(found) >= 5
    order = [(usefulness(a, base), -a.saved_bytes) for a in found]
    assert order == sorted(order)
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


def test_what_keeps_the_result_is_told_before_what_changes_it() -> None:
    machine, model = make_machine("h100-sxm", gpus=8), catalogue_model("llama-3.1-70b")
    run = make_recipe(method="full", framework="vramwise", context=2048)
    names = [a.change.name for a in levers(model, run, machine, plan(model, run, machine))]
    assert names[:2] == ["sharding=fsdp2", "optimizer_offload"]
    small = make_machine("4070 laptop")
    run = make_recipe(method="lora", context=2048)
    found = levers(MODEL_8B, run, small, plan(MODEL_8B, run, small))
    assert found[0].change.name == "method=qlora"  # nothing else is near to enough


def test_no_card_is_told_to_do_what_it_cannot() -> None:
    machine = make_machine("m4 max 64gb")
    run = make_recipe(method="lora", checkpointing="none", context=8192)
    found = levers(MODEL_8B, run, machine, plan(MODEL_8B, run, machine))
    names = [advice.change.name for advice in found]
    assert "checkpointing=full" in names
    assert not [name for name in names if "8bit" in name or "offload" in name or "vllm" in name]


@pytest.mark.parametrize(
    ("gpu", "fields", "said"),
    [
        ("t4", {}, "no bf16 units (this trainer refuses it)"),
        ("v100 16gb", {"task": "serve", "framework": "vllm"}, "vLLM refuses it"),
        ("m4 max 64gb", {"optimizer": "adamw-8bit"}, "no optimizers on MPS"),
        ("m4 max 64gb", {"task": "serve", "framework": "vllm"}, "no build for Apple"),
        ("strix halo", {"optimizer_offload": True}, "nothing is saved"),
    ],
)
def test_a_plan_says_what_its_card_cannot_do(
    gpu: str, fields: dict[str, object], said: str
) -> None:
    machine = make_machine(gpu)
    notes = plan(MODEL, make_recipe(**fields), machine).assumptions
    assert any(said in note for note in notes), notes
    half = make_recipe(dtype="fp16", lora={"dtype": "fp16"})
    assert not any("bf16 units" in note for note in plan(MODEL, half, machine).assumptions)


def test_a_server_has_no_largest_batch() -> None:
    machine = make_machine("rtx-4090")
    run = make_recipe(task="serve", framework="vllm")
    assert set(limits(MODEL, run, machine, plan(MODEL, run, machine))) == {
        "context",
        "context_safe",
    }
