"""docs/model.md says what the code computes: every expression, coefficient, path and bytes per logit."""

import ast
import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest

from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.phases import PHASES
from planner.plan import Plan, plan
from planner.run.framework import pick
from planner.run.logits_law import width
from planner.run.recipe import RunFile
from planner.run.runfile import machine_of, make_recipe, parse_yaml, validate
from planner.terms.term import TERM_NAMES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "model.md").read_text(encoding="utf-8")
OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul, ast.Sub: operator.sub}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose header row starts with `heading`."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading}"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def value(expression: str) -> int:
    """Evaluate integers, +, - and *."""

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(OPERATORS[type(node.op)](walk(node.left), walk(node.right)))
        assert isinstance(node, ast.Constant)
        return int(node.value)

    return walk(ast.parse(expression, mode="eval").body)


def worked_example() -> Plan:
    block = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    run = validate(RunFile, parse_yaml(block[1], label="docs/model.md"))
    return plan(catalogue_model(run.model), run.recipe, machine_of(run.machine))


@pytest.mark.parametrize("row", rows("phase | term"), ids=lambda row: "-".join(row[:2]))
def test_the_worked_example(row: list[str]) -> None:
    phase, name, computation = row
    term = next(t for t in worked_example().phase(phase).terms if t.name == name)
    assert term.bytes == value(computation)


def test_the_example_is_complete() -> None:
    shown = {(row[0], row[1]) for row in rows("phase | term")}
    peak = worked_example()
    missing = {
        term.name for term in peak.phase(peak.peak_phase).terms if term.name not in ("gradients",)
    } - {name for _, name in shown}
    assert missing == set()


@pytest.mark.parametrize("row", rows("setting"), ids=lambda row: row[0])
def test_what_a_layer_keeps(row: list[str]) -> None:
    fields: dict[str, Any] = json.loads(row[2].strip("`"))
    model = catalogue_model("llama-3.1-8b")
    recipe = make_recipe(
        framework="hf-trainer", attention="flash", context=2048, checkpointing="none", **fields
    )
    result = plan(model, recipe, make_machine("h200"))
    activations = next(t for t in result.phase("loss").terms if t.name == "activations")
    parts = {name: each for name, _, each in activations.args[0].acts.parts}
    per_layer = parts["layers' saved tensors"] / model.num_layers / model.hidden
    assert per_layer == pytest.approx(float(row[1]), abs=0.3)


@pytest.mark.parametrize("row", rows("framework"), ids=lambda row: row[0])
def test_bytes_per_logit(row: list[str]) -> None:
    name, task, forward, backward = row
    kind = "full-fp32" if "autocast" in name else "full"
    law = pick(name.split(",")[0]).law(task, kind)
    assert sum(width(dtype, 2) for _, dtype in law.forward) == int(forward)
    assert sum(width(dtype, 2) for _, dtype in law.backward) == int(backward)


def test_phases_terms_and_files_exist() -> None:
    assert [row[0] for row in rows("phase | what")] == list(PHASES)
    assert {row[0].split(",")[0] for row in rows("term")} == set(TERM_NAMES)
    for path in re.findall(r"`((?:planner|tests|data)/[\w/.]+)`", TEXT):
        assert (ROOT / path).exists(), path
