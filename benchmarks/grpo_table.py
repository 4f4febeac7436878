"""Llama-3.1-8B, GRPO, 20,480 tokens, 8 generations, LoRA: what a step allocates, by implementation.

`python benchmarks/grpo_table.py [--json] [--layers N]`. Each row is the implementation's real code run by
torch on fake tensors (profiler.trace), phase by phase: allocations instead of assumptions. Ours is the
code that trains, set as `vramwise train` sets it by default. Generation is not part of it. The published
figures for this job, 510.8 and 54.3, are in `vramwise published`. `targets` are the limits that this
project set itself, and whether the rows keep them.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model, load_catalogue
from planner.run.resolve import resolve
from planner.run.runfile import make_recipe
from planner.units import GiB
from profiler.trace import trace
from trainer.dry_run import subject_for
from trainer.preflight import settled
from trainer.vocab_tiles import tiles_as_on

SCHEMA_VERSION = 1
MODEL = "llama-3.1-8b"
CONTEXT, GENERATIONS, RANK = 20480, 8, 16
TIME_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation and how it is set."""

    name: str
    framework: str
    sequences: int
    fields: dict[str, Any]


LORA: dict[str, Any] = {"method": "lora", "dtype": "bf16"}
OLD_LORA: dict[str, Any] = {**LORA, "checkpointing": "full", "mixed_precision": "bf16"}
"""Its own defaults are no checkpointing and no autocast, which nobody kept."""
ROWS = (
    Row("vramwise, bf16 LoRA", "vramwise", 1, LORA),
    Row("vramwise, QLoRA", "vramwise", 1, {"method": "qlora", "dtype": "bf16"}),
    Row("TRL 1.16, fused head", "trl", 1, LORA),
    Row("TRL 1.16, fused head", "trl", 8, LORA),
    Row("TRL 0.15, full logits", "trl-0.15", 1, OLD_LORA),
    Row("TRL 0.15, full logits", "trl-0.15", 8, OLD_LORA),
)
TARGETS = {"vramwise, bf16 LoRA": 19 * GiB, "vramwise, QLoRA": 11 * GiB}
"""Peak of the training phases at one sequence per micro-batch."""


def traced(row: Row, *, layers: int | None) -> dict[str, Any]:
    """Trace one row."""
    started = time.process_time()
    recipe = make_recipe(
        task="grpo",
        framework=row.framework,
        context=CONTEXT,
        num_generations=GENERATIONS,
        micro_batch_size=row.sequences,
        lora={"rank": RANK},
        **row.fields,
    )
    if row.framework == "vramwise":
        recipe = settled(recipe)
    resolved = resolve(catalogue_model(MODEL), recipe, make_machine("h200"))
    config = load_catalogue()[MODEL]["config"]
    subject = subject_for(resolved, recipe, config, layers=layers)
    with tiles_as_on("cuda"):
        recording = trace(subject, time_limit_s=TIME_LIMIT_S)
    return {
        "implementation": row.name,
        "framework": row.framework,
        "sequences_per_micro_batch": row.sequences,
        "peak_bytes": recording.peak_bytes,
        "peak_phase": recording.peak_phase,
        "peak_op": recording.peak_op,
        "host_peak_bytes": recording.host_peak_bytes,
        "phases": [
            {"name": phase.name, "peak_bytes": phase.peak_bytes, "terms_bytes": phase.terms_bytes}
            for phase in recording.phases
        ],
        "cpu_s": round(time.process_time() - started, 1),
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the limits beside the peaks of the rows that have one."""
    return [
        {
            "implementation": row["implementation"],
            "limit_bytes": limit,
            "peak_bytes": row["peak_bytes"],
            "met": row["peak_bytes"] <= limit,
        }
        for row in rows
        if row["sequences_per_micro_batch"] == 1
        and (limit := TARGETS.get(row["implementation"])) is not None
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--layers", type=int, default=None, help="trace only so many layers")
    parser.add_argument("--only", default="", help="framework to trace alone")
    parser.add_argument("--sequences", type=int, default=0, help="micro-batch to trace alone")
    options = parser.parse_args(arguments)
    rows = []
    for row in ROWS:
        if options.only not in ("", row.framework) or options.sequences not in (0, row.sequences):
            continue
        rows.append(traced(row, layers=options.layers))
        if sys.stderr.isatty():
            print(f"{row.name}: {rows[-1]['peak_bytes'] / GiB:.2f} GiB", file=sys.stderr)
    document = {
        "schema_version": SCHEMA_VERSION,
        "model": MODEL,
        "context": CONTEXT,
        "generations": GENERATIONS,
        "layers": options.layers,
        "rows": rows,
        "targets": targets(rows) if options.layers is None else [],
    }
    if options.json:
        print(json.dumps(document))
        return
    show(document)


def show(document: dict[str, Any]) -> None:
    """Print GiB by phase."""
    names = ("forward", "loss", "backward", "step")
    print(f"{'implementation':<24}{'rows':>5}{'peak GiB':>10}" + "".join(f"{n:>10}" for n in names))
    for made in document["rows"]:
        peaks = {phase["name"]: phase["peak_bytes"] / GiB for phase in made["phases"]}
        cells = "".join(f"{peaks.get(name, 0):>10.2f}" for name in names)
        print(
            f"{made['implementation']:<24}{made['sequences_per_micro_batch']:>5}"
            f"{made['peak_bytes'] / GiB:>10.2f}{cells}"
        )
    for target in document["targets"]:
        print(
            f"target: {target['implementation']} at most {target['limit_bytes'] / GiB:.0f} GiB: "
            f"{'met' if target['met'] else 'missed'} ({target['peak_bytes'] / GiB:.2f})"
        )


if __name__ == "__main__":
    main()
