"""Verbs that look things up: published, models, gpus."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from planner.units import format_bytes
from planner.verbs.options import Json, print_json
from planner.verbs.terminal import show

if TYPE_CHECKING:
    from planner.machines.machine import GpuSpec


def register(app: typer.Typer) -> None:
    """Add the verbs to the console script."""
    app.command("published", rich_help_panel="Look")(_published)
    app.command("models", rich_help_panel="Look")(_models)
    app.command("gpus", rich_help_panel="Look")(_gpus)


def _published(
    name: Annotated[str | None, typer.Argument(help="unsloth-grpo or oxen-grpo.")] = None,
    as_json: Json = False,
) -> None:
    """Reproduce a published table line by line, beside the op-level estimate."""
    from planner.answers.published import TABLES, published, render

    if name is None:
        if as_json:
            print_json({"schema_version": 1, "tables": list(TABLES)})
        else:
            show("\n".join(f"{key:<14} {title}" for key, title in TABLES.items()))
        return
    document = published(name)
    if as_json:
        print_json(document)
    else:
        show(render(document))


def _models(
    name: Annotated[str | None, typer.Argument(help="Model to look at; none lists all.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="No network.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Hub revision.")] = None,
    token: Annotated[
        str | None, typer.Option("--token", help="Of the hub; HF_TOKEN if not said.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a model's exact parameters by module, or list the catalogue."""
    from planner.answers.model_facts import model_facts
    from planner.importers.typed import typed_model
    from planner.models.catalogue import catalogue_model, catalogue_names
    from planner.report import table

    if name is None:
        specs = [catalogue_model(entry) for entry in catalogue_names()]
        if as_json:
            print_json(
                {
                    "schema_version": 1,
                    "models": [
                        {"name": s.name, "hub_id": s.hub_id, "parameters": s.parameters}
                        for s in specs
                    ],
                }
            )
            return
        rows = [[s.name, f"{s.parameters:,}", s.model_type, s.hub_id] for s in specs]
        show(table(["name", "parameters", "type", "hub id"], rows))
        return
    typed = typed_model(name, revision=revision, offline=offline, token=token)
    if typed.said:
        typer.echo(typed.said, err=True)
    facts = model_facts(typed.model)
    files = [asdict(each) for each in typed.gguf.files] if typed.gguf else []
    if as_json:
        listed = {"gguf_files": files} if typed.gguf else {}
        print_json({"schema_version": 1, **facts, **listed})
        return
    modules = facts.pop("parameters_by_module")
    for key, value in facts.items():
        show(f"{key:<24} {value:,}" if isinstance(value, int) else f"{key:<24} {value}")
    show("")
    show(table(["module", "parameters"], [[k, f"{v:,}"] for k, v in modules.items()]))
    if files:
        rows = [[each["name"], each["kind"], format_bytes(each["size_bytes"])] for each in files]
        show("\n" + table(["file", "kind", "size"], rows))


def _gpus(
    name: Annotated[str | None, typer.Argument(help="GPU to look at; none lists all.")] = None,
    as_json: Json = False,
) -> None:
    """Show what torch sees of a GPU, or list the catalogue."""
    from planner.machines.machine import find_gpu, gpu_catalogue
    from planner.report import table

    gpus = [find_gpu(name)] if name else list(gpu_catalogue().values())
    if as_json:
        rows = [{**asdict(gpu), "aliases": list(gpu.aliases)} for gpu in gpus]
        print_json({"schema_version": 1, "gpus": rows})
        return
    cells = [
        [
            gpu.id,
            gpu.name,
            _total(gpu),
            format_bytes(gpu.context_bytes) if gpu.context_bytes else "?",
            gpu.compute_capability,
            "yes" if gpu.bf16_native else "no",
            "yes" if gpu.flash_attention else "no",
        ]
        for gpu in gpus
    ]
    headers = ["id", "name", "torch sees", "context", "cc", "bf16", "flash"]
    show(table(headers, cells))


def _total(gpu: "GpuSpec") -> str:
    """Return what torch sees; "~" where no run on such a card was read."""
    if not gpu.torch_total_bytes:
        return "?"
    mark = "~" if gpu.torch_total_basis == "derived" else ""
    return f"{mark}{format_bytes(gpu.torch_total_bytes)}"
