"""Verbs that plan: plan, compare, advise."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.verbs.completed import models
from planner.verbs.options import (
    READ_BACK,
    Described,
    Json,
    NoCardError,
    describe,
    print_json,
    with_run_options,
)
from planner.verbs.spending import Epochs, MeanCompletion, Price, Samples, TotalSteps
from planner.verbs.terminal import show

if TYPE_CHECKING:
    from planner.answers.advise import Advice
    from planner.answers.serving import ServingView
    from planner.plan import Plan

_PLAN = "Plan"
Subject = Annotated[
    str,
    typer.Argument(
        help="A model's name, folder or hub id, a run.yaml, another tool's config or command, or -.",
        autocompletion=models,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the planner's verbs to the console script."""
    app.command("plan", rich_help_panel=_PLAN)(with_run_options(_plan))
    app.command("compare", rich_help_panel=_PLAN)(with_run_options(_compare))
    app.command("advise", rich_help_panel=_PLAN)(with_run_options(_advise))


READ_BACK.append(register)


def _plan(
    subject: Subject,
    *,
    flags: dict[str, Any],
    save: Annotated[Path | None, typer.Option("--save", help="Write the run as run.yaml.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with code 3 unless it fits at that risk.")
    ] = False,
    risk: Annotated[
        float, typer.Option("--risk", help="Risk of running out of memory that `fits` allows.")
    ] = 0.05,
    lengths: Annotated[
        Path | None,
        typer.Option(
            "--lengths", help="Data set (JSONL, Parquet, numbers): where does it run out?"
        ),
    ] = None,
    samples: Samples = None,
    epochs: Epochs = None,
    total_steps: TotalSteps = None,
    mean_completion: MeanCompletion = None,
    price: Price = None,
    order: Annotated[
        str, typer.Option("--order", help="Of the samples: shuffled, bucketed or file.")
    ] = "shuffled",
    shared_prefix: Annotated[
        int, typer.Option("--shared-prefix", min=0, help="serve: tokens all requests begin with.")
    ] = 0,
    export: Annotated[
        str | None,
        typer.Option("--export", help="Print as settings of trl, axolotl, llamafactory or vllm."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a report: one file, no network.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write tables for an issue; - prints them.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write every term of every phase; - prints them.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Write a picture of it.")] = None,
    badge: Annotated[
        Path | None, typer.Option("--badge", help="Write an SVG badge: QLoRA, 8K: fits 12 GB.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether a run fits, what takes the memory, when, and what would make it fit.

    The subject is a model, a run.yaml, or another tool's config, launch script, notebook or
    manifest (docs/importers.md lists them; nothing is run).
    """
    from planner.answers.amount import amount_of, spending_of
    from planner.answers.layouts import laid_out, layouts
    from planner.answers.serving import serving_view
    from planner.errors import DoesNotFitError
    from planner.plan import plan
    from planner.report import layout_line, text, time
    from planner.report.serving import serving_text
    from planner.run.runfile import save_run_file
    from planner.verbs.cards import show_cards
    from planner.verbs.explain import export_text, foreign_extras
    from planner.verbs.outputs import write_outputs

    try:
        described = describe(subject, flags)
    except NoCardError as error:
        if any(each is not None for each in (save, export, html, markdown, csv, png, badge)):
            raise
        spending = spending_of(
            error.run,
            lengths,
            price,
            samples=samples,
            epochs=epochs,
            total_steps=total_steps,
            mean_completion=mean_completion,
        )
        show_cards(error.run, error.model, spending, check=check, as_json=as_json)
        return
    recipe = described.run.recipe
    result = plan(described.model, recipe, described.machine, risk=risk)
    served = serving_view(
        described.model, recipe, described.machine, result, shared_prefix=shared_prefix
    )
    whole = not laid_out(recipe, described.machine)
    best_layouts = layouts(described.model, recipe, described.machine, fitting=1) if whole else []
    extra = foreign_extras(described, lengths=lengths, order=order)
    timed, amount = amount_of(
        result,
        described.run,
        lengths,
        samples=samples,
        epochs=epochs,
        total_steps=total_steps,
        mean_completion=mean_completion,
    )
    if save is not None:
        save_run_file(described.file or described.run, save)
        typer.echo(f"wrote {save}", err=True)
    best = cache(lambda: _levers(described, result, served))
    view = serving_text(served) if served else ""
    timing = cache(lambda: time.time_text(timed, amount, price))
    wanted = {"html": html, "markdown": markdown, "csv": csv, "png": png, "badge": badge}
    printed = write_outputs(described, result, wanted, levers=best, served=view, timing=timing)
    if export is not None:
        typer.echo(export_text(described.run, export), nl=False)
    elif printed:
        pass
    elif as_json:
        found: dict[str, Any] = {}
        if whole:
            found["layouts"] = [tried.to_dict() for tried in best_layouts]
        found |= {"serving": served.to_dict()} if served else {}
        spent = time.document(timed, amount, price)
        print_json(result.to_dict() | found | extra.document | spent)
    else:
        said = f"\n\n{layout_line(best_layouts)}" if whole else ""
        show(f"{text(result, best(), view)}{said}{extra.prose}\n\n{timing()}")
    if check and not result.fits:
        if as_json:  # the document above is the whole answer
            raise typer.Exit(DoesNotFitError.exit_code)
        raise DoesNotFitError(
            f"does not fit: {result.why}", hint="`vramwise advise` says what helps"
        )


def _levers(described: Described, result: "Plan", served: "ServingView | None") -> "list[Advice]":
    """Return what lowers the peak; a server's pool is as large as it is told to be."""
    from planner.answers.advise import levers

    if served:
        return []
    return levers(described.model, described.run.recipe, described.machine, result)


def _time_words(change: dict[str, Any]) -> str:
    from planner.answers.slower import Slower

    if change["slower"] is None:
        return "not known"
    return Slower(change["slower"], change["slower_of"]).words


def _compare(
    subjects: Annotated[list[str], typer.Argument(help="One model, or several run.yaml files.")],
    *,
    flags: dict[str, Any],
    frameworks: Annotated[
        str, typer.Option("--frameworks", help="Names to put side by side, with commas.")
    ] = "vramwise,trl,unsloth,hf-trainer",
    as_json: Json = False,
) -> None:
    """Put frameworks or run files side by side."""
    from planner.report import table
    from planner.units import format_bytes

    plans = _compared(subjects, flags, frameworks)
    if as_json:
        print_json({"schema_version": 1, "plans": [{"name": n, **p.to_dict()} for n, p in plans]})
        return
    phases = list(dict.fromkeys(phase.name for _, plan in plans for phase in plan.phases))
    rows = []
    for name, plan in plans:
        sizes = {phase.name: format_bytes(phase.total_bytes) for phase in plan.phases}
        rows.append(
            [
                name,
                format_bytes(plan.peak_bytes),
                plan.peak_phase,
                plan.verdict,
                *(sizes.get(phase, "-") for phase in phases),
            ]
        )
    show(table(["run", "peak", "in", "verdict", *phases], rows))


def _compared(
    subjects: list[str], flags: dict[str, Any], frameworks: str
) -> list[tuple[str, "Plan"]]:
    from planner.plan import plan

    if len(subjects) > 1:
        named = [(subject, describe(subject, flags)) for subject in subjects]
    else:
        names = [name.strip() for name in frameworks.split(",") if name.strip()]
        named = [(name, describe(subjects[0], {**flags, "framework": name})) for name in names]
    return [(name, plan(d.model, d.run.recipe, d.machine)) for name, d in named]


def _advise(subject: Subject, *, flags: dict[str, Any], as_json: Json = False) -> None:
    """Say what to change so that a run fits, and the largest that fits."""
    from planner.answers.advise import advise
    from planner.report import layout_table, table
    from planner.units import format_bytes

    described = describe(subject, flags)
    document = advise(described.model, described.run.recipe, described.machine)
    if as_json:
        print_json(document)
        return
    show(
        f"{document['verdict'].upper()}: peak {format_bytes(document['peak_bytes'])}, "
        f"capacity {format_bytes(document['capacity_bytes'])}\n"
    )
    rows = [
        [
            change["change"],
            format_bytes(change["saved_bytes"]),
            change["verdict"],
            "yes" if change["changes_objective"] else "no",
            _time_words(change),
            change["price"],
        ]
        for change in document["changes"]
    ]
    headers = ["change", "saves", "then it", "changes the result", "time", "price"]
    show(table(headers, rows))
    if document["combination"]:
        names = " + ".join(document["combination"]["changes"])
        peak = format_bytes(document["combination"]["peak_bytes"])
        show(f"\nShortest combination that fits: {names} (peak {peak})")
    elif not document["fits"]:
        show("\nNo combination of up to four of these changes fits.")
    if "layouts" in document:
        show(f"\n{layout_table(document['layouts'], described.machine.host_ram_bytes)}")
    largest = document["largest"]
    rows = [
        [name, f"{largest[name]:,}", f"{largest[name + '_safe']:,}"]
        for name in largest
        if not name.endswith("_safe")
    ]
    show("\nLargest that fits, all else as it is:")
    show(table(["", "tensors fit", "with allocator slack"], rows))
