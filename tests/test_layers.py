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


def _modules():
    """Return every module of the four packages by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path, known):
    """Return the modules a file imports anywhere at run time, inside functions too."""
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found & set(known)


MODULES = _modules()
GRAPH = {name: _imports(path, MODULES) for name, path in MODULES.items()}


def test_no_modules_import_each_other_in_a_circle():
    from graphlib import CycleError, TopologicalSorter

    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' <- '.join(error.args[1])}")


def test_the_planner_imports_nothing_by_a_name_in_a_string():
    """import_module hides an arrow; the registries load their own rooms."""
    allowed = {"planner.mixers.registry", "planner.families"}
    hidden = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and name.startswith("planner")
        and name not in allowed
    }
    assert hidden == set()


ROOMS = (
    (
        *("planner", "planner.errors", "planner.units", "planner.dtypes", "planner.datafiles"),
        "planner.names",
    ),
    ("planner.models.spec", "planner.models.quantization", "planner.models.vision_spec"),
    ("planner.quant",),
    (
        "planner.layer.tape",
        "planner.layer.attention",
        "planner.layer.dora",
        "planner.layer.program",
    ),
    ("planner.mixers", "planner.families"),
    ("planner.models",),
    ("planner.layer", "planner.machines", "planner.allocator"),
    ("planner.run",),
    ("planner.terms",),
    ("planner.speed",),
    ("planner.phases",),
    ("planner.replay",),
    ("planner.reserved", "planner.risk"),
    ("planner.plan",),
    ("planner.report",),
    ("planner.answers", "planner.importers"),
    ("planner.exporters",),
    ("planner.doctor", "planner.accuracy"),
    ("planner.verbs",),
)
"""The planner from the ground up: a module imports its own row and those above it here, never below.

The longest name that fits decides where a module belongs.
"""


def _row(module):
    for length in range(module.count(".") + 1, 0, -1):
        name = ".".join(module.split(".")[:length])
        for number, row in enumerate(ROOMS):
            # a bare "planner" is the package file, not every module in it
            if name in row and (name != "planner" or module == "planner"):
                return number
    return pytest.fail(f"{module} is in no room of tests/test_layers.py")


def test_rooms_of_the_planner_import_downwards():
    wrong = [
        f"{name} -> {target}"
        for name, targets in GRAPH.items()
        for target in targets
        if name.startswith("planner") and _row(target) > _row(name)
    ]
    assert wrong == []
