"""A row of throughput.csv -> the plan of its run, and what one of its steps is counted in."""

import re
from math import exp, log, sqrt
from statistics import NormalDist
from typing import NamedTuple

from planner.accuracy.names import machine_named, model_named
from planner.accuracy.notebooks import DataSet, data_set, quantile
from planner.accuracy.prediction import NotCovered
from planner.accuracy.rows import Layout, Row
from planner.accuracy.sft_recipe import recipe_of
from planner.accuracy.sft_rows import run_of
from planner.plan import Plan, plan
from planner.run.recipe import EngineKind, EngineSection, ParallelSection, Recipe, Task

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
    longest: int = 0
    """Tokens of the longest completion of a GRPO step."""


def training_row(row: Row) -> Row:
    """Return the row with the columns of sft.csv, and one length instead of a distribution."""
    fields = {COLUMNS.get(name, name): value for name, value in row.fields.items()}
    method = re.sub(r"-(sft|rl-trainer|grpo|swe)$", "", fields["method"])
    if method in OTHER_PRODUCTS:
        raise NotCovered(f"the products of {method} are not those of LoRA, and not counted")
    dtype = fields.get("dtype", "")
    weights = {"bfloat16": "bf16", "float16": "fp16", "bf16-true": "bf16", "bf16": "bf16"}.get(
        dtype, ""
    )
    mixed = ""
    if dtype.startswith("fp32 master"):
        weights, mixed = "fp32", "bf16"
    fields |= {"method": method, "weights_dtype": weights, "mixed_precision": mixed}
    fields["quantity"] = "peak_allocated"
    framework = fields["framework"].lower()
    fields["framework"] = next(
        (name for start, name in NEAREST if framework.startswith(start)), framework
    )
    if framework.startswith("litgpt 8641822"):
        fields["source_family"] = "litgpt-tables"  # whose law is that year's
    fields["kernels"] = fields.get("kernels", "").replace("float8 linears", "float8")
    fields["parallelism"] = _parallelism(row)
    fields["compile"] = "yes" if fields.get("compile", "").startswith(("True", "layers")) else ""
    recomputes = fields.get("grad_ckpt", "")
    fields["grad_ckpt"] = CHECKPOINTING.get(recomputes, recomputes)
    if re.search(r"/", fields.get("grad_accum", "")):
        fields["grad_accum"] = "1"
    return Row(Layout.SFT, fields)


NEAREST = (("prime-rl", "torchtitan"), ("fsdp_qlora", "torchtune"), ("litgpt", "litgpt"))
"""Code bases without a law of their own -> the nearest: fully_shard and compiled layers; a 4-bit base
whose stream stays in 16 bits."""
CHECKPOINTING = {"Recompute": "full", "selective (op)": "selective(op)"}
"""prime-rl's and torchtitan's words -> sft.csv's."""
OTHER_PRODUCTS = frozenset({"boft", "oft", "lokr", "vera", "adalora"})
"""PEFT methods that make their matrices anew in every forward."""


def _parallelism(row: Row) -> str:
    text = row["parallelism"]
    if text.startswith("fsdp or ddp"):
        # accelerate.yaml of fms-acceleration: FSDP, adapters of quantised bases in DDP
        return "fsdp"
    whole = row["source"] == "Qwen README" and row["method"] == "full"
    if text == "zero" or whole:
        return "zero3"  # Qwen's finetune_ds.sh, which trains all weights: ds_config_zero3.json, on one GPU too
    found = re.match(r"fsdp(\d*) cp(\d+)", text)
    if found and int(found[2]) > 1:
        return f"fsdp, CP {found[2]}"
    return text


QUANTILES = 64


def mean_below(mean: float, deviation: float, cap: int) -> float:
    """Return the mean of log-normal lengths of which those above `cap` are dropped.

    ms-swift 1.5 and 2: truncation_strategy "delete" (planner/accuracy/lengths.py).
    """
    spread = log(1 + (deviation / mean) ** 2)
    logs = NormalDist(log(mean) - spread / 2, sqrt(spread))
    kept = logs.cdf(log(cap))
    return (
        sum(exp(logs.inv_cdf(kept * (k + 0.5) / QUANTILES)) for k in range(QUANTILES)) / QUANTILES
    )


def longest_in_batch(data: DataSet, cap: int, batch: int) -> float:
    """Return the mean length that a micro-batch of `batch` samples is padded to."""
    if data.median is None:
        return float(cap)
    shares = [((k + 0.5) / QUANTILES) ** (1 / batch) for k in range(QUANTILES)]
    top = min(cap, data.longest or cap)
    return sum(min(top, quantile(data, share, SAMPLES)) for share in shares) / QUANTILES


