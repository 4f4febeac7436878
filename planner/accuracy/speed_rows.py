"""A row of throughput.csv -> the plan of its run, and what one of its steps is counted in."""

import re
from math import exp, log, sqrt
from statistics import NormalDist
from typing import NamedTuple

from planner.accuracy.names import machine_named
from planner.accuracy.notebooks import data_set
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Layout, Row
from planner.accuracy.sft_rows import run_of
from planner.plan import Plan, plan
from planner.run.recipe import Recipe

COLUMNS = {
    "source": "source_family",
    "version": "framework_version",
    "quant": "base_quant",
    "checkpointing": "grad_ckpt",
    "attention": "attn",
    "url": "path",
}
"""throughput.csv's names -> sft.csv's."""


class SpeedRun(NamedTuple):
    """A run, planned at its typical length."""

    row: Row
    plan: Plan
    seconds: float
    """Of one optimizer step (or micro-batch), as the row says."""
    tokens: float
    """That a step trains on, of one rank."""
    micro_batches: float
    """In what `seconds` measures."""


def training_row(row: Row) -> Row:
    """Return the row with the columns of sft.csv, and one length instead of a distribution."""
    fields = {COLUMNS.get(name, name): value for name, value in row.fields.items()}
    method = re.sub(r"-(sft|rl-trainer|grpo|swe)$", "", fields["method"])
    if method in ("ia3", "adalora", "boft", "lokr", "oft", "vera"):
        pass
    dtype = fields.get("dtype", "")
    weights = {"bfloat16": "bf16", "float16": "fp16", "bf16-true": "bf16", "bf16": "bf16"}.get(
        dtype, ""
    )
    mixed = ""
    if dtype.startswith("fp32 master"):
        weights, mixed = "fp32", "bf16"
    fields |= {"method": method, "weights_dtype": weights, "mixed_precision": mixed}
    fields["quantity"] = "peak_allocated"
    fields["kernels"] = fields.get("kernels", "").replace("float8 linears", "float8")
    fields["parallelism"] = _parallelism(row)
    if re.search(r"/", fields.get("grad_accum", "")):
        fields["grad_accum"] = "1"
    return Row(Layout.SFT, fields)


def _parallelism(row: Row) -> str:
    text = row["parallelism"]
    if text.startswith("fsdp or ddp"):
        # accelerate.yaml of fms-acceleration: FSDP, adapters of quantised bases in DDP
        return "fsdp"
    found = re.match(r"fsdp(\d*) cp(\d+)", text)
    if found and int(found[2]) > 1:
        return f"fsdp, CP {found[2]}"
    return text


def mean_of_cut(mean: float, deviation: float, cap: int) -> float:
    """Return the mean of log-normal lengths that are cut at `cap`."""
    spread = log(1 + (deviation / mean) ** 2)
    middle, width = log(mean) - spread / 2, sqrt(spread)
    steps = [NormalDist(middle, width).inv_cdf((k + 0.5) / 64) for k in range(64)]
    return sum(min(cap, exp(step)) for step in steps) / len(steps)


def length_of(row: Row) -> tuple[int, float]:
    """Return the padded tokens of a sample in a micro-batch and its own tokens; NotCovered without."""
    text = row["seq_len"].replace(",", "")
    if text.isdigit():
        return int(text), float(text)
    found = re.search(r"cut at (\d+) \(dataset mean ([\d.]+)\+-([\d.]+)\)", text)
    if found:
        own = mean_of_cut(float(found[2]), float(found[3]), int(found[1]))
        return int(own), own
    found = re.search(r"mean ([\d.]+)", text)
    if found:
        own = float(found[1])
        return int(own), own
    found = re.search(r"max (\d+) data (\S+)", text)
    data = data_set(found[2]) if found else None
    if found and data is not None:
        own = min(int(found[1]), data.median or int(found[1]))
        return int(own), float(own)
    raise NotCovered("samples without lengths: the row states a cap or nothing")


def step_seconds(row: Row, tokens: float, sequences: float, gpus: int) -> float:
    """Return the row's figure as seconds of one step; `tokens` and `sequences`: of a step on one rank."""
    value, unit = row.number("value"), row["unit"]
    if not value or value <= 0:
        raise NotCovered("the row's figure is no positive number")
    if row["quantity"] == "tokens_per_s":
        printed = re.search(r"s/step ([\d.]+)", row["notes"])
        if printed:
            return float(printed[1])
        return tokens * (gpus if "all GPUs" in unit else 1) / value
    if row["quantity"] in ("s_per_step", "s_per_micro_batch"):
        return value
    if row["quantity"] == "samples_per_s":
        return sequences * gpus / value
    found = re.search(r"for ([\d,]+) samples of ([\d,]+) tokens on (\d+) GPUs", unit)
    if row["quantity"] == "s_total" and found:
        return value * sequences * gpus / float(found[1].replace(",", ""))
    found = re.search(r"for (\d+) epoch\(s\) of \S+ \(about ([\d,]+) samples\)", unit)
    if row["quantity"] == "s_total" and found:
        return value * sequences * gpus / (int(found[1]) * float(found[2].replace(",", "")))
    raise NotCovered(f"the figure {row['quantity'][:40]!r} is no step time")


def training_run(row: Row) -> SpeedRun:
    """Return the plan of a training row; raises NotCovered with the reason."""
    if "grpo" in row["method"] or "swe" in row["method"]:
        raise NotCovered("rollout and training together")
    padded, own = length_of(row)
    as_sft = training_row(row).changed(seq_len=str(padded))
    run = run_of(as_sft)
    recipe: Recipe = run.recipe
    gpus = row.integer("n_gpus") or 1
    machine = machine_named(row["gpu"].rstrip("?"), gpus)
    made = plan(run.model, recipe, machine)
    r = made.resolved
    count = 1 if row["quantity"] == "s_per_micro_batch" else max(1, r.grad_accum)
    sequences = r.sequences * count
    tokens = r.sequences * own * count
    found = step_seconds(row, tokens, sequences, gpus)
    return SpeedRun(row, made, found, tokens, count)
