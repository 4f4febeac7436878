"""Folds a checkpoint's adapters into its base model: a plain model that any tool loads."""

import json
from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.run.recipe import Attention, Method, Recipe
from planner.run.runfile import load_run_file
from trainer import checkpoint as checkpoints
from trainer.model import DTYPES, load_policy

SCHEMA_VERSION = 1


def merge_checkpoint(
    source: Path, output: Path, *, base: str | None = None, dtype: str = "bf16"
) -> dict[str, Any]:
    """Write base + adapters of `source` (a run's output or one checkpoint) to the new folder `output`.

    A base that its run quantised is loaded as it was before, one whose files are quantised is dequantised:
    merged into 4-bit weights the adapters would be rounded away.
    Raises UsageError when there is nothing to merge or the folder exists.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype: {dtype!r} is not allowed", hint=f"one of {', '.join(DTYPES)}")
    if output.exists():
        raise UsageError(f"output: {output} exists", hint="name a new folder")
    folder = (
        source if (source / "adapter_config.json").exists() else checkpoints.latest(source).path
    )
    adapter_file = folder / "adapter_config.json"
    if not adapter_file.exists():
        raise UsageError(f"{folder} holds a whole model: there is nothing to merge")
    base = base or _base_of(folder, adapter_file)
    recipe = Recipe(method=Method.FULL, dtype=dtype, attention=Attention.SDPA)
    policy = load_policy(base, recipe=recipe, device="cpu")

    from peft import PeftModel

    merged = PeftModel.from_pretrained(policy.model, str(folder)).merge_and_unload()
    partial = output.with_name(f".{output.name}.part")
    merged.save_pretrained(partial)
    policy.tokenizer.save_pretrained(partial)
    partial.rename(output)
    return {
        "schema_version": SCHEMA_VERSION,
        "output": str(output),
        "base": base,
        "checkpoint": str(folder),
        "dtype": dtype,
        "parameters": sum(parameter.numel() for parameter in merged.parameters()),
    }


def _base_of(folder: Path, adapter_file: Path) -> str:
    """Return the base model that the run names, or else the adapter's own note."""
    run_file = folder.parent.parent / checkpoints.RUN_FILE
    if run_file.exists():
        return load_run_file(run_file).model
    name = json.loads(adapter_file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise UsageError(f"{folder} doesn't say its base model", hint="give --base")
    return str(name)
