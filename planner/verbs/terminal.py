"""What a terminal adds to an answer: lines no wider than it, and colour; a pipe or a file gets the plain text."""

import os
import re
import shutil
import sys
import textwrap

import typer

LEAST_COLUMNS, LEAST_BAR = 20, 4
BAR = re.compile(r"[#.!]{8,}")
VERDICTS = {
    "FITS": typer.colors.GREEN,
    "TIGHT": typer.colors.YELLOW,
    "DOES NOT FIT": typer.colors.RED,
}


def show(text: str) -> None:
    """Print prose: wrapped and coloured on a terminal, as it is anywhere else."""
    if sys.stdout.isatty():
        columns = max(LEAST_COLUMNS, shutil.get_terminal_size().columns)
        text = fitted(text, columns)
        if coloured():
            text = in_colour(text)
    typer.echo(text, color=coloured() or None)


def coloured() -> bool:
    """Say whether to use colour: on a terminal, unless NO_COLOR is set (no-color.org) or it is a dumb one."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def fitted(text: str, columns: int) -> str:
    """Return a text with lines of at most so many columns: bars become shorter, words go to the next line."""
    lines = text.split("\n")
    wide = max((len(line) for line in lines if BAR.search(line)), default=0)
    return "\n".join(_fitted(line, columns, max(0, wide - columns)) for line in lines)


def _fitted(line: str, columns: int, less: int) -> str:
    bar = BAR.search(line)
    if bar is not None and less:
        width = max(LEAST_BAR, len(bar.group()) - less)
        line = line[: bar.start()] + _shorter(bar.group(), width) + line[bar.end() :]
    if len(line) <= columns:
        return line
    indent = " " * min(len(line) - len(line.lstrip()), columns // 4)
    return "\n".join(
        textwrap.wrap(
            line.strip(),
            columns,
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_on_hyphens=False,
        )
    )


def _shorter(bar: str, width: int) -> str:
    """Return a bar of `width` in the same shares."""
    runs = [(run.group()[0], len(run.group())) for run in re.finditer(r"#+|\.+|!+", bar)]
    made = "".join(mark * max(1, round(count * width / len(bar))) for mark, count in runs)
    return made[:width]


def in_colour(text: str) -> str:
    """Return a text with its verdict, its peak and what is over in colour."""
    for verdict, colour in VERDICTS.items():
        if text.startswith(verdict):
            text = typer.style(verdict, fg=colour, bold=True) + text[len(verdict) :]
            break
    text = re.sub(r"!{2,}|!(?= )", lambda found: typer.style(found.group(), fg="red"), text)
    return text.replace("<- peak", typer.style("<- peak", bold=True))
