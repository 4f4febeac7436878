"""Do the tests bite? Plants small errors in the memory model, one at a time, and runs the fast tests.

    python -m benchmarks.mutants [--count 300] [--seed 0] [--workers 2] [--json FILE] [--only TEXT]

A mutant is one change of one place: a constant x1.5 or x0, an operator swapped, min for max, a term
left out of a phase or a sum. Places are sampled by a seeded generator from the files whose
arithmetic becomes bytes; PLANTED lists errors that earlier tests let pass, and is always run. A
mutant that no test notices survives, is listed, and needs a test or a line in EXPLAINED. Each runs
in a fork of this process, which imports the mutant's text in place of its module.
"""

import argparse
import ast
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from benchmarks.planted import EXPLAINED, PLANTED

ROOT = Path(__file__).parents[1]
TARGETS = (
    "planner/terms",
    "planner/mixers",
    "planner/layer",
    "planner/allocator",
    "planner/run/placement.py",
    "planner/run/engine_law.py",
    "planner/machines/vllm_overheads.py",
    "planner/replay",
    "planner/quant",
    "planner/phases.py",
    "planner/reserved.py",
    "planner/plan.py",
    "planner/doctor/state.py",
    "planner/doctor/serving.py",
    "planner/doctor/budget.py",
)
FAST_TESTS = (
    "tests/planner/test_hand_terms.py",
    "tests/planner/test_hand_logits.py",
    "tests/planner/test_hand_ops.py",
    "tests/planner/test_hand_trace.py",
    "tests/planner/test_hand_layers.py",
    "tests/planner/test_hand_moments.py",
    "tests/planner/test_hand_phases.py",
    "tests/planner/test_hand_engine.py",
    "tests/planner/test_hand_cache.py",
    "tests/planner/test_hand_vllm.py",
    "tests/planner/test_hand_pages.py",
    "tests/planner/test_vllm_law.py",
    "tests/planner/test_vllm_blocks.py",
    "tests/planner/test_engine_terms.py",
    "tests/planner/test_doctor_serving.py",
    "tests/planner/test_doctor_state.py",
    "tests/planner/test_placement.py",
    "tests/planner/test_mixers.py",
    "tests/planner/test_allocator.py",
    "tests/planner/test_hand_replay.py",
    "tests/planner/test_hand_head.py",
    "tests/planner/test_hand_allocator.py",
    "tests/planner/test_hand_doctor.py",
    "tests/planner/test_hand_fsdp2.py",
    "tests/planner/test_hand_host.py",
    "tests/planner/test_hand_ddp.py",
    "tests/planner/test_hand_zero.py",
    "tests/planner/test_hand_megatron.py",
    "tests/planner/test_hand_sync.py",
    "tests/planner/test_hand_outside.py",
    "tests/planner/test_checkpoint_quantization.py",
    "tests/planner/test_vision.py",
    "tests/planner/test_tape.py",
    "tests/planner/test_replay.py",
    "tests/planner/test_reserved.py",
    "tests/planner/test_plan_cases.py",
)
"""Most telling first: the first failure ends a mutant."""
TELLING = (
    ("planner/allocator", "test_allocator"),
    ("planner/replay/head", "test_hand_head"),
    ("planner/replay", "test_hand_replay"),
    ("planner/doctor/budget", "test_hand_doctor"),
    ("planner/doctor/serving", "test_doctor_serving"),
    ("planner/doctor/state", "test_doctor_state"),
    ("planner/terms/vllm_blocks", "test_hand_pages"),
    ("planner/terms/vllm", "test_hand_vllm"),
    ("planner/run/engine_law", "test_hand_vllm"),
    ("planner/machines/vllm", "test_vllm_law"),
    ("planner/terms/engine", "test_hand_engine"),
    ("planner/terms/logits", "test_hand_logits"),
    ("planner/terms/activations", "test_hand_moments"),
    ("planner/quant", "test_checkpoint_quantization"),
    ("planner/terms/host", "test_hand_host"),
    ("planner/terms/vision", "test_vision"),
    ("planner/terms/kv_cache", "test_hand_cache"),
    ("planner/terms/generation", "test_hand_cache"),
    ("planner/terms", "test_hand_terms"),
    ("planner/run/placement", "test_hand_terms"),
    ("planner/layer/program", "test_hand_ops"),
    ("planner/layer/tape", "test_tape"),
    ("planner/layer", "test_hand_layers"),
    ("planner/mixers", "test_hand_trace"),
    ("planner/reserved", "test_reserved"),
    ("planner", "test_hand_phases"),
)
"""(file, the test that is the most likely to notice): it runs first, alone."""
LIMIT_S = 300
LIMIT_BYTES = 4 * 2**30
"""Of address space: a mutant may loop and take memory for ever."""
SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
WORDS = ("to_dict", "text", "formula", "why", "__format__", "_words", "_not_modeled")
"""Functions that only put figures into words."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one place."""

    file: str
    line: int
    change: str
    code: str
    """The line that is changed."""
    source: str
    """The whole mutated file."""

    @property
    def key(self) -> str:
        """Return file, line's text and change: the name that stays when lines move."""
        return f"{self.file}: {self.code}: {self.change}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests made of a mutant."""

    key: str
    line: int
    killed: bool
    by: str
    seconds: float


