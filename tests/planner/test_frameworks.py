"""Every framework file is complete, loads, and resolves to a plan."""

import json

import pytest

from planner.datafiles import data_dir
from planner.errors import UnknownNameError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.run.framework import LogitsLaw, find_framework, frameworks, width
from planner.run.recipe import EngineSection, Recipe, Task
from planner.run.runfile import make_recipe

ENGINE_KEYS = {"engine", *EngineSection.model_fields}
MODEL = catalogue_model("llama-3.2-1b")


@pytest.mark.parametrize("name", sorted(frameworks()))
def test_a_framework_file_is_complete(name: str) -> None:
    framework = frameworks()[name]
    assert framework.source
    assert framework.retrieved
    assert framework.versions
    for task, defaults in framework.defaults.items():
        assert task == "all" or task in list(Task)
        for key, value in defaults.items():
            if key not in ENGINE_KEYS and key != "dtype":
                make_recipe(**{key: value})  # names and values are those of a recipe
    for law in framework.logits.values():
        assert isinstance(law, LogitsLaw)
        assert law.source
        for _, dtype in (*law.forward, *law.backward, *law.chunk, *law.hidden, *law.head_grad):
            assert width(dtype, 2) >= 0


@pytest.mark.parametrize("name", sorted(set(frameworks()) - {"vllm"}))
@pytest.mark.parametrize("task", ["sft", "grpo", "dpo"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_every_framework_plans_every_task(name: str, task: str, method: str) -> None:
    result = plan(
        MODEL, make_recipe(task=task, method=method, framework=name), make_machine("h100-sxm")
    )
    assert result.peak_bytes > MODEL.parameters // 2
    assert result.resolved.framework.name == name


def test_what_trl_means_depends_on_its_version() -> None:
    fields = {"task": "grpo", "method": "lora", "context": 8192, "micro_batch_size": 4}
    machine = make_machine("h100-sxm")
    old = plan(MODEL, make_recipe(framework="trl-0.15", **fields), machine)
    new = plan(MODEL, make_recipe(framework="trl", checkpointing="none", **fields), machine)
    assert old.peak_bytes > 1.3 * new.peak_bytes
    assert find_framework("trl-1.16").name == "trl"


def test_an_unknown_framework_lists_near_names() -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_framework("unslth")
    assert "unsloth" in (caught.value.hint or "")


def test_the_default_dtype_of_trl_is_kept() -> None:
    recipe = Recipe(task=Task.SFT, framework="trl")
    resolved = plan(MODEL, recipe, make_machine("h100-sxm")).resolved
    assert (resolved.dtype, resolved.autocast) == ("fp32", "bf16")


def test_shared_losses_name_their_source() -> None:
    text = (data_dir() / "frameworks" / "_losses.json").read_text(encoding="utf-8")
    document = json.loads(text)
    assert document["source"]
    assert document["retrieved"]
    assert all(law["source"] for law in document["laws"].values())
