"""Command line of quantising: `vramwise quantize`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.errors import UsageError
from planner.units import format_bytes, parse_memory

if TYPE_CHECKING:
    from planner.run.recipe import RunFile
    from trainer.config import DatasetSection
    from trainer.quantize.job import Fits


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command()(quantize)


def quantize(
    model: Annotated[str, typer.Argument(help="folder or hub id of a 16-bit checkpoint")],
    out: Annotated[Path, typer.Option("--out", help="new folder for the checkpoint")],
    budget: Annotated[
        str | None, typer.Option("--budget", help="bytes of all weights written: 6GiB")
    ] = None,
    fits: Annotated[
        str | None, typer.Option("--fits", help="a card; with --run, what its plan leaves free")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="run.yaml: what --fits plans, whose data is used")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", help="text, or JSONL with text, prompt or messages"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="or prompts of arithmetic, gsm8k, reasoning-gym/TASK"),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="bnb (to train), compressed-tensors (vLLM), both")
    ] = "bnb",
    dtype: Annotated[
        str, typer.Option("--dtype", help="of what is not quantised: bf16 or fp16")
    ] = "bf16",
    tokens: Annotated[
        int, typer.Option("--tokens", min=256, help="to measure on; a fourth more is kept apart")
    ] = 4096,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of the labels drawn")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Write MODEL in four bits, and in more where that spares most harm, within a budget of bytes.

    Harm is measured on your own text, layer by layer: memory is one layer's, and an interrupted command goes
    on where it was. Every weight is read back and compared; quantize.json in the folder says what was chosen.
    """
    from trainer.quantize.job import Job
    from trainer.quantize.job import quantize as work
    from trainer.quantize.source import local_folder
    from trainer.run import quiet

    quiet()
    section, root, fitted = _asked(fits, run, calibration, task)
    job = Job(
        model=local_folder(model),
        out=out,
        budget=None if budget is None else parse_memory(budget, field="budget"),
        fits=fitted,
        data=section,
        root=root,
        format=form,
        dtype=dtype,
        tokens=tokens,
        seed=seed,
    )
    document = work(job, say=lambda text: typer.echo(text, err=True))
    if json_output:
        import json

        typer.echo(json.dumps(document))
        return
    for name, made in document["formats"].items():
        stored = ", ".join(f"{count} in {word}" for word, count in made["blocks"].items())
        typer.echo(
            f"{name}: {format_bytes(made['bytes'])} ({made['bytes']:,} B), KL {made['measured_kl']:.4f} nats a "
            f"token on text held out (predicted {made['predicted_kl']:.4f}); linears: {stored}"
        )
    typer.echo(f"wrote {document['output']}")


def _asked(
    fits: str | None, run: Path | None, calibration: Path | None, task: str | None
) -> "tuple[DatasetSection, Path, Fits | None]":
    """Return the data, the folder its path counts from, and the run to fit."""
    from planner.run.runfile import load_run_file
    from trainer.config import DatasetSection

    if (fits is not None) and run is None:
        raise UsageError(
            f"--fits: {fits} needs --run run.yaml, whose plan says what it leaves free"
        )
    if calibration is not None and task is not None:
        raise UsageError("--calibration and --task: give one of them")
    read = load_run_file(run) if run is not None else None
    fitted = None if fits is None or read is None else _fits(fits, read)
    if calibration is not None:
        return DatasetSection(name=str(calibration)), Path.cwd(), fitted
    if task is not None:
        return DatasetSection(name=task), Path.cwd(), fitted
    if run is not None and read is not None and read.train.get("dataset"):
        from planner.run.runfile import validate

        data = validate(DatasetSection, read.train["dataset"], label="train.dataset")
        return data, run.parent, fitted
    raise UsageError(
        "calibration: no text to measure on",
        hint="--calibration FILE, --task NAME, or --run run.yaml with train.dataset",
    )


def _fits(card: str, run: "RunFile") -> "Fits":
    from planner.run.runfile import machine_of
    from trainer.quantize.job import Fits

    section = run.machine.model_copy(update={"gpu": card, "vram": None})
    return Fits(run=run, machine=machine_of(section), card=card)
