"""The README: every command in it is run, and every figure is one that a command prints."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import setup_env
from app.cli import main
from app.explaining import EXAMPLE
from benchmarks.write_docs import WHY, catalogue_sentence, readme_command
from trainer.small_model import make_small_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SLOW = ("trace", "train", "profile", "quantize", "advise", "recommend")
"""They need torch, or search for many seconds."""
RUN = "model: qwen3-8b\nrecipe: {task: grpo, method: qlora}\nmachine: {gpu: rtx-4090}\n"
AXOLOTL = """
base_model: Qwen/Qwen2.5-7B
adapter: qlora
load_in_4bit: true
sequence_len: 4096
micro_batch_size: 2
gradient_checkpointing: true
datasets: [{path: data.jsonl, type: alpaca}]
"""
TRAIN = "import torch\ntorch.nn.Linear(8, 8)(torch.zeros(2, 8)).sum().backward()\n"


def lines() -> Iterator[tuple[list[str], str]]:
    """Yield every line of the shell blocks: its words, variables filled in, and its comment."""
    for block in re.findall(r"```sh\n(.+?)```", README, flags=re.S):
        known: dict[str, str] = {}
        for line in block.strip().splitlines():
            command, _, said = line.partition(" # ")
            filled = re.sub(r"\$(\w+)", lambda found: known[found[1]], command)  # noqa: B023
            if given := re.fullmatch(r'(\w+)="(.*)"', filled.strip()):
                known[given[1]] = given[2]
            else:
                yield shlex.split(filled), said.strip()


COMMANDS = list(lines())
LIGHT = [(words, said) for words, said in COMMANDS if words[1] not in SLOW]
HEAVY = [words for words, _ in COMMANDS if words[1] in SLOW]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the README speaks of as the reader's."""
    place = tmp_path_factory.mktemp("readme")
    (place / "axolotl.yml").write_text(AXOLOTL)
    (place / "error.log").write_text(EXAMPLE)
    (place / "train.py").write_text(TRAIN)
    (place / "run.yaml").write_text(RUN)
    make_small_model(place / "MODEL")
    (place / "examples").symlink_to(ROOT / "examples")
    return place


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert words[0] == "vramwise"
    assert main(words[1:]) == 0, words
    return capsys.readouterr().out


def test_every_quick_command_runs_and_every_figure_is_its(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    figures = 0
    for words, said in LIGHT:
        if words[1] == "accuracy":  # its figures are read by test_docs' claim
            continue
        out = printed(words, capsys)
        assert out.strip(), words
        if figure := re.fullmatch(r"(\d+) GiB", said):
            peak = json.loads(printed([*words, "--json"], capsys))["peak_bytes"]
            assert round(peak / 2**30) == int(figure[1]), words
            figures += 1
        if words[1:2] == ["published"]:
            assert "510.8" in out
            assert "54.3" in out
    assert figures == 3
    for name in ("run.yaml", "plan.html", "plan.csv", "plan.markdown", "badge.svg"):
        assert (folder / name.replace("plan.markdown", "plan.md")).stat().st_size, name


@pytest.mark.slow
@pytest.mark.parametrize("words", HEAVY, ids=" ".join)
def test_every_other_command_runs(words: list[str], folder: Path) -> None:
    if words[-2:] == ["python", "train.py"]:
        words = [*words[:-2], sys.executable, "train.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *words[1:]], cwd=folder, env=env, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_uvx_plans_without_installing(tmp_path: Path) -> None:
    (line,) = re.findall(r"`(uvx [^`]+)`", README)
    words = shlex.split(line)[1:]
    words[words.index("--from") + 1] = str(ROOT)
    command = [sys.executable, "-m", "uv", "tool", "run", *words]
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=kept, check=False, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "capacity" in done.stdout


def blocks() -> list[str]:
    """Return the text blocks: the answer on the first screen, the reasons, the tree."""
    return [block.strip("\n") for block in re.findall(r"```text\n(.+?)```", README, flags=re.S)]


def test_the_example_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    answer, reasons = blocks()[:2]
    out = printed(["vramwise", *readme_command()], capsys)
    shown = f"{answer.partition(chr(10))[2]}{WHY[:2]}{reasons}"
    assert [line.rstrip() for line in out.strip().splitlines()] == shown.splitlines(), "make docs"


def test_the_first_screen_is_the_answer_the_picture_and_how_right_it_is() -> None:
    first = README.split("\n## ")[0]
    assert len(first.splitlines()) <= 32
    assert first.count("```text") == 1
    assert first.count("![") == 1
    assert "Scored against" in first


def test_counts_and_sizes_are_todays() -> None:
    assert catalogue_sentence() in README, "run: make docs"
    assert f"({setup_env.download_size()})" in README


def test_verbs_named_in_the_text_exist() -> None:
    from benchmarks.write_docs import VERBS

    named = set(re.findall(r"`vramwise (\w+)", README))
    assert named <= {verb[0] for verb in VERBS}