SAMPLES = 500
"""Of a notebook's run, about: of so many the longest is known."""
ALPACA = "unsloth/alpaca-cleaned"


def length_of(row: Row) -> tuple[int, float]:
    """Return the padded tokens of a sample in a micro-batch and its own tokens; NotCovered without."""
    text = row["seq_len"].replace(",", "")
    if text.isdigit():
        return int(text), float(text)
    found = re.search(r"cut at (\d+) \(dataset mean ([\d.]+)\+-([\d.]+)\)", text)
    if found:
        own = mean_below(float(found[2]), float(found[3]), int(found[1]))
        return int(own), own
    found = re.search(r"mean ([\d.]+)", text)
    if found:
        own = float(found[1])
        return int(own), own
    batch = row.integer("micro_batch") or 1
    found = re.search(r"max (\d+) data (\S+)", text)
    data = data_set(found[2]) if found else None
    if found and data is not None:
        own = longest_in_batch(data, int(found[1]), batch)
        return int(own), own
    found = re.search(r"\(alpaca\), longest (\d+)", text)
    data = data_set(ALPACA)
    if found and data is not None:
        own = longest_in_batch(data, int(found[1]), batch)
        return int(own), own
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


def divided(row: Row, recipe: Recipe) -> Recipe:
    """Return the recipe with the sequence parallelism that ms-swift's rows write as `sp4 dp2`: Ulysses.

    Its ranks are planned under the Trainer that ms-swift subclasses, whose law has Ulysses.
    """
    found = re.match(r"sp(\d+) dp\d+", row["parallelism"])
    if not found or int(found[1]) == 1:
        return recipe
    fields = {"context": int(found[1]), "context_kind": "ulysses"}
    parallel = ParallelSection.model_validate(fields)
    return recipe.model_copy(update={"parallel": parallel, "framework": "hf-trainer"})


def training_run(row: Row) -> SpeedRun:
    """Return the plan of a training row; raises NotCovered with the reason."""
    padded, own = length_of(row)
    as_sft = training_row(row).changed(seq_len=str(padded))
    run = run_of(as_sft)
    recipe = divided(row, run.recipe)
    gpus = row.integer("n_gpus") or 1
    machine = machine_named(row["gpu"].rstrip("?"), gpus)
    made = plan(run.model, recipe, machine)
    r = made.resolved
    count = 1 if row["quantity"] == "s_per_micro_batch" else max(1, r.grad_accum)
    sequences = r.sequences * count
    whole = (made.whole or (run.model, r))[1].layout
    share = whole.data / max(1, gpus if whole.gpus == gpus else whole.gpus)
    tokens = r.sequences * own * count * share
    found = step_seconds(row, tokens, sequences * share, gpus)
    return SpeedRun(row, made, found, tokens, count)


PROMPT = 128
"""Tokens of a prompt of the notebooks, which state completions alone: a line of GSM8K and instructions."""


def grpo_run(row: Row) -> SpeedRun:
    """Return the plan of a GRPO step, rollout and all; raises NotCovered with the reason."""
    found = re.search(r"completion mean ([\d.]+).*?(?:max_seq (\d+)|$)", row["seq_len"])
    generations = re.search(r"num_generations (\d+)", row["notes"])
    if not found or not generations or (row.integer("n_gpus") or 1) > 1:
        raise NotCovered("a GRPO step whose completions, groups or split over GPUs are not stated")
    mean = round(float(found[1]))
    as_sft = training_row(row)
    model = model_named(row["model"])
    base = recipe_of(as_sft.changed(seq_len="1024"), model)
    fast = "fast_inference=True" in row["notes"]
    kind = EngineKind.VLLM_SHARED if fast else EngineKind.TRANSFORMERS
    recipe = Recipe(
        task=Task.GRPO,
        method=base.method,
        framework=f"unsloth~{row['version']}" if row["version"] else "unsloth",
        quantization=base.quantization,
        lora=base.lora,
        dtype="fp16" if row["gpu"] == "t4" else "bf16",
        micro_batch_size=row.integer("micro_batch") or 1,
        gradient_accumulation=row.integer("grad_accum") or 1,
        num_generations=int(generations[1]),
        prompt_length=PROMPT,
        completion_length=mean,
        engine=EngineSection(kind=kind),
    )
    made = plan(model, recipe, machine_named(row["gpu"], 1))
    longest = max(mean, int(found[2] or 0) - PROMPT)
    value = row.number("value")
    if not value or value <= 0:
        raise NotCovered("the row's figure is no positive number")
    return SpeedRun(row, made, value, float(made.resolved.tokens), 1, longest)
