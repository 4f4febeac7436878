"""`vramwise accuracy`: published measurements against the planner."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.verbs.terminal import show

if TYPE_CHECKING:
    from planner.accuracy.score import Accuracy


class Tier(StrEnum):
    """Which model of memory is scored."""

    ANALYTIC = "analytic"
    TRACE = "trace"


score_traces: Callable[[list[Path]], Accuracy] | None = None
"""Scores fake-tensor traces. The console script sets it: traces live in the profiler and need torch."""


def register(app: typer.Typer) -> None:
    """Add the verb `accuracy`."""
    app.command("accuracy", rich_help_panel="Look")(accuracy)


def accuracy(
    csv: Annotated[
        list[Path] | None,
        typer.Option("--csv", help="Measurement file; repeat it. Default: all that are shipped."),
    ] = None,
    tier: Annotated[Tier, typer.Option(help="The formulas, or the fake-tensor trace.")] = (
        Tier.ANALYTIC
    ),
    source: Annotated[
        str | None, typer.Option(help="Only sources whose name contains this text.")
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", help="List every row with its error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The report of docs.")] = False,
) -> None:
    """Score the planner against published GPU measurements."""
    from planner.accuracy import report
    from planner.accuracy.score import measurement_files, score_files
    from planner.errors import UnsupportedError

    files = csv or measurement_files()
    if tier is Tier.TRACE and score_traces is None:
        raise UnsupportedError(
            "tier: trace is the console script's", hint="vramwise accuracy --tier trace"
        )
    score = score_traces if tier is Tier.TRACE and score_traces else score_files
    result = score(files)
    if source:
        result = report.only_source(result, source)
    if as_json:
        typer.echo(report.to_json(result, tier=tier.value, rows=rows))
    elif markdown:
        typer.echo(report.to_markdown(result), nl=False)
    else:
        show(report.to_text(result, rows=rows))