def main() -> int:
    """Run the mutants; 1 when more than 3% survive, or one without an explanation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    options = parser.parse_args()
    chosen = [m for m in sample(options.count, options.seed) if options.only in m.key]
    tests = [name for name in FAST_TESTS if (ROOT / name).exists()]
    outcomes: list[Outcome] = []
    for outcome in run_all(chosen, tests, options.workers):
        outcomes.append(outcome)
        mark = "killed" if outcome.killed else "SURVIVED"
        print(
            f"{len(outcomes):4}/{len(chosen)} {mark:8} {outcome.line}: {outcome.key}  "
            f"[{outcome.by}, {outcome.seconds} s]",
            flush=True,
        )
    survivors = [item for item in outcomes if not item.killed]
    unexplained = [item for item in survivors if item.key not in EXPLAINED]
    for item in survivors:
        print(f"survived: {item.line}: {item.key}: {EXPLAINED.get(item.key, 'NOT EXPLAINED')}")
    print(
        f"{len(outcomes)} mutants, {len(survivors)} survived, {len(unexplained)} of them unexplained"
    )
    if options.json:
        rows = [asdict(item) for item in outcomes]
        options.json.write_text(json.dumps({"schema_version": 1, "mutants": rows}, indent=1))
    return int(bool(unexplained) or len(survivors) > 0.03 * max(1, len(outcomes)))


def sample(count: int, seed: int) -> list[Mutant]:
    """Return the planted errors and `count` less those, drawn from every place of the targets."""
    fixed = list(planted())
    places = list(all_mutants())
    drawn = random.Random(seed).sample(places, min(len(places), max(0, count - len(fixed))))
    return fixed + drawn


def target_files() -> list[Path]:
    """Return the files that are mutated."""
    found: list[Path] = []
    for name in TARGETS:
        path = ROOT / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []
    return [path for path in found if path.name != "__init__.py"]


def all_mutants() -> Iterator[Mutant]:
    """Yield every mutant of every target."""
    for path in target_files():
        text = path.read_text(encoding="utf-8")
        yield from file_mutants(str(path.relative_to(ROOT)), text)


Span = Callable[[ast.AST], tuple[int, int]]
Edit = tuple[int, int, str, str]
"""(start, end, replacement, description)."""


def file_mutants(file: str, text: str) -> Iterator[Mutant]:
    """Yield every mutant of one file."""
    starts, raw = [0], text.encode()
    for row in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))

    def span(node: ast.AST) -> tuple[int, int]:
        first = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        last = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return len(raw[:first].decode()), len(raw[:last].decode())

    for node in _arithmetic(ast.parse(text)):
        for start, end, new, change in _edits(node, text, span):
            line = text[:start].count("\n") + 1
            code = text.splitlines()[line - 1].strip()
            yield Mutant(file, line, change, code, text[:start] + new + text[end:])


def _arithmetic(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of code that computes: no f-strings, no to_dict or text methods."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.FunctionDef) and node.name in WORDS:
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def _edits(node: ast.AST, text: str, span: Span) -> Iterator[Edit]:
    """Yield every change of one node."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value:
        for factor, word in ((1.5, "x1.5"), (0, "x0")):
            value = type(node.value)(node.value * factor)  # type: ignore[operator]
            if value != node.value:
                yield (*span(node), repr(value), f"{node.value!r} {word}")
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not _joins_words(node):
        swapped = ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))
        name = type(node.op).__name__
        start, end = span(node)
        yield start, end, f"({swapped})", f"{name} swapped in {_short(text[start:end])}"
        if isinstance(node.op, ast.Add):
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            yield start, end, f"({left})", f"dropped + {_short(right)}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from _call_edits(node, node.func.id, text, span)


