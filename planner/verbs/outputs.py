"""A plan written into files: a page, tables, a picture, a badge."""

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.errors import UsageError

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.report.text import Lever
    from planner.verbs.options import Described

STDOUT = Path("-")


def write_outputs(
    described: "Described",
    result: "Plan",
    wanted: dict[str, Path | None],
    *,
    levers: "Callable[[], Sequence[Lever]]",
    served: str,
    timing: "Callable[[], str]",
) -> bool:
    """Write the kinds that have a path; return whether one went to stdout instead of the answer."""
    printed = False
    for kind, path in wanted.items():
        if path is None:
            continue
        made = _make(kind, described, result, levers, served, timing)
        printed = write_text(made, path, kind=kind) or printed
    return printed


def write_text(made: str | bytes, path: Path, *, kind: str) -> bool:
    """Write one answer; return whether it went to stdout."""
    if path == STDOUT:
        if isinstance(made, bytes):
            raise UsageError(f"{kind}: a picture is not printed", hint=f"--{kind} FILE")
        typer.echo(made, nl=False)
        return True
    try:
        path.write_bytes(made if isinstance(made, bytes) else made.encode())
    except OSError as error:
        raise UsageError(f"{kind}: cannot write {path}: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)
    return False


def _make(
    kind: str,
    described: "Described",
    result: "Plan",
    levers: "Callable[[], Sequence[Lever]]",
    served: str,
    timing: "Callable[[], str]",
) -> str | bytes:
    from planner.report.tables import csv_text, markdown

    if kind == "csv":
        return csv_text(result)
    if kind == "markdown":
        return markdown(result)
    if kind == "png":
        from planner.report.png import picture_png

        return picture_png(result)
    if kind == "badge":
        return badge_of(described, result)
    from planner.report.page import page
    from planner.run.runfile import run_file_text

    yaml = run_file_text(described.file or described.run)
    return page(
        result,
        levers=levers(),
        served=served,
        timing=timing(),
        run_yaml=yaml,
        version=own_version(),
    )


def badge_of(described: "Described", result: "Plan") -> str:
    """Return the badge of a plan: it names the smallest card that the run fits."""
    from planner.answers.smallest import smallest_gb
    from planner.report.svg import badge_label, badge_message, badge_svg

    least = smallest_gb(described.model, described.run.recipe, described.machine)
    message = badge_message(result, least)
    verdict = "fits" if message.startswith("fits") and "no card" not in message else result.verdict
    return badge_svg(badge_label(result), message, verdict)


def own_version() -> str:
    """Return the installed release, "" when run from a checkout."""
    try:
        return version("vramwise")
    except PackageNotFoundError:
        return ""
