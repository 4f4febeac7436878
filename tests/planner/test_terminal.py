"""The command line at a terminal: no wider than it, in colour only there, completed by the shell, opening with plan."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import main
from planner.report import table
from planner.verbs.terminal import fitted, in_colour

ROOT = Path(__file__).parents[2]
START = [sys.executable, "-c", "from app.cli import run; run()"]
PLAN = ["plan", "llama-3.1-8b", "--gpu", "rtx-3060-12gb"]
SMALL = ["plan", "smollm2-135m", "--gpu", "rtx-4090", "--context", "512"]
"""It fits, so that nothing is searched for."""


def at_a_terminal(*arguments: str, columns: int, **environment: str) -> str:
    """Return what a real terminal of so many columns is sent."""
    ours, theirs = pty.openpty()
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    env = {**plain, "COLUMNS": str(columns), "TERM": "xterm-256color", **environment}
    process = subprocess.Popen([*START, *arguments], stdout=theirs, env=env, cwd=ROOT)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert process.wait() == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_a_terminal_gets_its_width_and_no_color_is_honoured() -> None:
    narrow = at_a_terminal(*SMALL, columns=40, NO_COLOR="1")
    assert "\x1b" not in narrow
    assert max(len(line) for line in narrow.split("\n")) <= 40
    assert narrow.startswith("FITS")
    assert re.search(r"backward #*\.+ ", narrow)


@pytest.mark.slow
def test_a_terminal_gets_colour() -> None:
    wide = at_a_terminal(*PLAN, columns=200)
    assert wide.startswith("\x1b[31m\x1b[1mDOES NOT FIT\x1b[0m")


def test_a_pipe_gets_plain_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.split("\n")[0]) > 120


def test_bars_shrink_together_and_words_wrap() -> None:
    text = "  load     ####....    1 GiB\n  forward  ######!!   12 GiB <- peak\n" + "word " * 20
    made = fitted(text, 34).split("\n")
    assert max(map(len, made)) <= 34
    assert len(re.findall(r"[#.!]{4,}", made[0])[0]) == len(re.findall(r"[#.!]{4,}", made[1])[0])
    assert fitted(text, 400) == text
    assert in_colour("FITS: so") == "\x1b[32m\x1b[1mFITS\x1b[0m: so"


def test_a_table_that_is_too_wide_is_a_paragraph_a_row() -> None:
    cells = [["rtx-4090", "lora", "1", ""], ["rtx-3060-12gb", "qlora", "12", "full checkpointing"]]
    text = "cards\n\n" + table(["card", "method", "batch", "settings"], cells) + "\n\nthe end"
    assert fitted(text, 60) == text
    made = fitted(text, 40).split("\n")
    assert made == [
        *("cards", "", "rtx-4090", "    method: lora; batch: 1", "rtx-3060-12gb"),
        *("    method: qlora; batch: 12; settings:", "        full checkpointing", "", "the end"),
    ]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_recommendations_are_read_at_any_width(columns: int) -> None:
    line = ["recommend", "smollm2-135m", "--gpu", "rtx-4090", "--task", "serve"]
    told = at_a_terminal(*line, columns=columns, NO_COLOR="1")
    assert max(map(len, told.split("\n"))) <= columns
    assert re.search("^smollm2-135m$" if columns < 120 else "^smollm2-135m  .*serve", told, re.M)
    if columns < 120:
        assert re.search(r"^    B params: 0.13; method: serve;", told, re.M)


def test_bash_completes_by_what_the_verb_prints(tmp_path: Path) -> None:
    """A bash that has read the printed script fills in a verb and a model."""
    command = tmp_path / "vramwise"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m app.cli "$@"\n')
    command.chmod(0o755)
    lines = """
        eval "$(vramwise completion bash)"
        name=$(complete -p vramwise | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        COMP_WORDS=(vramwise rec); COMP_CWORD=1; $name vramwise; echo "${COMPREPLY[@]}"
        COMP_WORDS=(vramwise plan smollm2-13); COMP_CWORD=2; $name vramwise; echo "${COMPREPLY[@]}"
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", lines],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["recommend", "smollm2-135m"], done.stderr


def test_help_opens_with_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "vramwise plan" in out.split("Options")[0]
    places = [
        out.index(f"{verb} ") for verb in ("│ plan", "│ explain", "│ train", "│ trace", "│ app")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"complete_{shell}" in script
    assert "_VRAMWISE_COMPLETE" in script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("rec", "recommend"),
        ("plan qwen3-8", "qwen3-8b"),
        ("plan x --gpu rtx-4090-l", "rtx-4090-laptop"),
    ],
)
def test_bash_is_offered_what_is_known(typed: str, offered: str) -> None:
    words = f"vramwise {typed}"
    env = {
        "_VRAMWISE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        START, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [offered]
