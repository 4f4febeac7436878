"""Llama-3.1-8B, GRPO, 20,480 tokens, 8 generations, LoRA: what a step allocates, by implementation.

`python benchmarks/grpo_table.py [--json] [--layers N]`. Each row is the implementation's real code run by
torch on fake tensors (profiler.trace), phase by phase: allocations instead of assumptions. Generation is
not part of it. The published figures for this job, 510.8 and 54.3, are in `vramwise published`.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.hub import catalogue_model, load_catalogue
from planner.machine import make_machine
from planner.resolve import resolve
from planner.runfile import make_recipe
from planner.units import GiB
from profiler.trace import trace
from trainer.dry_run import subject_for
from trainer.preflight import settled

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


ROWS = (
    Row("vramwise, bf16 LoRA", "vramwise", 1, {"method": "lora", "tiled_mlp": True}),
    Row("vramwise, QLoRA", "vramwise", 1, {"method": "qlora", "tiled_mlp": True}),
    Row("TRL 1.16, fused head", "trl", 1, {"method": "lora", "dtype": "bf16"}),
    Row("TRL 1.16, fused head", "trl", 8, {"method": "lora", "dtype": "bf16"}),
    Row("TRL 0.15, full logits", "trl-0.15", 8, {"method": "lora", "dtype": "bf16"}),
)


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


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=None, help="trace only so many layers")
    parser.add_argument("--only", default="", help="framework to trace alone")
    options = parser.parse_args()
    rows = []
    for row in ROWS:
        if options.only and row.framework != options.only:
            continue
        rows.append(traced(row, layers=options.layers))
        print(f"{row.name}: {rows[-1]['peak_bytes'] / GiB:.2f} GiB", file=sys.stderr, flush=True)
    document = {
        "schema_version": SCHEMA_VERSION,
        "model": MODEL,
        "context": CONTEXT,
        "generations": GENERATIONS,
        "layers": options.layers,
        "rows": rows,
    }
    if options.json:
        print(json.dumps(document))
        return
    names = ("forward", "loss", "backward", "step")
    print(f"{'implementation':<24}{'rows':>5}{'peak GiB':>10}" + "".join(f"{n:>10}" for n in names))
    for made in rows:
        peaks = {phase["name"]: phase["peak_bytes"] / GiB for phase in made["phases"]}
        cells = "".join(f"{peaks.get(name, 0):>10.2f}" for name in names)
        print(
            f"{made['implementation']:<24}{made['sequences_per_micro_batch']:>5}"
            f"{made['peak_bytes'] / GiB:>10.2f}{cells}"
        )


if __name__ == "__main__":
    main()
