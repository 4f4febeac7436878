"""A recipe that starts from an adapter has its rank and targets; what cannot be gone on with is one line."""

import json
from pathlib import Path

import pytest

from planner.errors import VramwiseError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.models.lora_targets import lora_counts
from planner.plan import plan
from planner.run.recipe import LoraSection
from planner.run.runfile import make_recipe

LLAMA = catalogue_model("llama-3.2-1b")
PLAIN = json.loads((Path(__file__).parent / "adapter/adapter_config.json").read_text("utf-8"))


@pytest.fixture
def adapter(tmp_path):
    def make(**changes):
        (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | changes), "utf-8")
        return str(tmp_path)

    return make


def planned(folder, model=LLAMA, **lora):
    recipe = make_recipe(lora={"from": folder} | lora)
    return plan(model, recipe, make_machine("h100-sxm"))


def test_rank_and_targets_are_the_adapters(adapter):
    found = planned(adapter())
    expected = lora_counts(LLAMA, ["q_proj", "v_proj"], rank=4).parameters
    assert found.resolved.lora_rank == 4
    (term,) = [t for t in found.phase("load").terms if t.name == "adapters"]
    assert term.bytes == expected * 2
    assert not any("lora.from" in note for note in found.assumptions)


def test_modules_to_save_and_dora_come_along(adapter):
    found = planned(adapter(modules_to_save=["embed_tokens"], use_dora=True))
    assert (found.resolved.modules_to_save, found.resolved.dora) == (("embed_tokens",), True)


def test_what_the_recipe_says_too_must_be_the_same(adapter):
    folder = adapter()
    assert planned(folder, rank=4, targets=["v_proj", "q_proj"]).resolved.lora_rank == 4
    for name, value in (("rank", 8), ("targets", "attention"), ("dora", True), ("init", "pissa")):
        with pytest.raises(VramwiseError) as caught:
            planned(folder, **{name: value})
        assert f"lora.{name}" in caught.value.message
        assert "leave it out" in caught.value.hint


def test_a_word_for_the_same_modules_is_no_conflict(adapter):
    folder = adapter(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    assert planned(folder, targets="attention").resolved.lora_rank == 4


def test_another_base_is_said(adapter):
    notes = planned(adapter(base_model_name_or_path="some/other-model")).assumptions
    assert any("made for some/other-model" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"target_modules": r".*\.q_proj"}, "pattern"),
        ({"target_modules": 7}, "target_modules"),
        ({"target_modules": ["wq"]}, "wq"),
        ({"r": "8"}, "r '8'"),
    ],
)
def test_what_cannot_be_gone_on_with_is_named(changes, named, adapter):
    with pytest.raises(VramwiseError) as caught:
        planned(adapter(**changes))
    assert named in caught.value.message
    assert "\n" not in caught.value.message


def test_a_folder_without_an_adapter_names_the_checkpoints(tmp_path):
    with pytest.raises(VramwiseError, match=r"holds no adapter_config\.json"):
        planned(str(tmp_path))
    inside = tmp_path / "checkpoints/step-00000003"
    inside.mkdir(parents=True)
    (inside / "adapter_config.json").write_text("{}", "utf-8")
    with pytest.raises(VramwiseError) as caught:
        planned(str(tmp_path))
    assert "step-00000003" in caught.value.hint


def test_the_field_is_called_from_in_files():
    made = LoraSection.model_validate({"from": "a/b"})
    assert made.model_dump(exclude_unset=True) == {"from": "a/b"}


def test_a_reference_that_is_the_adapter_at_the_start_is_a_copy(adapter):
    folder = adapter()

    def adapters(beta, **lora):
        recipe = make_recipe(task="grpo", beta=beta, lora=lora)
        found = plan(LLAMA, recipe, make_machine("h100-sxm"))
        return next(t.bytes for t in found.phase("load").terms if t.name == "adapters")

    once = adapters(0.0, **{"from": folder})
    assert adapters(0.1, **{"from": folder}) == 2 * once
    assert adapters(0.1, rank=4, targets=["q_proj", "v_proj"]) == once
    assert adapters(0.1, rank=4, targets=["q_proj", "v_proj"], init="pissa") == 2 * once
