"""profile run, watch, snapshot, compare, calibrate."""

import json
import sys
import time
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
        bool, typer.Option("--follow", help="Follow every CPU tensor: exact, slower.")
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

    jobs = [("recording.json", lambda: found[0].save(folder / "recording.json"))]
    for each in found[1:]:
        name = f"recording-rank{each.environment['rank']}.json"
        jobs.append((name, lambda each=each, name=name: each.save(folder / name)))  # type: ignore[misc]
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
