"""`vramwise quantize` from its arguments to folders and a report: measure, choose, write, check."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from planner.errors import UsageError, VramwiseError
from planner.families import model_spec_from_config
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import VLLM, Method, Recipe, RunFile
from planner.units import format_bytes
from trainer.config import DatasetSection
from trainer.devices import run_device
from trainer.metrics import Progress
from trainer.model import DTYPES, load_tokenizer
from trainer.quantize.calibration import Calibration, read_calibration
from trainer.quantize.card import report, write_card
from trainer.quantize.choice import KEPT, Choice, Group, choose, curve, groups
from trainer.quantize.files import config, fixed_bytes, stored_tensors, write
from trainer.quantize.formats import Format
from trainer.quantize.harm import Linear, Measurement, check_sizes
from trainer.quantize.registry import WORDS, formats
from trainer.quantize.streamed import Files, Streamed, Weights
from trainer.say import Say, silent

STATE_VERSION = 1
"""Of what is kept between an interrupted measurement and the next; another one begins anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fits:
    """A run, and the machine whose memory its plan may fill."""

    run: RunFile
    machine: Machine
    card: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is asked: one of `budget` (bytes) and `fits`."""

    model: Path
    out: Path
    budget: int | None
    fits: Fits | None
    data: DatasetSection
    root: Path
    """Where the data's relative path counts from."""
    format: str = "bnb"
    dtype: str = "bf16"
    tokens: int = 4096
    seed: int = 0


def quantize(job: Job, *, say: Say = silent, quiet: bool = False) -> dict[str, Any]:
    """Write what `job` asks and return its report; raises VramwiseError, and then `job.out` is not there."""
    began = time.monotonic()
    _check(job)
    chosen_formats, dtype = formats(job.format), DTYPES[job.dtype]
    model = Streamed(job.model, device=run_device())
    for index in range(len(model.layers)):
        check_sizes(model.linears(index))
    data = read_calibration(
        load_tokenizer(str(job.model)), job.data, root=job.root, tokens=job.tokens
    )
    folder = job.out.with_name(f".{job.out.name}.quantize")
    partial = folder / "out"
    try:
        _begin(folder, _key(job, data), say)
        measured = Measurement(
            model,
            folder,
            rows=data.rows,
            held=data.held,
            formats=chosen_formats,
            dtype=dtype,
            seed=job.seed,
        )
        with Progress(measured.parts, quiet=quiet) as progress:
            linears = measured.run(progress.step)
        shutil.rmtree(partial, ignore_errors=True)
        fixed = fixed_bytes(model, linears, dtype.itemsize)
        # every choice is made before anything is written
        parts = {form.name: groups(linears, form, dtype.itemsize) for form in chosen_formats}
        chosen = {
            form.name: _choose(job, model, form, parts[form.name], fixed, dtype)
            for form in chosen_formats
        }
        reports = {}
        for form in chosen_formats:
            choice = chosen[form.name]
            inside = partial / form.name if len(chosen_formats) > 1 else partial
            say(f"{form.name}: writing {format_bytes(choice.bytes)}")
            written = write(measured, linears, choice, form, inside)
            if written != choice.bytes:
                raise VramwiseError(
                    f"{form.name}: {written:,} B were written, {choice.bytes:,} B were chosen"
                )
            weights = _written_weights(inside, model, linears, choice, form, dtype)
            kl = float(measured.divergence(weights).mean())
            made = report(
                job_model=str(job.model),
                form=form,
                dtype=job.dtype,
                choice=choice,
                linears=linears,
                fixed=fixed,
                width=dtype.itemsize,
                points=curve(parts[form.name], fixed),
                budget=job.budget,
                card=job.fits.card if job.fits else None,
                measured_kl=kl,
                data=data,
                seconds=time.monotonic() - began,
            )
            write_card(made, inside)
            reports[form.name] = made
        partial.rename(job.out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0][:160]
        raise VramwiseError(
            f"{job.out}: cannot be written: {reason}",
            hint=f"nothing is there; what is measured is kept in {folder}, and the same command goes on",
        ) from None
    except VramwiseError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(folder)
    return {"schema_version": 1, "output": str(job.out), "formats": reports}


