"""Verb frontier: memory x hours x dollars of a run over cards, layouts and settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.verbs.cards import spent_cells, spent_headers, spent_note
from planner.verbs.completed import models
from planner.verbs.options import Json, NoCardError, describe, print_json, with_run_options
from planner.verbs.spending import Epochs, MeanCompletion, Price, Samples, TotalSteps
from planner.verbs.terminal import show

if TYPE_CHECKING:
    from planner.answers.frontier import Frontier, Point
    from planner.models.spec import ModelSpec
    from planner.run.recipe import RunFile
    from planner.speed.budget import Budget

LIMIT = 40


def register(app: typer.Typer) -> None:
    """Add the verb to the console script."""
    app.command("frontier", rich_help_panel="Plan")(with_run_options(_frontier))


def _frontier(
    subject: Annotated[
        str,
        typer.Argument(help="As for plan: a model, a run.yaml, a config.", autocompletion=models),
    ],
    *,
    flags: dict[str, Any],
    cards: Annotated[
        str | None, typer.Option("--cards", help="Of these cards alone: rtx-4090,h100.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Limits: '24GiB, <6h, <$5'.")
    ] = None,
    samples: Samples = None,
    epochs: Epochs = None,
    total_steps: TotalSteps = None,
    lengths: Annotated[
        Path | None, typer.Option("--lengths", help="Data set (JSONL, Parquet, numbers).")
    ] = None,
    mean_completion: MeanCompletion = None,
    price: Price = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows at most.")] = LIMIT,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with code 3 unless something meets the budget.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write the rows; - prints them.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write picture and table: one file, no network.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Write a picture of it.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a run costs in memory, hours and dollars: the ways that nothing beats.

    Cards with a listed price (or --gpu, --cards), 1 to 8 of each (or --gpus), layouts and settings that
    leave the result as it is: a step trains as many samples on every way.
    """
    from planner.answers.amount import spending_of
    from planner.answers.frontier import COUNTS, frontier
    from planner.errors import DoesNotFitError
    from planner.speed.budget import parse_budget
    from planner.verbs.outputs import write_text

    limits = parse_budget(budget) if budget is not None else None
    run, model = _described(subject, flags)
    spending = spending_of(
        run,
        lengths,
        price,
        samples=samples,
        epochs=epochs,
        total_steps=total_steps,
        mean_completion=mean_completion,
    )
    asked = run.machine
    found = frontier(
        model,
        run.recipe,
        cards=_cards(cards, flags, run),
        counts=(asked.gpus,) if flags.get("gpus") is not None else COUNTS,
        nodes=asked.nodes,
        host_ram=asked.host_ram,
        samples_gpus=asked.gpus,
        spending=spending,
    )
    title = f"{model.name}, {run.recipe.task.value}: memory, hours, dollars"
    text = frontier_text(found, limits, subject=subject, limit=limit)
    printed = False
    if csv is not None:
        printed = write_text(frontier_csv(found), csv, kind="csv")
    if html is not None:
        from planner.report.frontier import frontier_page

        printed = write_text(frontier_page(found, title, text), html, kind="html") or printed
    if png is not None:
        from planner.report.frontier import frontier_picture
        from planner.report.png import shapes_png

        write_text(shapes_png(frontier_picture(found, title)), png, kind="png")
    if as_json:
        print_json(document(found, limits, model.name))
    elif not printed:
        show(text)
    if check and not (found.within(limits) if limits is not None else found.points):
        if as_json:  # the document above is the whole answer
            raise typer.Exit(DoesNotFitError.exit_code)
        raise DoesNotFitError("nothing meets the budget" if limits else "nothing fits")


def _described(subject: str, flags: dict[str, Any]) -> "tuple[RunFile, ModelSpec]":
    from planner.errors import UsageError

    if flags.get("vram") is not None and flags.get("gpu") is None:
        raise UsageError("vram: how fast a size of memory computes is not known", hint="--gpu NAME")
    try:
        described = describe(subject, flags)
    except NoCardError as error:
        return error.run, error.model
    return described.run, described.model


def _cards(cards: str | None, flags: dict[str, Any], run: "RunFile") -> list[Any]:
    """Return the cards to try: named ones, --gpu alone, or those with a price and the run's own."""
    from planner.answers.frontier import cards_named, listed_cards
    from planner.speed.cards import card_speed

    if cards is not None:
        return cards_named(name.strip() for name in cards.split(",") if name.strip())
    if flags.get("gpu") is not None:
        return cards_named([flags["gpu"]])
    found = listed_cards()
    if run.machine.gpu is not None:
        from planner.machines.machine import find_gpu

        own = find_gpu(run.machine.gpu)
        if own not in found and card_speed(own.id) is not None:
            found.append(own)
    return found


