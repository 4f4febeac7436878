"""A plan as files: an HTML page, CSV, Markdown, a picture, a badge."""

import csv
import io
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from app.cli import main
from planner.answers.smallest import sizes, smallest_gb
from planner.machines.machine import Machine, make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import plan
from planner.report.colours import TERM_COLOURS, VERDICT_COLOURS
from planner.report.page import page
from planner.report.picture import HEIGHT, WIDTH
from planner.report.svg import badge_label, badge_svg, picture_svg
from planner.report.tables import csv_text, markdown
from planner.run.runfile import make_recipe
from planner.terms.term import TERM_NAMES

RUN = "plan qwen2.5-7b --method qlora --context 8192 --gpu rtx-4090"
FOUND = plan(
    catalogue_model("qwen2.5-7b"),
    make_recipe(task="sft", method="qlora", context=8192),
    make_machine("rtx-4090"),
)


def test_one_command_writes_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("html", "csv", "markdown", "png", "badge")
    files = {kind: tmp_path / f"plan.{kind}" for kind in kinds}
    flags = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main([*shlex.split(RUN), *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(FOUND.verdict.upper())  # the answer is still printed
    assert printed.err.count("wrote ") == len(kinds)
    assert files["csv"].read_text() == csv_text(FOUND)
    assert files["markdown"].read_text() == markdown(FOUND)
    assert "fits 10 GB" in files["badge"].read_text()
    html = files["html"].read_text()
    assert picture_svg(FOUND) in html
    for said in ("What would lower it", "Time and cost", "method: qlora", "Every phase"):
        assert said in html


def test_csv_has_every_byte_of_every_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(RUN), "--csv", "-"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    for phase in FOUND.phases:
        sizes = [int(r["bytes"]) for r in rows if (r["where"], r["phase"]) == ("gpu", phase.name)]
        assert sum(sizes) == phase.total_bytes
    assert sum(int(row["bytes"]) for row in rows if row["where"] == "host") == FOUND.host_peak_bytes
    assert all(row["formula"] for row in rows)


def test_markdown_is_a_table_of_one_width() -> None:
    lines = [line for line in markdown(FOUND).splitlines() if line.startswith("|")]
    cells = {
        line.replace("\\|", "").count("|")
        for line in lines
        if "total" in line or "term | load" in line
    }
    assert cells == {len(FOUND.phases) + 2}
    assert sum(line.startswith("| **total**") for line in lines) == 1


@pytest.mark.parametrize("kind", ["png", "html"])
def test_a_file_that_cannot_be_written_is_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*shlex.split(RUN), f"--{kind}", str(tmp_path / "no" / "where")]) == 2
    assert f"{kind}: cannot write" in capsys.readouterr().err
    assert main([*shlex.split(RUN), "--png", "-"]) == 2
    assert "a picture is not printed" in capsys.readouterr().err


def test_hostile_names_stay_text() -> None:
    hostile = '<script>alert("1")</script>|`*'
    named = plan(
        replace(FOUND.spec, name=hostile),
        make_recipe(task="sft", method="qlora", context=2048),
        make_machine("rtx-4090"),
    )
    made = page(named, run_yaml=hostile, served=hostile, timing=hostile)
    assert "<script" not in made
    assert "&lt;script&gt;" in made
    assert "<script" not in picture_svg(named)
    assert "<script" not in badge_svg(hostile, hostile, "fits")


def test_pictures_are_wellformed_and_of_the_size_that_is_shown_uncropped(tmp_path: Path) -> None:
    tree = ElementTree.fromstring(picture_svg(FOUND))
    assert tree.attrib["viewBox"] == f"0 0 {WIDTH} {HEIGHT}"
    target = tmp_path / "plan.png"
    assert main([*shlex.split(RUN), "--png", str(target)]) == 0
    with Image.open(target) as image:
        assert image.size == (WIDTH, HEIGHT) == (1200, 630)
        seen = {colour for _, colour in image.convert("RGB").getcolors(WIDTH * HEIGHT) or []}
    wanted = tuple(bytes.fromhex(TERM_COLOURS["weights"][1:]))
    assert any(sum(abs(a - b) for a, b in zip(rgb, wanted, strict=True)) < 6 for rgb in seen)
    assert target.stat().st_size < 60_000


def test_bars_are_as_long_as_their_bytes() -> None:
    boxes = [
        (float(box.attrib["width"]), box[0].text or "")
        for box in ElementTree.fromstring(picture_svg(FOUND)).iter(
            "{http://www.w3.org/2000/svg}rect"
        )
        if len(box)
    ]
    assert len(boxes) == sum(len(phase.terms) for phase in FOUND.phases)
    (weights,) = [wide for wide, tip in boxes if tip.startswith("backward, weights")]
    (optimizer,) = [wide for wide, tip in boxes if tip.startswith("backward, optimizer")]
    terms = {term.name: term.bytes for term in FOUND.phase("backward").terms}
    assert weights / optimizer == pytest.approx(terms["weights"] / terms["optimizer"], rel=0.02)


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"task": "sft", "method": "qlora", "context": 8192}, "QLoRA, 8K context"),
        ({"task": "grpo", "method": "lora", "context": 2000}, "GRPO LoRA, 2,000 context"),
        ({"task": "sft", "method": "full", "context": 1024}, "full, 1K context"),
        ({"task": "serve", "context": 4096}, "serve, 4K context"),
    ],
)
def test_a_badge_says_what_it_is_about(fields: dict[str, object], label: str) -> None:
    found = plan(catalogue_model("qwen2.5-0.5b"), make_recipe(**fields), make_machine("h100"))
    assert badge_label(found) == label


def test_the_smallest_card_fits_and_the_next_smaller_does_not() -> None:
    model, recipe = catalogue_model("qwen2.5-7b"), make_recipe(task="sft", method="qlora", context=8192)  # fmt: skip
    least = smallest_gb(model, recipe, make_machine("rtx-4090"))
    known = dict(sizes())
    assert least in known
    smaller = max(size for size in known if size < least)
    assert plan(model, recipe, Machine(vram_bytes=known[least])).fits
    assert not plan(model, recipe, Machine(vram_bytes=known[smaller])).fits
    huge = make_recipe(task="sft", method="full", context=8192)
    assert smallest_gb(catalogue_model("llama-3.1-405b"), huge, make_machine("h100")) is None


def test_colours_have_a_name_for_every_term_and_white_is_read_on_verdicts() -> None:
    assert set(TERM_COLOURS) == set(TERM_NAMES)

    def light(colour: str) -> float:
        parts = [byte / 255 for byte in bytes.fromhex(colour[1:])]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(
            part * share for part, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True)
        )

    assert all(1.05 / (light(colour) + 0.05) >= 4.5 for colour in VERDICT_COLOURS.values())
