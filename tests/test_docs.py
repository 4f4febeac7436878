"""The documentation says what the code does: help texts, the tree, the README's output and commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.write_docs import (
    PICTURE,
    TREE_PAGE,
    TRL_PAGE,
    VERBS,
    accuracy_sentence,
    cli_page,
    readme_picture,
    tree_page,
    trl_page,
)

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_verb_is_documented():
    from app.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    assert names == {verb[0] for verb in VERBS}


def test_the_readmes_picture_is_of_its_example():
    assert PICTURE.read_text(encoding="utf-8") == readme_picture(), "run: make docs"


def test_trl_page_is_what_the_table_says():
    assert TRL_PAGE.read_text(encoding="utf-8") == trl_page(), "run: make docs"


def test_cli_page_is_what_the_commands_say():
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == cli_page(), "run: make docs"


def test_tree_page_is_what_the_modules_say():
    assert TREE_PAGE.read_text(encoding="utf-8") == tree_page(), "run: make docs"


def test_every_module_says_what_it_is():
    silent = [line for line in tree_page().splitlines() if line.endswith(".py")]
    assert not silent


def test_readme_claims_the_accuracy_of_today():
    assert accuracy_sentence() in README, "run: make docs"


def test_readme_python_gives_what_it_shows():
    code = re.search(r"```python\n(.+?)```", README, flags=re.S).group(1)
    expected = re.findall(r"^print\(.+\)  # (.+)$", code, flags=re.M)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert expected
    assert result.stdout.split("\n")[:-1] == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for path in re.findall(
        r"`((?:planner|profiler|trainer|app|tests|benchmarks|docs|data)/[\w./-]+)`", text
    ):
        assert (ROOT / path).exists(), path


def test_no_machine_paths_are_committed():
    names = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.split()
    forbidden = ("/" + "work/", "/" + "root/", "/opt/" + "wheels", "/opt/" + "pypi")
    for name in names:
        path = ROOT / name
        if path.suffix in {".png", ".gz", ".pickle", ".parquet"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not [word for word in forbidden if word in text], name