def frontier_text(
    found: "Frontier", budget: "Budget | None", *, subject: str, limit: int = LIMIT
) -> str:
    """Return the answer for people."""
    from planner.answers.frontier import RULE

    if not found.points:
        return "Nothing that was tried fits: `vramwise advise` says what helps"
    rows = list(found.points)
    lines = []
    if budget is None:
        lines += [f"{len(rows)} of {found.tried} ways that fit, the cheapest first: {RULE}", ""]
    else:
        rows, said = _budgeted(found, budget)
        lines += [*said, ""]
    lines += [points_table(rows[:limit], found)]
    if len(rows) > limit:
        lines.append(f"{limit} of {len(rows)} rows; --limit shows more")
    first = rows[0]
    several = f" --gpus {first.gpus}" if first.gpus > 1 else ""
    lines += [
        "",
        spent_note([row.spent for row in rows]).strip(),
        *(f"assumed: {note}" for note in found.notes),
        *found.left_out,
        f"the first: vramwise plan {subject} --gpu {first.gpu}{several} {first.flags}".rstrip(),
    ]
    return "\n".join(lines)


def _budgeted(found: "Frontier", budget: "Budget") -> "tuple[list[Point], list[str]]":
    """Return the points that meet a budget; else the nearest one, and what binds."""
    said = ", ".join(budget.said(name) for name in budget.limits())
    within = found.within(budget)
    if within:
        ways = f"{len(within)} of {len(found.points)} ways that nothing beats meet"
        return within, [f"{ways} {said} at likely speeds and middle prices, the cheapest first"]
    nearest, worst = found.nearest(budget) or (found.points[0], "")
    over = budget.over(nearest.values)
    passed = ", ".join(f"{name} by {share - 1:.0%}" for name, share in over.items() if share > 1)
    lines = [f"Nothing meets {said}. The nearest passes {passed}; {worst} binds it the most."]
    binding = found.binding(budget)
    if binding:
        lines.append("Without the limit on " + " or ".join(binding) + " the others can be met.")
    elif len(budget.limits()) > 1:
        lines.append("No single limit is the reason: at least two have to give.")
    lines += [f"The least {name} of any way: {text}" for name, text in found.least(budget).items()]
    return [nearest], lines


def points_table(rows: "list[Point]", found: "Frontier") -> str:
    """Return points as a table, numbered as in the picture."""
    from planner.report import table
    from planner.units import format_bytes

    numbers = {id(point): number for number, point in enumerate(found.points, 1)}
    headers = ["", "gpus", "peak", *spent_headers([row.spent for row in rows]), "settings"]
    cells = [
        [str(numbers[id(row)]), f"{row.gpus} x {row.gpu}", format_bytes(row.peak_bytes),
         *spent_cells(row.spent), ", ".join(filter(None, (row.layout, row.settings)))]
        for row in rows
    ]  # fmt: skip
    return table(headers, cells)


def document(found: "Frontier", budget: "Budget | None", model: str) -> dict[str, Any]:
    """Return the JSON form."""
    from planner.answers.frontier import RULE

    answer: dict[str, Any] = {
        "schema_version": 1,
        "model": model,
        "rule": RULE,
        "of": found.of,
        "tried": found.tried,
        "priced": found.priced,
        "points": [point.to_dict() for point in found.points],
        "assumptions": [*found.notes, *found.left_out],
    }
    if budget is not None:
        numbers = {id(point): number for number, point in enumerate(found.points)}
        nearest = found.nearest(budget)
        answer["budget"] = budget.to_dict()
        answer["within"] = [numbers[id(point)] for point in found.within(budget)]
        answer["binding"] = found.binding(budget) if not answer["within"] else []
        answer["nearest"] = None
        if nearest is not None and not answer["within"]:
            over = {name: round(x, 4) for name, x in budget.over(nearest[0].values).items()}
            answer["nearest"] = {
                "point": numbers[id(nearest[0])], "times_the_limit": over, "worst": nearest[1],
            }  # fmt: skip
    return answer


def frontier_csv(found: "Frontier") -> str:
    """Return the points as CSV."""
    from planner.answers.spent import csv_of
    from planner.verbs.cards import spent_columns

    plain = ("gpu", "gpus", "method", "layout", "settings", "peak_bytes", "vram_bytes", "flags")
    rows = [
        {name: getattr(point, name) for name in plain} | point.spent.rounded()
        for point in found.points
    ]
    return csv_of(rows, (*plain, *spent_columns()))
