"""`vramwise trace`: run the real step on fake tensors and put it beside the plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.verbs.options import describe, with_run_options

if TYPE_CHECKING:
    from planner.machines.machine import Machine
    from planner.verbs.options import Described
    from profiler.recording import Recording


def register(app: typer.Typer) -> None:
    """Add the verb `trace`."""
    app.command("trace", rich_help_panel="Measure")(with_run_options(_trace))


def _trace(
    subject: Annotated[str, typer.Argument(help="Model, folder, hub id or run.yaml.")],
    *,
    flags: dict[str, Any],
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Trace only so many decoder layers.")
    ] = None,
    rank: Annotated[
        int, typer.Option("--rank", min=0, help="Which of several GPUs: they differ by padding.")
    ] = 0,
    steps: Annotated[int, typer.Option("--steps", min=1, max=20, help="Optimizer steps.")] = 2,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=1, help="Give up after so many seconds.")
    ] = 600.0,
    save: Annotated[Path | None, typer.Option("--save", help="Write the recording.")] = None,
    alloc_conf: Annotated[
        str, typer.Option("--alloc-conf", help="PYTORCH_CUDA_ALLOC_CONF to simulate.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run the real training step without a GPU and compare every byte with the plan.

    The step runs on fake tensors: shapes without data, so an 8B model takes seconds and no memory.
    """
    from planner.errors import MissingExtraError
    from planner.plan import plan

    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("trace", "train") from error
    from planner.allocator.caching import AllocatorConfig, replay
    from planner.families import model_spec_from_config
    from profiler.compare import compare, to_text
    from profiler.subjects.build import shorten
    from profiler.subjects.model_config import config_of
    from profiler.trace import trace
    from trainer.dry_run import subject_for

    described, machine = _described(subject, flags)
    allocator = AllocatorConfig.parse(alloc_conf)
    config = config_of(described)
    model = described.model
    if layers is not None:
        config = shorten(config, layers)
        model = model_spec_from_config(config, name=model.name, source=model.source)
    recipe = described.run.recipe
    planned = plan(model, recipe, described.machine)
    gpu = described.machine.gpu
    step = subject_for(planned.resolved, recipe, config, gpu=gpu, steps=steps, rank=rank)
    with _progress(quiet=as_json) as progress:
        recording = trace(step, time_limit_s=time_limit, progress=progress, allocator=allocator)
    compared = compare(planned, recording)
    pool = replay(
        recording.events,
        config=allocator,
        capacity_bytes=machine.vram_bytes if machine else None,
        context_bytes=machine.context_bytes if machine else 0,
    )
    if save is not None:
        recording.save(save)
        typer.echo(f"wrote {save}", err=True)
    if as_json:
        import json

        typer.echo(json.dumps(_document(recording, compared.to_dict(), pool.failure)))
        return
    typer.echo(_heading(recording))
    typer.echo(to_text(compared))
    typer.echo(_details(recording))
    if pool.failure is not None:
        failure = pool.failure
        typer.echo(
            f"\nOut of memory on {described.machine.label} in {failure.phase}, {failure.module or '?'}, "
            f"{failure.op}:\n{failure.message}"
        )


def _described(subject: str, flags: dict[str, Any]) -> tuple["Described", "Machine | None"]:
    """Return the run, and the machine if one was named: a trace needs none."""
    from planner.errors import UsageError

    try:
        described = describe(subject, flags)
    except UsageError as error:
        if flags.get("gpu") or flags.get("vram") or "no GPU given" not in error.message:
            raise
        return describe(subject, {**flags, "vram": "1TiB"}), None
    return described, described.machine


def _progress(*, quiet: bool) -> Any:
    """Return a context whose value reports (operators, phase) on stderr; None when nobody looks."""
    import contextlib
    import sys

    if quiet or not sys.stderr.isatty():
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def bar() -> Any:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task("building the model", total=None)
            yield lambda operators, phase: shown.update(
                task, description=f"tracing {phase}: {operators:,} operators"
            )

    return bar()


def _heading(recording: "Recording") -> str:
    from planner.units import format_bytes

    seconds = recording.environment.get("seconds", 0)
    reserved = recording.peak_reserved_bytes or 0
    return (
        f"{recording.subject}: peak {format_bytes(recording.peak_bytes)} in {recording.peak_phase} "
        f"({recording.peak_op}, {recording.peak_module or 'no module'}), "
        f"about {format_bytes(reserved)} reserved; traced in {seconds} s\n"
    )


def _details(recording: "Recording") -> str:
    from planner.units import format_bytes

    lines = ["", "largest at the peak:"]
    lines.extend(
        f"  {format_bytes(tensor.bytes):>11}  {tensor.term:12} {tensor.dtype:9} "
        f"{'x'.join(map(str, tensor.shape)):22} {tensor.op}  {tensor.module}"
        for tensor in recording.largest
    )
    lines.extend(f"note: {note}" for note in recording.notes)
    return "\n".join(lines)


def _document(recording: "Recording", compared: dict[str, Any], failure: Any) -> dict[str, Any]:
    from dataclasses import asdict

    document = recording.to_dict(events=False)
    document["phases"] = [
        {
            "name": phase.name,
            "total_bytes": phase.peak_bytes,
            "terms": [{"name": n, "bytes": size} for n, size in phase.terms_bytes.items()],
            "peak_op": phase.peak_op,
            "peak_module": phase.peak_module,
        }
        for phase in recording.phases
    ]
    return document | {
        "compare": compared,
        "out_of_memory": None if failure is None else asdict(failure),
    }