def _call_edits(node: ast.Call, name: str, text: str, span: Span) -> Iterator[Edit]:
    """Yield min for max and phases that lack one of their terms."""
    start, end = span(node)
    if name in ("min", "max"):
        other = "min" if name == "max" else "max"
        new = other + text[start + 3 : end]
        yield start, end, new, f"{name} -> {other} in {_short(text[start:end])}"
    if name == "_phase":
        for index in range(1, len(node.args)):
            kept = [arg for at, arg in enumerate(node.args) if at != index]
            new = ast.unparse(ast.Call(node.func, kept, node.keywords))
            yield start, end, new, f"term dropped: {_short(ast.unparse(node.args[index]))}"


def _joins_words(node: ast.BinOp) -> bool:
    """Return whether + puts words together."""
    parts = (node.left, node.right)
    return any(
        isinstance(inner, ast.JoinedStr)
        or (isinstance(inner, ast.Constant) and isinstance(inner.value, str))
        for part in parts
        for inner in ([part] if not isinstance(part, ast.IfExp) else [part.body, part.orelse])
    )


def _short(text: str) -> str:
    return " ".join(text.split())[:50]


def planted() -> Iterator[Mutant]:
    """Yield the planted errors; one whose text is gone stops the run: renew it."""
    for name, file, old, new in PLANTED:
        text = (ROOT / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(
                f"planted error {name!r}: {file} has {text.count(old)} places of {old!r}"
            )
        line = text[: text.index(old)].count("\n") + 1
        code = text.splitlines()[line - 1].strip()
        yield Mutant(file, line, f"planted: {name}", code, text.replace(old, new))


def run_all(mutants: list[Mutant], tests: list[str], workers: int) -> Iterator[Outcome]:
    """Run the fast tests on every mutant, `workers` at a time, each in a fork of this process."""
    import hypothesis  # noqa: F401  children find these loaded
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import yaml  # noqa: F401

    waiting, running = list(reversed(mutants)), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < workers:
                mutant = waiting.pop()
                answer = Path(folder) / str(len(waiting))
                child = os.fork()
                if not child:
                    _run_child(mutant, tests, answer)
                running[child] = (mutant, answer, time.monotonic())
            child, status = os.wait()
            mutant, answer, started_s = running.pop(child)
            by = answer.read_text() if answer.exists() else f"ended by signal {status & 127}"
            if os.waitstatus_to_exitcode(status) > 2:
                raise SystemExit(f"the tests did not run on {mutant.key}: {by}")
            seconds = round(time.monotonic() - started_s, 1)
            yield Outcome(mutant.key, mutant.line, status != 0, by, seconds)


class FirstFailure:
    """A pytest plugin that remembers what failed first."""

    name = ""

    def pytest_runtest_logreport(self, report: object) -> None:
        """Note a failed test."""
        if report.failed and not self.name:  # type: ignore[attr-defined]
            self.name = report.nodeid  # type: ignore[attr-defined]

    def pytest_collectreport(self, report: object) -> None:
        """Note a file that cannot even be imported."""
        self.pytest_runtest_logreport(report)


def _run_child(mutant: Mutant, tests: list[str], answer: Path) -> None:
    """Run the tests over the mutant and leave: 0 if none noticed."""
    code = 70
    try:
        signal.alarm(LIMIT_S)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        os.environ["OMP_NUM_THREADS"] = "1"
        os.chdir(ROOT)
        sys.meta_path.insert(0, Planted(mutant))
        import pytest

        first = FirstFailure()
        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        options += ["--noconftest", "--assert=plain"]
        name = next(test for file, test in TELLING if mutant.file.startswith(file))
        telling = [test for test in tests if Path(test).stem == name]
        rest = [test for test in tests if test not in telling]
        code = int(pytest.main([*options, *telling], plugins=[first])) if telling else 0
        code = code or int(pytest.main([*options, *rest], plugins=[first]))
        answer.write_text(first.name or f"pytest ended with {code}")
    finally:
        os._exit(code)


class Planted:
    """An importer that hands out a mutant's text as its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = mutant.file.removesuffix(".py").replace("/", ".")
        self.file = str(ROOT / mutant.file)
        self.source = mutant.source

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return a spec for the mutant's module alone."""
        if name != self.name:
            return None
        return importlib.util.spec_from_loader(name, self, origin=self.file)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the module's making to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the mutant's text."""
        exec(compile(self.source, self.file, "exec"), module.__dict__)


if __name__ == "__main__":
    sys.exit(main())
