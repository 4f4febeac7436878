"""The verb `explain`: from an error message or a log to cause and fixes."""

import json
import sys
import zlib
from dataclasses import dataclass, field, replace
from lzma import LZMAError
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from planner.verbs.terminal import show

if TYPE_CHECKING:
    from planner.doctor.diagnose import Diagnosis
    from planner.run.recipe import RunFile
    from planner.verbs.options import Described


def register(app: typer.Typer) -> None:
    """Add `explain` to the console script."""
    app.command("explain", rich_help_panel="Explain")(explain)


def explain(
    file: Annotated[
        str,
        typer.Argument(
            help="A log or a message in a file (.gz too), a directory of rank logs; - reads what is piped or pasted."
        ),
    ] = "-",
    config: Annotated[
        Path | None, typer.Option(help="The run's config, of any tool that can be imported.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name, where the log does not say.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU name, where the log does not say.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many GPUs the run has.")] = None,
    tool_version: Annotated[
        str | None, typer.Option(help="Version of the tool whose config is given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Say why it ran out of memory, how sure that is, and what to change."""
    from planner.doctor.report import diagnosis_dict, diagnosis_text
    from planner.errors import UsageError, VramwiseError

    imported, unread = None, None
    if config is not None:
        from planner.importers import import_config

        try:
            imported = import_config(config, version=tool_version)
        except VramwiseError as error:  # the message is explained without it
            unread = error
    run = imported.run if imported else None
    found = _diagnose_file(file, model=model, gpu=gpu, gpus=gpus, run=run)
    if unread is not None:
        said = f"config {str(config)[:120]!r} was not read, the message is explained without it: {unread.message}"
        found = replace(found, notes=(said, *found.notes))
    if not found.scan.lines:
        raise UsageError("file: nothing to read", hint="pipe or paste an error message or a log")
    for note in found.notes:
        typer.echo(note, err=True)
    if as_json:
        document = diagnosis_dict(found)
        document["config"] = imported.to_dict() if imported else None
        if unread is not None:
            document["config"] = {"error": unread.message, "hint": unread.hint}
        typer.echo(json.dumps(document, indent=2))
    else:
        show(diagnosis_text(found).removesuffix("\n"))


def _diagnose_file(
    file: str, *, model: str | None, gpu: str | None, gpus: int | None, run: "RunFile | None"
) -> "Diagnosis":
    """Diagnose a file or what is piped; flags win over the config's run."""
    from planner.doctor.diagnose import diagnose
    from planner.doctor.sources import open_log, unpacked
    from planner.errors import UsageError

    def read(source: BinaryIO) -> "Diagnosis":
        if run is None:
            return diagnose(source, model=model, gpu=gpu, gpus=gpus)
        return diagnose(
            source,
            model=model,
            gpu=gpu or run.machine.gpu,
            recipe=run.recipe,
            config_model=run.model or None,
            gpus=gpus or (run.machine.gpus if "gpus" in run.machine.model_fields_set else None),
        )

    if file == "-":
        if sys.stdin.isatty():
            typer.echo("paste the message or the log, then press Ctrl-D", err=True)
        return read(unpacked(sys.stdin.buffer))
    try:
        with open_log(Path(file)) as source:
            return read(source)
    except (OSError, EOFError, LZMAError, zlib.error) as error:
        raise UsageError(
            f"file: cannot read {file[:200]!r} ({getattr(error, 'strerror', None) or error})",
            hint="a log file, a directory of rank logs, or - to read what is piped",
        ) from None


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What a foreign config and a length file add to a plan."""

    prose: str = ""
    document: dict[str, Any] = field(default_factory=dict)


def foreign_extras(described: "Described", *, lengths: Path | None, order: str) -> Extras:
    """Return the length report for `plan --lengths`; the import's report goes to stderr."""
    from planner.errors import UsageError

    document: dict[str, Any] = {}
    prose = ""
    if described.imported is not None:
        from planner.importers.report import report_text

        typer.echo(report_text(described.imported), err=True)
        document["imported"] = described.imported.to_dict()
    if lengths is not None:
        from planner.answers.lengths import ORDERS, assess, read_lengths

        if order not in ORDERS:
            raise UsageError(f"order: {order[:40]!r} is not known", hint=", ".join(ORDERS))
        found = assess(
            read_lengths(lengths),
            described.model,
            described.run.recipe,
            described.machine,
            order=order,
        )
        prose = f"\n\n{found.text()}"
        document["lengths"] = found.to_dict()
    return Extras(prose=prose, document=document)


def export_text(run: "RunFile", tool: str) -> str:
    """Return a run as another tool's settings; what it cannot express goes to stderr."""
    from planner.exporters import export_run

    name, _, version = tool.partition("@")
    exported = export_run(run, name, version=version or None)
    for sentence in exported.left_out:
        typer.echo(f"not expressed: {sentence}", err=True)
    typer.echo(f"start with: {exported.command}", err=True)
    return exported.text
