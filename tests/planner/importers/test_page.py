"""docs/importers.md: each tool's example is read as that tool's, and can be planned."""

import re
from pathlib import Path

import pytest

from planner.importers import TOOLS, import_config, resolve_model
from planner.machines.machine import make_machine
from planner.plan import plan

PAGE = (Path(__file__).parents[3] / "docs" / "importers.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^### ([\w-]+)\n.*?^```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
WITHOUT = {"alignment-handbook", "open-r1", "vllm-recipe", "accelerate", "deepspeed"}
"""Read as TRL's, vLLM's, or beside a model."""


def test_every_tool_has_an_example() -> None:
    assert {name for name, _ in EXAMPLES} == set(TOOLS) - WITHOUT


@pytest.mark.parametrize(("tool", "text"), EXAMPLES)
def test_an_example_is_read_and_planned(tool: str, text: str) -> None:
    found = import_config(text)
    assert found.tool == tool
    assert not found.report.not_understood
    model = resolve_model(found.run.model)
    assert model is not None
    machine = make_machine("h200", gpus=found.run.machine.gpus)
    assert plan(model, found.run.recipe, machine).peak_bytes > 0
