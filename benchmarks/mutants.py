"""Do the tests bite? Plants small errors in the memory model, one at a time, and runs the fast tests.

    python -m benchmarks.mutants [--count 300] [--seed 0] [--workers 2] [--json FILE] [--only TEXT]

A mutant is one change of one place: a constant x1.5 or x0, an operator swapped, min for max, a term
left out of a phase or a sum. Places are sampled by a seeded generator from the files whose
arithmetic becomes bytes; PLANTED lists errors that earlier tests let pass, and is always run. A
mutant that no test notices survives, is listed, and needs a test or a line in EXPLAINED.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = (
    "planner/terms",
    "planner/mixers",
    "planner/layer",
    "planner/allocator",
    "planner/run/placement.py",
    "planner/phases.py",
    "planner/reserved.py",
    "planner/plan.py",
    "planner/doctor/state.py",
    "planner/doctor/serving.py",
    "planner/doctor/budget.py",
)
FAST_TESTS = (
    "tests/planner/test_hand_terms.py",
    "tests/planner/test_hand_engine.py",
    "tests/planner/test_hand_layers.py",
    "tests/planner/test_vllm_law.py",
    "tests/planner/test_placement.py",
    "tests/planner/test_mixers.py",
    "tests/planner/test_allocator.py",
    "tests/planner/test_replay.py",
    "tests/planner/test_reserved.py",
    "tests/planner/test_tape.py",
    "tests/planner/test_engine_terms.py",
    "tests/planner/test_vllm_blocks.py",
    "tests/planner/test_plan_cases.py",
    "tests/planner/test_plan_properties.py",
    "tests/planner/test_doctor_state.py",
    "tests/planner/test_doctor_serving.py",
)
"""Most telling first: the first failure ends a mutant."""
LIMIT_S = 240
SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
EXPLAINED: dict[str, str] = {}
"""Mutant -> why no test can or should notice it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one place."""

    file: str
    line: int
    change: str
    source: str
    """The whole mutated file."""

    @property
    def name(self) -> str:
        """Return file:line and the change."""
        return f"{self.file}:{self.line} {self.change}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests made of a mutant."""

    name: str
    killed: bool
    by: str
    seconds: float


def main() -> int:
    """Run the mutants; 1 when more than 3% survive without an explanation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    options = parser.parse_args()
    chosen = [m for m in sample(options.count, options.seed) if options.only in m.name]
    tests = [name for name in FAST_TESTS if (ROOT / name).exists()]
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.workers) as pool:
        for job in as_completed([pool.submit(run_mutant, mutant, tests) for mutant in chosen]):
            outcome = job.result()
            outcomes.append(outcome)
            mark = "killed" if outcome.killed else "SURVIVED"
            print(
                f"{len(outcomes):4}/{len(chosen)} {mark:8} {outcome.name}  {outcome.by}", flush=True
            )
    survivors = [item for item in outcomes if not item.killed]
    unexplained = [item for item in survivors if item.name not in EXPLAINED]
    print(
        f"{len(outcomes)} mutants, {len(survivors)} survived, {len(unexplained)} of them unexplained"
    )
    if options.json:
        rows = [asdict(item) for item in outcomes]
        options.json.write_text(json.dumps({"schema_version": 1, "mutants": rows}, indent=1))
    return int(len(unexplained) > 0.03 * max(1, len(outcomes)))


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


def file_mutants(file: str, text: str) -> Iterator[Mutant]:
    """Yield every mutant of one file."""
    for start, end, line, new, change in _edits(ast.parse(text), text):
        yield Mutant(file, line, change, text[:start] + new + text[end:])


def _edits(tree: ast.Module, text: str) -> Iterator[tuple[int, int, int, str, str]]:
    """Yield (start, end, line, replacement, description) of every change."""
    lines = [0]
    for row in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(row.encode()))
    raw = text.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        first = lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        last = lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return len(raw[:first].decode()), len(raw[:last].decode())

    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for part in ast.walk(node):
                part.skip = True  # type: ignore[attr-defined]
        if getattr(node, "skip", False):
            continue
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value:
            start, end = span(node)
            for factor, word in ((1.5, "x1.5"), (0, "x0")):
                value = type(node.value)(node.value * factor)
                if value != node.value:
                    yield start, end, node.lineno, repr(value), f"{node.value} {word}"
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            left, right = (
                ast.get_source_segment(text, node.left),
                ast.get_source_segment(text, node.right),
            )
            if left is None or right is None or isinstance(node.left, ast.JoinedStr):
                continue
            start, end = span(node)
            swapped = ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))
            name = type(node.op).__name__
            yield (
                start,
                end,
                node.lineno,
                f"({swapped})",
                f"{name} swapped in {_short(text[start:end])}",
            )
            if isinstance(node.op, ast.Add):
                yield start, end, node.lineno, f"({left})", f"dropped + {_short(right)}"
        elif isinstance(node, ast.Call):
            yield from _call_edits(node, text, span)


def _call_edits(
    node: ast.Call, text: str, span: object
) -> Iterator[tuple[int, int, int, str, str]]:
    """Yield min for max and phases that lack one of their terms."""
    start, end = span(node)  # type: ignore[operator]
    if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        other = "min" if node.func.id == "max" else "max"
        new = other + text[start + 3 : end]
        yield (
            start,
            end,
            node.lineno,
            new,
            f"{node.func.id} -> {other} in {_short(text[start:end])}",
        )
    if isinstance(node.func, ast.Name) and node.func.id == "_phase":
        for index in range(1, len(node.args)):
            kept = [arg for at, arg in enumerate(node.args) if at != index]
            new = ast.unparse(ast.Call(node.func, kept, node.keywords))
            dropped = _short(ast.unparse(node.args[index]))
            yield start, end, node.lineno, new, f"term dropped: {dropped}"


def _short(text: str) -> str:
    return " ".join(text.split())[:50]


PLANTED: tuple[tuple[str, str, str, str], ...] = ()
"""(name, file, text, replacement): errors that passed the tests of the first release."""


def planted() -> Iterator[Mutant]:
    """Yield the planted errors; one whose text is gone stops the run: renew it."""
    for name, file, old, new in PLANTED:
        text = (ROOT / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(
                f"planted error {name!r}: {file} has {text.count(old)} places of {old!r}"
            )
        line = text[: text.index(old)].count("\n") + 1
        yield Mutant(file, line, f"planted: {name}", text.replace(old, new))


def run_mutant(mutant: Mutant, tests: list[str]) -> Outcome:
    """Run the fast tests over a copy of the planner in which one file is the mutant's."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for entry in ROOT.iterdir():
            if entry.name not in {"planner", ".git", ".venv"}:
                (tree / entry.name).symlink_to(entry)
        shutil.copytree(
            ROOT / "planner", tree / "planner", ignore=shutil.ignore_patterns("__pycache__")
        )
        (tree / mutant.file).write_text(mutant.source, encoding="utf-8")
        killed, by = _pytest(tree, tests)
    return Outcome(mutant.name, killed, by, round(time.monotonic() - started_s, 1))


def _pytest(tree: Path, tests: list[str]) -> tuple[bool, str]:
    """Return whether a test failed in `tree`, and which."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=LIMIT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return True, "time limit"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M)
    return done.returncode != 0, found[1] if found else done.stdout[-80:].strip()


if __name__ == "__main__":
    sys.exit(main())
