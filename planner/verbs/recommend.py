"""Verb recommend: models for a GPU, or GPUs for a model."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.verbs.completed import gpus as gpus_named
from planner.verbs.completed import models
from planner.verbs.options import Json, print_json
from planner.verbs.spending import Epochs, Price, Samples
from planner.verbs.terminal import show

if TYPE_CHECKING:
    from planner.answers.recommend import Recommendation
    from planner.models.spec import ModelSpec


def register(app: typer.Typer) -> None:
    """Add the verb to the console script."""
    app.command("recommend", rich_help_panel="Plan")(_recommend)


def _recommend(
    model: Annotated[
        str | None,
        typer.Argument(
            help="For this model list GPUs; without it, models for --gpu.", autocompletion=models
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help='GPU name, or its memory: "16 GB".', autocompletion=gpus_named),
    ] = None,
    vram: Annotated[str | None, typer.Option("--vram", help="Memory torch sees: 24GiB.")] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="How many.")] = 1,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Hosts they are in.")] = None,
    host_ram: Annotated[str | None, typer.Option("--host-ram", help="Host memory.")] = None,
    task: Annotated[str, typer.Option("--task", help="sft, grpo, dpo, serve ...")] = "sft",
    context: Annotated[str, typer.Option("--context", help="Least context wanted: 8k.")] = "2048",
    framework: Annotated[
        str | None,
        typer.Option("--framework", help="Whose runs; else this trainer's where it has the task."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows at most.")] = 40,
    samples: Samples = None,
    epochs: Epochs = None,
    price: Price = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write the rows; - prints them.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="No network.")] = False,
    token: Annotated[
        str | None, typer.Option("--token", help="Of the hub; HF_TOKEN if not said.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models and methods that fit a GPU, or the GPUs that take a model; each with settings that fit.

    Only settings that leave the result as it is are changed, and their price is said.
    """
    from planner.answers.amount import spending_for
    from planner.answers.cards import cards_for_model
    from planner.machines.machine import make_machine
    from planner.names import TASK_WORDS, word_of
    from planner.run.recipe import Task
    from planner.units import parse_count
    from planner.verbs.cards import models_csv, nothing, show_cards_for
    from planner.verbs.outputs import write_text

    tokens = parse_count(context, field="context")
    task = word_of("task", task, [each.value for each in Task], TASK_WORDS)
    spending = spending_for(samples, epochs, price)
    if model is not None and gpu is None and vram is None:
        spec = _named(model, offline=offline, token=token)
        cards = cards_for_model(spec, task=task, context=tokens, framework=framework, gpus=gpus,
                                nodes=nodes, host_ram=host_ram, limit=limit, spending=spending)  # fmt: skip
        show_cards_for(spec, cards, task=task, context=tokens, gpus=gpus, csv=csv, as_json=as_json)
        return
    from planner.answers.ranking import RULE
    from planner.answers.recommend import recommend, refusals

    machine = make_machine(gpu, gpus=gpus, nodes=nodes, vram=vram, host_ram=host_ram)
    only = _named(model, offline=offline, token=token) if model is not None else None
    with _seldom_collected():
        rows = recommend(
            machine, task=task, least_context=tokens, framework=framework, limit=limit, only=only,
            spending=spending,
        )  # fmt: skip
    if csv is not None and write_text(models_csv(rows), csv, kind="csv"):
        return
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "gpu": machine.label,
                "task": task,
                "least_context": tokens,
                "rule": RULE,
                "rows": [row.to_dict() for row in rows],
            }
        )
        return
    for reason in refusals(machine, task, framework):
        show(reason)
    if not rows:
        show(nothing(only, machine.label, tokens))
        return
    _print_models(rows, machine.label, machine.num_gpus > 1, tokens, limit)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Look for cycles less often: the blocks of a replay are many, linked both ways and soon gone."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _print_models(
    rows: "list[Recommendation]", label: str, several: bool, least: int, limit: int
) -> None:
    from planner.answers.ranking import RULE
    from planner.report import table
    from planner.units import format_bytes
    from planner.verbs.cards import lever_lines, spent_cells, spent_headers, spent_note

    layout = ["layout"] if several else []
    cells = []
    for row in rows:
        near = row.at_least or row
        cells.append(
            [row.model, f"{row.parameters / 1e9:.2f}", row.method, str(near.batch), near.settings,
             *([near.layout] if several else []), format_bytes(near.peak_bytes),
             *spent_cells(near.spent)[:3], f"{row.context:,}", row.settings, *([row.layout] if several else []),
             format_bytes(row.peak_bytes)]
        )  # fmt: skip
    headers = ["model", "B params", "method", "batch", f"settings at {least:,}", *layout, "peak",
               *spent_headers([(row.at_least or row).spent for row in rows])[:3], "longest", "settings at the longest, batch 1", *layout, "peak"]  # fmt: skip
    serves = rows[0].method.startswith("serve")
    headers[3] = "requests" if serves else "batch"
    headers[-2 - several] = "settings at the longest" + ("" if serves else ", batch 1")
    show(f"What fits {label}, best first\n")
    show(table(headers, cells))
    more = f"\n{limit} rows; --limit shows more" if len(rows) == limit else ""
    show(f"{more}\n{RULE}\n{spent_note([(row.at_least or row).spent for row in rows])}".rstrip())
    if prices := lever_lines(rows):
        show("what was changed leaves the result as it is; its price: " + "; ".join(prices))
    first = rows[0].at_least or rows[0]
    show(f"the first: vramwise plan {rows[0].model} {first.flags}")


def _named(model: str, *, offline: bool, token: str | None) -> "ModelSpec":
    from planner.importers.typed import typed_model

    typed = typed_model(model, offline=offline, token=token)
    if typed.said:
        typer.echo(typed.said, err=True)
    return typed.model
