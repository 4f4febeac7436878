"""Flags of `plan` and its kin: each goes to a field that exists, or is read beside the recipe."""

import json

import pytest

from app.cli import main
from planner.run.recipe import Recipe, RunFile
from planner.verbs.options import MACHINE_FIELDS, OPTIONS, OTHER_FIELDS, RECIPE_FIELDS

ELSEWHERE = {"lora_targets", "lora_target_parameters", "lora_modules_to_save"}
"""Lists, put into the recipe's lora by hand."""


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - set(OTHER_FIELDS) - ELSEWHERE))
def test_every_flag_has_a_field(name: str) -> None:
    if name in MACHINE_FIELDS:
        assert name in RunFile.model_fields["machine"].annotation.model_fields  # type: ignore[union-attr]
        return
    kind = Recipe
    for part in RECIPE_FIELDS.get(name, name).split("."):
        known = {found.alias or field: found for field, found in kind.model_fields.items()}
        assert part in known, f"{name}: nothing reads it"
        kind = known[part].annotation  # type: ignore[assignment]


def test_a_token_and_a_tool_are_no_part_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "qwen3-0.6b", "--gpu", "rtx-4090", "--context", "512", "--token", "hf_none"]
    assert main([*line, "--tool", "trl", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["fits"] is True
    assert "hf_none" not in out
