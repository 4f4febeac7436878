"""Keyword arguments of calls in Python source, by AST and constant folding; nothing is executed."""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.errors import UsageError

MAX_SOURCE = 4 * 1024 * 1024
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


class _Unknown:
    """A value that only running the program would give."""

    def __repr__(self) -> str:
        return "<not constant>"


UNKNOWN = _Unknown()


@dataclass
class Calls:
    """Every call by dotted name: {"SFTConfig": [{keyword: value}]}; values folded where constant."""

    by_name: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    comments: str = ""

    def last(self, *names: str) -> dict[str, Any] | None:
        """Return the keywords of the last call whose dotted name ends with one of `names`."""
        found = None
        for name, calls in self.by_name.items():
            if any(name == wanted or name.endswith(f".{wanted}") for wanted in names):
                found = calls[-1]
        return found

    def first(self, *names: str) -> dict[str, Any] | None:
        """Return the keywords of the first call of those names: later ones load what was trained."""
        for name, calls in self.by_name.items():
            if any(name == wanted or name.endswith(f".{wanted}") for wanted in names):
                return calls[0]
        return None

    def has(self, *names: str) -> bool:
        """Return whether such a call is made."""
        return self.last(*names) is not None


def read_calls(source: str) -> Calls:
    """Return the calls of a Python source; raises UsageError when it is not Python."""
    if len(source) > MAX_SOURCE:
        raise UsageError("python: the source is larger than 4 MiB")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(
            f"python: {getattr(error, 'msg', 'cannot be read')} in line {getattr(error, 'lineno', '?')}"
        ) from None
    reader = _Reader()
    try:
        reader.visit(tree)
    except RecursionError:
        raise UsageError("python: nested too deeply") from None
    calls = reader.calls
    calls.comments = "\n".join(line for line in source.split("\n") if line.lstrip().startswith("#"))
    return calls


def fold_constant(expression: str) -> Any:
    """Return the value of a constant arithmetic expression, or UNKNOWN."""
    try:
        return _fold(ast.parse(expression, mode="eval").body, {})
    except (SyntaxError, ValueError, RecursionError):
        return UNKNOWN


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.calls = Calls()

    def visit_If(self, node: ast.If) -> None:
        """Skip what a literal False switches off (examples of later use in notebooks)."""
        if isinstance(node.test, ast.Constant) and not node.test.value:
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Remember constants by name."""
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = _fold(node.value, self.names)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Remember annotated constants."""
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and node.value is not None:
            self.names[node.target.id] = _fold(node.value, self.names)

    def visit_Call(self, node: ast.Call) -> None:
        """Collect the call's keywords."""
        self.generic_visit(node)
        name = _dotted(node.func)
        if not name:
            return
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = _fold(keyword.value, self.names)
            if keyword.arg is None:
                if isinstance(value, dict):
                    keywords.update({str(key): item for key, item in value.items()})
            else:
                keywords[keyword.arg] = value
        if node.args:
            keywords["*0"] = _fold(node.args[0], self.names)
        self.calls.by_name.setdefault(name, []).append(keywords)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else node.attr
    return ""


def _fold(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        dotted = _dotted(node)
        return dotted if dotted.startswith("torch.") else UNKNOWN
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [_fold(item, names) for item in node.elts[:10_000]]
    if isinstance(node, ast.Dict):
        return {
            str(_fold(key, names)): _fold(value, names)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _fold(node.operand, names)
        return -value if isinstance(value, (int, float)) else UNKNOWN
    if isinstance(node, ast.BinOp):
        return _operate(node, names)
    if isinstance(node, ast.Call) and _dotted(node.func) == "dict":
        return {
            keyword.arg: _fold(keyword.value, names) for keyword in node.keywords if keyword.arg
        }
    return UNKNOWN


def _operate(node: ast.BinOp, names: dict[str, Any]) -> Any:
    left, right = _fold(node.left, names), _fold(node.right, names)
    action = _OPERATIONS.get(type(node.op))
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    texts = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
    if action is None or not (numbers or texts):
        return UNKNOWN
    try:
        return action(left, right)
    except (ArithmeticError, ValueError):
        return UNKNOWN