def _check(job: Job) -> None:
    """Raise UsageError for what can be seen before a weight is read."""
    if job.format not in WORDS:
        raise UsageError(
            f"format: {job.format!r} is not allowed", hint=f"one of {', '.join(WORDS)}"
        )
    if job.dtype not in ("bf16", "fp16"):
        raise UsageError(f"dtype: {job.dtype!r} is not allowed", hint="bf16 or fp16")
    if (job.budget is None) == (job.fits is None):
        raise UsageError("quantize: give one of --budget SIZE and --fits CARD --run run.yaml")
    if job.out.exists():
        raise UsageError(f"out: {job.out} exists", hint="name a new folder")
    try:
        own = json.loads((job.model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model: no config.json can be read in {job.model}: {error}") from None
    if own.get("quantization_config"):
        method = own["quantization_config"].get("quant_method", "quantised")
        raise UsageError(
            f"model: {job.model} is quantised already ({method})", hint="give the 16-bit checkpoint"
        )
    if job.fits is not None:
        _check_run(job.fits.run.recipe, job.format)


def _check_run(recipe: Recipe, word: str) -> None:
    if word != "compressed-tensors" and recipe.engine.kind in VLLM:
        raise UsageError(
            f"format: {word}: the run's engine {recipe.engine.kind.value} reads no bitsandbytes",
            hint="engine.kind: transformers reads it; --format compressed-tensors is what vLLM serves",
        )
    if word != "bnb" and recipe.method is Method.QLORA:
        raise UsageError(
            f"format: {word}: method: qlora trains bitsandbytes weights, compressed-tensors would be "
            "decompressed to 16 bits",
            hint="--format bnb; or --budget for both",
        )


def _key(job: Job, data: Calibration) -> dict[str, Any]:
    """Return what two measurements must share for one to go on with the other's."""
    files = sorted(job.model.glob("*.safetensors"))
    return {
        "version": STATE_VERSION,
        "model": str(job.model.resolve()),
        "files": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "text": hashlib.sha256(torch.cat((data.rows, data.held)).numpy().tobytes()).hexdigest(),
        "format": job.format,
        "dtype": job.dtype,
        "seed": job.seed,
    }


def _begin(folder: Path, key: dict[str, Any], say: Say) -> None:
    """Make the folder of a measurement, or go on with what is there if it is of the same one."""
    note = folder / "key.json"
    if note.exists() and json.loads(note.read_text(encoding="utf-8")) == key:
        say(f"going on with what is measured in {folder}")
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    note.write_text(json.dumps(key), encoding="utf-8")


def _choose(
    job: Job, model: Streamed, form: Format, parts: Sequence[Group], fixed: int, dtype: torch.dtype
) -> Choice:
    if job.budget is not None:
        return choose(parts, fixed, job.budget)
    assert job.fits is not None
    recipe, machine = job.fits.run.recipe, job.fits.machine

    def planned(choice: Choice) -> Plan:
        return plan(spec_of(model, choice, form, dtype), recipe, machine)

    return most_that_fits(parts, fixed, planned, job.fits.card)


def spec_of(model: Streamed, choice: Choice, form: Format, dtype: torch.dtype) -> ModelSpec:
    """Return the planner's model of a choice: that of the config which is written."""
    return model_spec_from_config(
        config(model, choice, form, dtype), name=model.files.folder.name, source="quantize"
    )


def most_that_fits(
    parts: Sequence[Group], fixed: int, planned: Callable[[Choice], Plan], card: str
) -> Choice:
    """Return the choice with most bytes whose plan fits; raises UsageError where not even the least does."""
    sizes = [point.bytes for point in curve(parts, fixed)]
    low, high = 0, len(sizes) - 1
    first = planned(choose(parts, fixed, sizes[low]))
    if first.verdict != "fits":
        raise UsageError(
            f"fits: on {card} the run's verdict is {first.verdict!r} even with every linear in four bits "
            f"(peak {format_bytes(first.peak_bytes)}, capacity {format_bytes(first.capacity_bytes)})",
            hint="vramwise advise run.yaml says what else makes room",
        )
    while low < high:
        middle = (low + high + 1) // 2
        if planned(choose(parts, fixed, sizes[middle])).verdict == "fits":
            low = middle
        else:
            high = middle - 1
    return choose(parts, fixed, sizes[low])


def _written_weights(
    folder: Path,
    model: Streamed,
    linears: Sequence[Linear],
    choice: Choice,
    form: Format,
    dtype: torch.dtype,
) -> Callable[[int | None], Weights]:
    """Return what readers make of the written files: a layer's weights, or those outside the layers (None)."""
    files = Files(folder)
    packed = {linear.name for linear in linears if choice.blocks[linear.name] != KEPT}

    def of(layer: int | None) -> Weights:
        if layer is None:
            prefixes = tuple(f"{name}." for name in model.layer_names)
            return {name: files[name] for name in files if not name.startswith(prefixes)}
        prefix = f"{model.layer_names[layer]}."
        found = {
            f"{name}.weight": form.read_back(stored_tensors(files, name), dtype)
            for name in packed
            if name.startswith(prefix)
        }
        whole = (name for name in model.files if name.startswith(prefix) and name not in found)
        return found | {name: files[name] for name in whole}

    return of
