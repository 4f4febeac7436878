"""profile run, watch, snapshot, compare, calibrate."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from profiler.recording import Recording

profile = typer.Typer(no_args_is_help=True, help="Measure what a real run uses.")


def register(app: typer.Typer) -> None:
    """Add the `profile` group."""
    app.add_typer(profile, name="profile", rich_help_panel="Measure")


def _emit(document: dict[str, Any]) -> None:
    typer.echo(json.dumps({"schema_version": 1, **document}))


@profile.command("run", context_settings={"allow_interspersed_args": False}, no_args_is_help=True)
def run_command(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="Any command line.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results [default: vramwise-DATE-TIME].")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.1, max=100, help="Samples per second.")] = 10.0,
    hooks: Annotated[
        bool, typer.Option(help="Tell phases by torch's hooks, injected when Python starts.")
    ] = True,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Follow every tensor of the device in use: exact, slower."),
    ] = False,
    snapshot: Annotated[
        str, typer.Option(help="CUDA memory snapshot: oom, peak (with history) or none.")
    ] = "oom",
    json_output: Annotated[
        bool,
        typer.Option("--json", help="Print the recording; the command's stdout goes to stderr."),
    ] = False,
) -> None:
    """Run any command unchanged and record its memory; the exit code is the command's."""
    from planner.errors import UsageError
    from profiler.assemble import recordings
    from profiler.launch import LaunchSettings, launch
    from profiler.live import live_line

    if snapshot not in ("oom", "peak", "none"):
        raise UsageError(f"--snapshot: {snapshot!r} is not oom, peak or none")
    folder = out or Path(time.strftime("vramwise-%Y%m%d-%H%M%S"))
    settings = LaunchSettings(
        out=folder,
        rate_hz=rate,
        hooks=hooks,
        follow=follow,
        snapshot=snapshot,
        stdout=sys.stderr if json_output else None,
    )
    with live_line(folder) as on_sample:
        result = launch(command, settings, on_sample=on_sample)
    found = recordings(result)
    _save(found, folder)
    if json_output:
        _emit(found[0].to_dict(events=False))
    _print_recording(found[0], folder)
    raise typer.Exit(result.exit_code)


def _save(found: "list[Recording]", folder: Path) -> None:
    """Write recording.json, timeline.parquet and report.html; a full disk keeps what fits."""
    from profiler.assemble import save_timeline
    from profiler.report import page

    def save_page() -> None:
        (folder / "report.html").write_text(page(found[0]), encoding="utf-8")

    jobs: list[tuple[str, Callable[[], object]]] = [
        ("recording.json", partial(found[0].save, folder / "recording.json"))
    ]
    for each in found[1:]:
        name = f"recording-rank{each.environment['rank']}.json"
        jobs.append((name, partial(each.save, folder / name)))
    jobs.append(("timeline.parquet", lambda: save_timeline(found[0], folder / "timeline.parquet")))
    jobs.append(("report.html", save_page))
    from planner.errors import VramwiseError

    for name, job in jobs:
        try:
            job()
        except ImportError:
            typer.echo(f'{name} left out: pip install "vramwise[app]"', err=True)
        except (OSError, VramwiseError) as error:
            typer.echo(f"{name} could not be written: {error}", err=True)


def _print_recording(recording: "Recording", folder: Path) -> None:
    from rich.console import Console

    from profiler.report import terminal

    console = Console(stderr=True)
    if not console.is_terminal:  # a log file has no width: eight columns of sizes need this much
        console = Console(stderr=True, width=120)
    console.print(terminal(recording))
    console.print(f"results: {folder}/ (recording.json, timeline.parquet, report.html)")


