"""The command line at a terminal: no wider than it, in colour only there, completed by the shell, opening with plan."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import main
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
