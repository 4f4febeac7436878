"""docs/scale.md says what its commands print: every row of its tables is run."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from planner.answers.layouts import layouts
from planner.run.runfile import make_recipe
from planner.units import format_bytes
from planner.verbs.options import describe

TEXT = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^vramwise (plan .+)$", TEXT, flags=re.MULTILINE)


def rows(heading: str) -> list[list[str]]:
    """Return the cells below a header whose second column is `heading`."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split(" | ")[1:2] == [heading])
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return found


def planned(capsys: pytest.CaptureFixture[str], command: str, flags: str) -> dict[str, Any]:
    main([*shlex.split(f"{command} {flags}"), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def size(document: dict[str, Any], phase: str, name: str) -> int:
    found = next(each for each in document["phases"] if each["name"] == phase)
    return sum(term["bytes"] for term in found["terms"] if term["name"] == name)


ONE_JOB, STAGES, LAYOUTS = rows("weights at rest"), rows("kinds of rank"), rows("first layout")


@pytest.mark.parametrize("row", ONE_JOB, ids=lambda row: row[0])
def test_one_job_on_more_and_more_gpus(capsys: pytest.CaptureFixture[str], row: list[str]) -> None:
    found = planned(capsys, COMMANDS[0], row[0])
    rest = size(found, "load", "weights")
    assert row[1:] == [
        format_bytes(rest),
        format_bytes(size(found, "forward", "weights") - rest),
        format_bytes(size(found, "backward", "gradients")),
        format_bytes(size(found, "backward", "communication")),
        format_bytes(size(found, "forward", "optimizer")),
        f"{format_bytes(found['peak_bytes'])} in {found['peak_phase']}",
        format_bytes(sum(group["typical_bytes"] for group in found["groups"])),
    ]


@pytest.mark.parametrize("row", STAGES, ids=lambda row: row[0])
def test_the_fullest_stage(capsys: pytest.CaptureFixture[str], row: list[str]) -> None:
    found = planned(capsys, COMMANDS[1], row[0])
    fullest = max(found["ranks"], key=lambda kind: kind["peak_bytes"])
    assert row[1:] == [
        str(len(found["ranks"])),
        fullest["role"],
        format_bytes(fullest["peak_bytes"]),
        format_bytes(found["ranks"][-1]["peak_bytes"]),
        str(len(found["groups"])),
        found["verdict"],
    ]


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row[0])
def test_the_first_layout_of_four_runs(row: list[str]) -> None:
    words = shlex.split(row[0].removeprefix("advise "))
    flags = dict(zip((word.removeprefix("--") for word in words[1::2]), words[2::2], strict=True))
    recipe = make_recipe(
        task="sft", method=flags["method"], framework=flags["framework"],
        context=int(flags["context"]), micro_batch_size=1,
    )  # fmt: skip
    machine = {"gpu": flags["gpu"], "gpus": int(flags["gpus"]), "offline": True}
    described = describe(words[0], machine)
    first = layouts(described.model, recipe, described.machine, fitting=1)[0]
    assert first.plan is not None
    assert row[1:] == [first.words, format_bytes(first.plan.peak_bytes)]
