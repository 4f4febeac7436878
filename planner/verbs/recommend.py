"""Verb recommend: models for a GPU, or GPUs for a model."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.verbs.completed import gpus as gpus_named
from planner.verbs.completed import models
from planner.verbs.options import Json, print_json
from planner.verbs.terminal import show

if TYPE_CHECKING:
    from planner.answers.cards import Card
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
    framework: Annotated[str, typer.Option("--framework", help="Framework.")] = "vramwise",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows at most.")] = 40,
    offline: Annotated[bool, typer.Option("--offline", help="No network.")] = False,
    token: Annotated[
        str | None, typer.Option("--token", help="Of the hub; HF_TOKEN if not said.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models and methods that fit a GPU, or the GPUs that take a model; each with settings that fit.

    Only settings that leave the result as it is are changed, and their price is said.
    """
    from planner.machines.machine import make_machine
    from planner.names import TASK_WORDS, word_of
    from planner.run.framework import pick
    from planner.run.recipe import Task
    from planner.units import parse_count

    tokens = parse_count(context, field="context")
    pick(framework)  # an unknown one is refused here, not model by model
    task = word_of("task", task, [each.value for each in Task], TASK_WORDS)
    if model is not None and gpu is None and vram is None:
        _gpus_for(model, task=task, context=tokens, framework=framework, gpus=gpus, nodes=nodes,
                  host_ram=host_ram, limit=limit, offline=offline, token=token, as_json=as_json)  # fmt: skip
        return
    from planner.answers.ranking import RULE
    from planner.answers.recommend import recommend

    machine = make_machine(gpu, gpus=gpus, nodes=nodes, vram=vram, host_ram=host_ram)
    only = _named(model, offline=offline, token=token) if model is not None else None
    rows = recommend(
        machine, task=task, least_context=tokens, framework=framework, limit=limit, only=only
    )
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
    if not rows:
        show(_nothing(only, machine.label, tokens))
        return
    _print_models(rows, machine.label, machine.num_gpus > 1, tokens, limit)


def _print_models(
    rows: "list[Recommendation]", label: str, several: bool, least: int, limit: int
) -> None:
    from planner.answers.ranking import RULE
    from planner.report import table
    from planner.units import format_bytes

    layout = ["layout"] if several else []
    cells = []
    for row in rows:
        near = row.at_least or row
        cells.append(
            [row.model, f"{row.parameters / 1e9:.2f}", row.method, str(near.batch), near.settings,
             *([near.layout] if several else []), format_bytes(near.peak_bytes),
             f"{row.context:,}", row.settings, *([row.layout] if several else []),
             format_bytes(row.peak_bytes)]
        )  # fmt: skip
    headers = ["model", "B params", "method", "batch", f"settings at {least:,}", *layout, "peak",
               "longest", "settings at the longest, batch 1", *layout, "peak"]  # fmt: skip
    serves = rows[0].method.startswith("serve")
    headers[3] = "requests" if serves else "batch"
    headers[-2 - several] = "settings at the longest" + ("" if serves else ", batch 1")
    show(f"What fits {label}, best first\n")
    show(table(headers, cells))
    more = f"\n{limit} rows; --limit shows more" if len(rows) == limit else ""
    prices = dict.fromkeys(price for row in rows for price in row.prices)
    show(f"{more}\n{RULE}")
    if prices:
        show("what was changed leaves the result as it is; its price: " + "; ".join(prices))
    first = rows[0].at_least or rows[0]
    show(f"the first: vramwise plan {rows[0].model} {first.flags}")


def _nothing(only: "ModelSpec | None", label: str, least: int) -> str:
    """Return why there is no row."""
    if only is None:
        return f"Nothing of the catalogue fits {label} at {least:,} tokens"
    if only.longest and least > only.longest:
        return f"{only.name} reads {only.longest:,} tokens at most; --context asks for {least:,}"
    return f"{only.name} fits {label} at {least:,} tokens by no method"


def _gpus_for(
    model: str,
    *,
    task: str,
    context: int,
    framework: str,
    gpus: int,
    nodes: int | None,
    host_ram: str | None,
    limit: int,
    offline: bool,
    token: str | None,
    as_json: bool,
) -> None:
    from planner.answers.cards import RULE, cards_for_model

    spec = _named(model, offline=offline, token=token)
    rows = cards_for_model(
        spec, task=task, context=context, framework=framework, gpus=gpus, nodes=nodes,
        host_ram=host_ram, limit=limit,
    )  # fmt: skip
    if as_json:
        document: dict[str, Any] = {
            "schema_version": 1,
            "model": spec.name,
            "task": task,
            "least_context": context,
            "rule": RULE,
            "rows": [row.to_dict() for row in rows],
        }
        print_json(document)
        return
    times = f"{gpus} x " if gpus > 1 else ""
    if not rows:
        show(
            _nothing(spec, f"{times}no card of the catalogue", context).removesuffix(
                " by no method"
            )
        )
        return
    show(f"Cards that take {spec.name} for {task} at {context:,} tokens, {RULE}\n")
    show(cards_table(rows))
    show(
        "\nsettings are the least slow that fit, and leave the result as it is; --limit shows more"
    )


def _named(model: str, *, offline: bool, token: str | None) -> "ModelSpec":
    from planner.importers.typed import typed_model

    typed = typed_model(model, offline=offline, token=token)
    if typed.said:
        typer.echo(typed.said, err=True)
    return typed.model


def cards_table(rows: "list[Card]") -> str:
    """Return cards as a table."""
    from planner.report import table
    from planner.units import format_bytes

    settings = any(row.setting for row in rows)
    headers = ["gpu", "memory", "method", "peak", "left", "verdict"]
    cells = [
        [row.gpu, format_bytes(row.vram_bytes), row.method, format_bytes(row.peak_bytes),
         format_bytes(row.headroom_bytes), row.verdict]
        + ([row.setting.settings if row.setting else ""] if settings else [])
        for row in rows
    ]  # fmt: skip
    return table([*headers, *(["settings"] if settings else [])], cells)
