"""House-keeping: the licence, the commit hooks, the files that data cites."""

import json
import re
from pathlib import Path

import pytest
import yaml

from planner.errors import UsageError
from planner.machines.machine import gpu_catalogue, make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.run.recipe import RUN_FILE_VERSION, Recipe
from planner.run.runfile import load_run_file

ROOT = Path(__file__).parents[1]


def test_commit_hooks_are_the_checks_of_lint():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = makefile[makefile.index("\nlint:") :].split("\n\n")[0].replace("$(BIN)", ".venv/bin")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repo,) = hooks["repos"]
    assert repo["repo"] == "local"
    entries = {hook["id"]: hook["entry"] for hook in repo["hooks"]}
    for name in ("ruff-check", "ruff-format", "mypy"):
        assert entries[name] in lint, name


def test_the_licence_is_the_one_the_package_names():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_gpu_rows_cite_files_that_are_here():
    for file in (ROOT / "data" / "gpus").glob("*.json"):
        for row in json.loads(file.read_text(encoding="utf-8")):
            for text in (row.get("notes", ""), *row.get("source", {}).values()):
                for name in re.findall(r"[\w/.-]+\.csv", text):
                    ours = name.startswith("data/")
                    assert not ours or (ROOT / name).is_file(), (row["id"], name)
                    assert ours or "/" in name, (row["id"], name)  # else another repository's


def test_a_total_that_nobody_read_says_so():
    guesses = re.compile(
        r"^(driver_total - |memory$|not read for|general knowledge|the (reading|total) of)"
    )
    for gpu in gpu_catalogue().values():
        if gpu.torch_total_bytes and guesses.match(gpu.source["torch_total_mib"]):
            assert gpu.torch_total_basis == "derived", gpu.id


@pytest.mark.parametrize(("card", "said"), [("rtx-3070", True), ("rtx-4090", False)])
def test_a_plan_on_a_derived_total_says_so(card, said):
    result = plan(find_model("qwen3-0.6b"), Recipe(context=512), make_machine(card))
    assert any("derived for this card" in note for note in result.assumptions) is said
    stated = plan(find_model("qwen3-0.6b"), Recipe(context=512), make_machine(card, vram="7GiB"))
    assert not any("derived for this card" in note for note in stated.assumptions)


def test_a_run_file_of_a_later_release_is_refused_by_name(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"schema_version: {RUN_FILE_VERSION + 1}\nmodel: llama-3.1-8b\n")
    with pytest.raises(UsageError, match="schema_version: 2 is not allowed"):
        load_run_file(path)
    path.write_text("model: llama-3.1-8b\n")  # 0.1 wrote it without, too
    assert load_run_file(path).schema_version == RUN_FILE_VERSION
