"""What a terminal adds to an answer: lines no wider than it, and colour; a pipe or a file gets the plain text."""

import os
import re
import shutil
import sys
import textwrap

import typer

LEAST_COLUMNS, LEAST_BAR = 20, 4
BAR = re.compile(r"[#.!]{8,}")
TABLE_RULE = re.compile(r"-+(?:  -+)+")
"""The line under a table's headers: a run of dashes as wide as each column."""
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
    """Return a text with lines of at most so many columns.

    Bars become shorter, words go to the next line, and a table that is wider has a paragraph for each row.
    """
    lines = _rows_apart(text.split("\n"), columns)
    wide = max((len(line) for line in lines if BAR.search(line)), default=0)
    return "\n".join(_fitted(line, columns, max(0, wide - columns)) for line in lines)


def _rows_apart(lines: list[str], columns: int) -> list[str]:
    """Return the lines with each table that is too wide as paragraphs: a row's first cell, then the others named."""
    made: list[str] = []
    place = 0
    while place < len(lines):
        following = lines[place + 1 : place + 2]
        end = place + 1
        if following and TABLE_RULE.fullmatch(following[0]):
            end = next((n for n in range(place, len(lines)) if not lines[n]), len(lines))
        whole = lines[place:end]
        if len(whole) > 2 and max(map(len, whole)) > columns:
            spans = [column.span() for column in re.finditer("-+", whole[1])]
            headers, *rows = (
                [line[slice(*span)].strip() for span in spans] for line in (whole[0], *whole[2:])
            )
            whole = [line for row in rows for line in _paragraph(headers, row)]
        made += whole
        place = end
    return made


def _paragraph(headers: list[str], row: list[str]) -> list[str]:
    """Return a row as its first cell and, indented below it, every other one that is not empty."""
    named = [
        f"{header}: {cell}" if header else cell
        for header, cell in zip(headers[1:], row[1:], strict=True)
        if cell
    ]
    return [row[0], "    " + "; ".join(named)] if row[0] else ["; ".join(named)]


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
