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


DEVICE_COUNT = "torch.cuda.device_count()"


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
    names: dict[str, Any] = field(default_factory=dict)
    """Names that were assigned, by their last constant value."""

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


def read_calls(source: str, *, gpus: int | None = None) -> Calls:
    """Return the calls of a Python source; raises UsageError when it is not Python.

    `gpus` is what torch.cuda.device_count() gives. Options have their declared defaults: argparse's
    add_argument, click's option, fields of classes, parameters of functions, os.environ.get.
    """
    if len(source) > MAX_SOURCE:
        raise UsageError("python: the source is larger than 4 MiB")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(
            f"python: {getattr(error, 'msg', 'cannot be read')} in line {getattr(error, 'lineno', '?')}"
        ) from None
    reader = _Reader()
    reader.names[DEVICE_COUNT] = gpus if gpus is not None else UNKNOWN
    try:
        reader.visit(tree)
    except RecursionError:
        raise UsageError("python: nested too deeply") from None
    calls = reader.calls
    calls.names = {
        key: value for key, value in reader.names.items() if not key.startswith((".", DEVICE_COUNT))
    }
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
        if name.rsplit(".", 1)[-1] in ("add_argument", "option"):
            self._option(node, keywords)
        self.calls.by_name.setdefault(name, []).append(keywords)

    def _option(self, node: ast.Call, keywords: dict[str, Any]) -> None:
        """Remember what `args.NAME` is where the command line does not say."""
        words = [_fold(arg, self.names) for arg in node.args]
        long = [word for word in words if isinstance(word, str)]
        if not long:
            return
        wanted = next((word for word in long if word.startswith("--")), long[0])
        name = keywords.get("dest", wanted.lstrip("-").replace("-", "_"))
        if "default" in keywords:
            self.names[f".{name}"] = keywords["default"]
        elif keywords.get("action") == "store_true":
            self.names[f".{name}"] = False

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Remember the defaults of a class's fields: option classes of HfArgumentParser, configs."""
        for statement in node.body:
            value = getattr(statement, "value", None)
            if not isinstance(statement, (ast.AnnAssign, ast.Assign)) or value is None:
                continue
            target = (
                statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            )
            if not isinstance(target, ast.Name):
                continue
            if isinstance(value, ast.Call) and _dotted(value.func).endswith(("field", "Field")):
                value = next((each.value for each in value.keywords if each.arg == "default"), None)
            if value is not None:
                self.names[f".{target.id}"] = _fold(value, self.names)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Take parameters at their defaults, as fire and click start a function."""
        arguments = [*node.args.posonlyargs, *node.args.args]
        defaults = node.args.defaults
        pairs = list(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
        pairs += [
            (name, value)
            for name, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if value is not None
        ]
        for argument, value in pairs:
            if (found := _fold(value, self.names)) is not UNKNOWN:
                self.names.setdefault(argument.arg, found)
        self.generic_visit(node)


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
        if dotted.startswith("torch."):
            return dotted
        return names.get(f".{node.attr}", UNKNOWN) if isinstance(node.value, ast.Name) else UNKNOWN
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [_fold(item, names) for item in node.elts[:10_000]]
    if isinstance(node, ast.Dict):
        return {
            str(_fold(key, names)): _fold(value, names)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        value = _fold(node.operand, names)
        if isinstance(node.op, ast.Not):
            return value if value is UNKNOWN else not value
        return -value if isinstance(value, (int, float)) else UNKNOWN
    if isinstance(node, ast.BinOp):
        return _operate(node, names)
    if isinstance(node, ast.IfExp):
        test = _fold(node.test, names)
        return UNKNOWN if test is UNKNOWN else _fold(node.body if test else node.orelse, names)
    if isinstance(node, ast.Subscript):
        whole, key = _fold(node.value, names), _fold(node.slice, names)
        return (
            whole.get(key, UNKNOWN) if isinstance(whole, dict) and isinstance(key, str) else UNKNOWN
        )
    if isinstance(node, ast.JoinedStr):
        parts = [
            _fold(part.value if isinstance(part, ast.FormattedValue) else part, names)
            for part in node.values
        ]
        known = all(isinstance(part, (str, int, float)) for part in parts)
        return "".join(map(str, parts))[:1000] if known else UNKNOWN
    return _fold_call(node, names) if isinstance(node, ast.Call) else UNKNOWN


def _fold_call(node: ast.Call, names: dict[str, Any]) -> Any:
    """Return what dict(...), getattr(torch, ...), os.environ.get and number casts give."""
    name = _dotted(node.func)
    if name == "dict":
        return {
            keyword.arg: _fold(keyword.value, names) for keyword in node.keywords if keyword.arg
        }
    if name == "torch.cuda.device_count":
        return names.get(DEVICE_COUNT, UNKNOWN)
    if name.endswith(("is_bf16_supported", "is_bfloat16_supported")):
        return True  # of the same width as the fp16 that older cards take
    given = [_fold(each, names) for each in node.args]
    if name == "getattr" and len(given) >= 2 and isinstance(given[1], str):
        base = _dotted(node.args[0])
        if base == "torch":
            return f"torch.{given[1]}"
        return names.get(f".{given[1]}", given[2] if len(given) > 2 else UNKNOWN)
    if name.endswith(("environ.get", "getenv")) and len(given) == 2:
        return given[1]
    if name in ("int", "float", "str", "bool") and len(given) == 1:
        return _cast(name, given[0])
    return UNKNOWN


def _cast(name: str, value: Any) -> Any:
    if not isinstance(value, (int, float, str)):
        return UNKNOWN
    try:
        return {"int": int, "float": float, "str": str, "bool": bool}[name](value)
    except (ValueError, OverflowError):
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