@profile.command("watch")
def watch_command(
    once: Annotated[bool, typer.Option("--once", help="One reading, then exit.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="JSON; implies --once.")] = False,
    rate: Annotated[float, typer.Option(min=0.1, max=20, help="Readings per second.")] = 2.0,
    record: Annotated[
        Path | None, typer.Option(help="Also record every answer of the driver to this file.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Read from such a file instead of this machine's GPUs.")
    ] = None,
) -> None:
    """Show GPU memory live, by GPU and process."""
    from profiler.watch import open_reader, reading_document, watch

    with open_reader(record=record, replay=replay) as reader:
        if json_output:
            _emit(reading_document(reader))
        else:
            watch(reader, once=once, rate_hz=rate)


@profile.command("snapshot")
def snapshot_command(
    file: Annotated[Path, typer.Argument(help="A file of torch.cuda.memory._dump_snapshot().")],
    device: Annotated[int | None, typer.Option(help="GPU number [default: the fullest].")] = None,
    vocab: Annotated[
        int | None, typer.Option(min=2, help="Vocabulary size: tells logits by their shape.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Also save as a recording (JSON).")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """Explain a torch memory snapshot: who owns the peak, how fragmented the pool is."""
    from rich.console import Console

    from profiler.snapshot import read_snapshot
    from profiler.snapshot_analysis import analyse, to_recording
    from profiler.snapshot_report import document, terminal

    analysis = analyse(read_snapshot(file, device=device), vocab=vocab)
    if save is not None:
        to_recording(analysis, subject=file.name).save(save)
    if json_output:
        _emit(document(analysis))
    else:
        Console().print(terminal(analysis))


@profile.command("compare")
def compare_command(
    run: Annotated[Path, typer.Argument(metavar="RUN.YAML", help="The plan's run file.")],
    recording: Annotated[
        Path, typer.Argument(metavar="RECORDING", help="recording.json, or a vLLM log")
    ],
    json_output: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """Put plan and recording side by side, phase by phase, and explain the largest error."""
    from planner.models.hub import find_model
    from planner.plan import plan
    from planner.run.runfile import load_run_file, machine_of
    from profiler.compare import compare, to_text
    from profiler.explain import as_measured, as_planned, explain
    from profiler.vllm_log import load_measured

    run_file = load_run_file(run)
    measured = as_planned(load_measured(recording))
    machine = machine_of(run_file.machine)
    planned = as_measured(plan(find_model(run_file.model), run_file.recipe, machine), measured)
    result = compare(planned, measured)
    reasons = explain(result, planned, measured)
    if json_output:
        _emit({**result.to_dict(), "explanation": reasons})
    else:
        typer.echo("\n".join([to_text(result), "", *reasons]))


@profile.command("calibrate")
def calibrate_command(
    path: Annotated[
        Path | None, typer.Option(help="Where to save [default: ~/.config/vramwise].")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure the processor instead.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """Measure this GPU's context and allocator, matmul, bandwidth and link; later plans use it.

    Takes less than a minute on an idle machine.
    """
    from planner.units import format_bytes
    from profiler.calibration import calibrate, calibrate_cpu, save

    found = calibrate_cpu() if cpu else calibrate()
    file = save(found, path)
    if json_output:
        _emit(found.to_dict())
        return
    typer.echo(f"{found.gpu}, driver {found.driver}, torch {found.torch}")
    sizes = ("torch_total_bytes", "context_bytes", "workspace_bytes", "segment_bytes")
    for name in sizes[:1] if cpu else sizes:
        typer.echo(f"  {name.removesuffix('_bytes'):<14}{format_bytes(getattr(found, name)):>12}")
    for name in ("bandwidth", "host_to_device", "device_to_host"):
        rate = getattr(found, f"{name}_bytes_per_s") / 1e9
        typer.echo(f"  {name:<14}{rate:>9.1f} GB/s")
    for name, rate in (*found.matmul.items(), ("attention", found.attention_flops_per_s)):
        typer.echo(f"  {name:<14}{rate / 1e12:>9.3g} TFLOP/s")
    typer.echo(f"  {'launch':<14}{found.launch_nanoseconds / 1e3:>9.1f} us")
    what = "this CPU" if cpu else "this GPU"
    typer.echo(f"saved to {file}; plans for {what} use it from now on", err=True)
