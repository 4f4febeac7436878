"""Every flag that a hint names is one of ours, of the verb that it names where it names one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from app.cli import app

ROOT = Path(__file__).parents[1]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
COMMAND = re.compile(r"vramwise ([a-z]+)((?: (?!and |or )[^\s;,:]+)*)")
OTHERS = {
    "--no-deps": "pip",
    "--nproc-per-node": "torchrun",
    "--master-port": "torchrun",
    "--standalone": "torchrun",
}
"""Flags of other tools that hints tell people to give to those, by name."""


def _options() -> dict[str, set[str]]:
    """Return verb -> its flags."""
    found: dict[str, set[str]] = {}

    def add(name: str, command: object) -> None:
        inner = getattr(command, "commands", None)
        if inner:
            for other, each in inner.items():
                add(name or other, each)
            return
        options = {
            opt
            for parameter in command.params  # type: ignore[attr-defined]
            for opt in (*parameter.opts, *parameter.secondary_opts)
        }
        found[name] = found.get(name, set()) | options | {"--help"}

    add("", typer.main.get_command(app))
    return found


def _hints() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of every hint written in the code; what a hint fills in is "X"."""
    for part in ("planner", "profiler", "trainer", "app"):
        for path in sorted((ROOT / part).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.keyword) or node.arg != "hint":
                    continue
                for text in _texts(node.value):
                    yield f"{path.relative_to(ROOT)}:{node.value.lineno}", text


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(each.value if isinstance(each, ast.Constant) else "X" for each in node.values)
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.BinOp):
        yield from _texts(node.left)
        yield from _texts(node.right)


def test_flags_in_hints_exist() -> None:
    options = _options()
    every = set().union(*options.values())
    wrong, seen = [], 0
    for place, text in _hints():
        rest = text
        for command in COMMAND.finditer(text):
            verb, words = command.group(1), command.group(2)
            if verb not in options:
                continue  # a sentence about vramwise
            rest = rest.replace(words, "")
            for flag in FLAG.findall(words):
                seen += 1
                if flag not in options[verb]:
                    wrong.append(f"{place}: vramwise {verb} {flag}")
        for flag in FLAG.findall(rest):
            seen += 1
            if flag not in every and OTHERS.get(flag, "none") not in text:
                wrong.append(f"{place}: {flag}")
    assert wrong == []
    assert seen > 50


@pytest.mark.parametrize(("text", "flags"), [("then --gpu h100 or x--y", ["--gpu"])])
def test_what_is_a_flag(text: str, flags: list[str]) -> None:
    assert FLAG.findall(text) == flags
