"""Switches: a misspelt one fails, each is read by the code, set by a file and described."""

import ast
import inspect
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.run.framework import frameworks
from planner.run.framework_files import Framework
from planner.run.runfile import validate
from planner.run.switches import Switches

ROOT = Path(__file__).parents[2]
NAMES = sorted(Switches.model_fields)


def attributes_read() -> Iterator[str]:
    """Names read as `....switches.NAME`, or of a variable named `switches`, in all packages."""
    for package in ("planner", "profiler", "trainer", "app"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Attribute):
                    continue
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name == "switches":
                    yield node.attr


@pytest.fixture(scope="module")
def read() -> set[str]:
    return set(attributes_read())


@pytest.mark.parametrize("name", NAMES)
def test_every_switch_is_read(name: str, read: set[str]) -> None:
    assert name in read


def test_nothing_else_is_read_of_switches(read: set[str]) -> None:
    assert read <= {*NAMES, "model_dump", "model_copy"}


@pytest.mark.parametrize("name", NAMES)
def test_every_switch_is_set_by_some_framework(name: str) -> None:
    default = Switches.model_fields[name].default

    def values(law: Framework) -> list[object]:
        return [getattr(found, name) for found in (law.switches, *law.task_switches.values())]

    assert any(value != default for law in frameworks().values() for value in values(law))


@pytest.mark.parametrize("name", NAMES)
def test_every_switch_is_described(name: str) -> None:
    body = ast.parse(inspect.getsource(Switches)).body[0].body  # type: ignore[attr-defined]
    described = {
        statement.target.id
        for statement, following in pairwise(body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }
    assert name in described


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ({"kbit_upcst": "all"}, "kbit_upcst: unknown key", "did you mean kbit_upcast?"),
        ({"kbit_upcast": True}, "kbit_upcast: True is not allowed", "'none', 'norms' or 'all'"),
        ({"reentrant": "yes"}, "reentrant: 'yes' is not allowed", "valid boolean"),
        ({"saved_input": "2"}, "saved_input: '2' is not allowed", "valid integer"),
        ({"saved_input": 16}, "saved_input: 16 is not allowed", "less than or equal to 8"),
        ({"fused": ["rmsnorn"]}, "rmsnorn", "'rmsnorm', 'swiglu', 'rope', 'lora' or 'qlora'"),
        ({"transformers": "4.x"}, "transformers: '4.x' is not allowed", "pattern"),
    ],
)
def test_a_wrong_switch_is_one_line(row: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        validate(Switches, json.loads(json.dumps(row)), label="data/frameworks/x.json: switches")
    assert caught.value.message.startswith("data/frameworks/x.json: switches: ")
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert hint in (caught.value.hint or "")
