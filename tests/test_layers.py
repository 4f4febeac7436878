"""Imports go one way, and the light parts stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("planner", "profiler", "trainer", "app")
HEAVY = ("torch", "transformers", "vllm", "streamlit", "pandas", "plotly", "peft", "datasets")


def _imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("position", range(4), ids=PACKAGES)
def test_no_package_imports_one_above_it(position):
    above = set(PACKAGES[position + 1 :])
    wrong = {
        str(path.relative_to(ROOT)): sorted(_imported_packages(path) & above)
        for path in (ROOT / PACKAGES[position]).rglob("*.py")
        if _imported_packages(path) & above
    }
    assert not wrong


def test_no_file_of_the_planner_imports_torch():
    wrong = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "planner").rglob("*.py")
        if _imported_packages(path) & {"torch", "transformers", "vllm", "peft"}
    ]
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "import planner.plan, planner.answers.advise, planner.models.hub, planner.accuracy",
        "from app.cli import main; main(['--help'])",
        "from app.cli import main; main(['plan', 'llama-3.1-8b', '--gpu', 'h100', '--json'])",
    ],
    ids=["planner", "help", "plan"],
)
def test_heavy_packages_stay_out(code):
    check = f"import sys; {code}; print('HEAVY', sorted(set({HEAVY!r}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "HEAVY []" in result.stdout.splitlines()[-1]
