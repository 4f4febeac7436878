"""Published tables, reproduced line by line from their inputs, beside what the op-level model says.

`unsloth-grpo`: the ten numbers of "Long-context GRPO" (Unsloth, February 2025). `oxen-grpo`: the twenty
cells of Oxen.ai's "GRPO VRAM requirements". The printed values are read from data/measurements; the
reproduced ones are computed here.
"""

import csv
from functools import cache
from typing import Any

from planner.datafiles import data_dir
from planner.errors import UnknownNameError, VramwiseError
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.plan import Plan, plan
from planner.report import table
from planner.run.runfile import make_recipe
from planner.terms.kv_cache import bytes_per_token
from planner.units import GB, GiB, format_bytes

TABLES = {
    "unsloth-grpo": "Llama-3.1-8B, GRPO at 20,480 tokens, 8 generations: 54.3 against 510.8 GB",
    "oxen-grpo": "0.5B to 14B, GRPO with full, 8-bit, checkpointed and LoRA training on 80 GB",
}
MODEL = "llama-3.1-8b"
CONTEXT = 20_480
"""What the page calls "20K": 20,000 reproduces none of its lines."""
GENERATIONS = 8
LOGITS_COPIES = 2
SIXTEEN_BIT = 2
RUNS = {"unsloth": "Unsloth (CCE + offloaded GC)", "trl": "Hugging Face + FA2"}
PRINTED = {
    ("training", "unsloth"): "UG06",
    ("grpo_logits", "unsloth"): "UG07",
    ("inference_weights", "unsloth"): "UG08",
    ("kv_cache", "unsloth"): "UG09",
    ("total", "unsloth"): "UG10",
    ("training", "trl"): "UG01",
    ("grpo_logits", "trl"): "UG02",
    ("inference_weights", "trl"): "UG03",
    ("kv_cache", "trl"): "UG04",
    ("total", "trl"): "UG05",
}


@cache
def _rows(file: str) -> dict[str, dict[str, str]]:
    text = (data_dir() / "measurements" / file).read_text(encoding="utf-8")
    return {row["id"]: row for row in csv.DictReader(text.splitlines())}


def published(name: str) -> dict[str, Any]:
    """Return the JSON document of `vramwise published NAME`."""
    if name == "unsloth-grpo":
        return _unsloth()
    if name == "oxen-grpo":
        return _oxen()
    raise UnknownNameError("table", name, TABLES, hint=", ".join(TABLES))


def context_line(run: str) -> tuple[float, float]:
    """Return GB at 0 tokens and tokens per GB of Unsloth's max-context table for Llama-3.1-8B.

    The table's points lie on a straight line to half a token; two of them give it.
    """
    points = [
        (float(row["gpu"].split()[0]), float(row["value"]))
        for row in _rows("sft.csv").values()
        if row["source_family"] == "unsloth-context-table"
        and row["model"] == "Llama 3.1 8B Instruct"
        and row["framework"] == RUNS[run]
    ]
    (gb_low, tokens_low), (gb_high, tokens_high) = min(points), max(points)
    slope = (tokens_high - tokens_low) / (gb_high - gb_low)
    return gb_low - tokens_low / slope, slope


def _unsloth_lines(run: str) -> dict[str, tuple[float, str, str]]:
    """Return line -> exact value, unit it is really in, derivation."""
    model = catalogue_model(MODEL)
    tokens = GENERATIONS * CONTEXT
    at_zero, slope = context_line(run)
    logits = LOGITS_COPIES * SIXTEEN_BIT * GENERATIONS * CONTEXT * model.vocab
    kv = CONTEXT * bytes_per_token(model)
    lines = {
        "training": (
            at_zero + tokens / slope,
            "GB of its own max-context table",
            f"{at_zero:.3f} + {tokens:,} tokens / {slope:.2f} tokens per GB: the line through "
            f'"{RUNS[run]}" of the page\'s QLoRA max-context table, extended to 8 x 20,480 tokens',
        )
    }
    if run == "trl":
        lines["grpo_logits"] = (
            logits / GiB,
            "GiB",
            f"2 copies x 2 B x {GENERATIONS} x {CONTEXT:,} tokens x {model.vocab:,} vocabulary",
        )
        lines["inference_weights"] = (
            SIXTEEN_BIT * model.parameters / GB,
            "decimal GB",
            f"{model.parameters:,} parameters x 2 B (the training base is 4-bit)",
        )
    else:
        lines["grpo_logits"] = (
            logits / GENERATIONS / GiB,
            "GiB",
            f"2 copies x 2 B x {CONTEXT:,} tokens x {model.vocab:,}: one row of 8 at a time",
        )
        lines["inference_weights"] = (0.0, "decimal GB", "vLLM uses the training weights")
    lines["kv_cache"] = (
        kv / GiB,
        "GiB",
        f"{CONTEXT:,} tokens x {bytes_per_token(model):,} B, ONE sequence (8 would be "
        f"{GENERATIONS * kv / GiB:.0f})",
    )
    return lines


def _as_printed(value: float, printed: float) -> float:
    """Return the value cut the way the page prints its number: whole numbers are truncated."""
    return float(int(value)) if printed == int(printed) else round(value, 1)


def _unsloth() -> dict[str, Any]:
    rows, notes = [], []
    for run in ("unsloth", "trl"):
        lines = _unsloth_lines(run)
        op_level, explained = _unsloth_op_level(run)
        total = 0.0
        for line, (exact, unit, derivation) in lines.items():
            printed = float(_rows("rl.csv")[PRINTED[line, run]]["value"])
            reproduced = _as_printed(exact, printed)
            total += reproduced
            rows.append(
                _line(line, run, printed, reproduced, exact, unit, derivation, op_level[line])
            )
        printed = float(_rows("rl.csv")[PRINTED["total", run]]["value"])
        derivation = "plain sum of the four printed numbers, units mixed"
        total = round(total, 1)
        rows.append(
            _line("total", run, printed, total, total, "mixed", derivation, op_level["total"])
        )
        notes.append(explained)
    return {
        "schema_version": 1,
        "table": "unsloth-grpo",
        "title": TABLES["unsloth-grpo"],
        "source": _rows("rl.csv")["UG01"]["source_url_or_repo"],
        "rows": rows,
        "notes": [
            *notes,
            "Nothing in the table is a measured run: the training lines extend a two-parameter line, "
            "and for HF + FA2 they already hold about 18 B per logit, so logits are counted twice.",
            "num_generations is not in the peak of a micro-batch: only how many sequences run at once.",
        ],
    }


def _line(
    line: str,
    column: str,
    printed: float,
    reproduced: float,
    exact: float,
    unit: str,
    derivation: str,
    op_level: int,
) -> dict[str, Any]:
    return {
        "line": line,
        "column": column,
        "published": printed,
        "reproduced": reproduced,
        "exact": round(exact, 4),
        "unit": unit,
        "derivation": derivation,
        "op_level_bytes": op_level,
    }


def _unsloth_op_level(run: str) -> tuple[dict[str, int], str]:
    """Return the op-level bytes of each line for the same job, and how to read them."""
    model = catalogue_model(MODEL)
    kv = GENERATIONS * CONTEXT * bytes_per_token(model)
    engine = {"kind": "vllm-push" if run == "trl" else "vllm-shared", "sleep_level": 1}
    recipe = make_recipe(
        task="grpo",
        method="qlora",
        framework="trl-0.15" if run == "trl" else "unsloth",
        lora={"rank": 32},
        context=CONTEXT,
        num_generations=GENERATIONS,
        micro_batch_size=GENERATIONS,
        checkpointing="full" if run == "trl" else "offload",
        attention="flash",
        dtype="bf16",
        mixed_precision="bf16",
        beta=0.0,
        engine={**engine, "kv_bytes": kv},
    )
    result = plan(model, recipe, make_machine("h100-sxm"))
    train = [phase for phase in result.phases if phase.name in ("forward", "loss", "backward")]
    peak = max(train, key=lambda phase: phase.total_bytes)
    sizes = {term.name: term.bytes for term in peak.terms}
    heads = [term.bytes for phase in train for term in phase.terms if term.name == "logits"]
    copy = SIXTEEN_BIT * model.parameters if run == "trl" else 0
    values = {
        "training": peak.total_bytes - sizes.get("logits", 0),
        "grpo_logits": max(heads, default=0),
        "inference_weights": copy,
        "kv_cache": kv,
        "total": result.peak_bytes,
    }
    note = (
        f"{run}: op by op the peak is {format_bytes(result.peak_bytes)} in {result.peak_phase}, a maximum "
        f"over phases and not a sum; training apart from the loss head needs "
        f"{format_bytes(values['training'])}, KV of all 8 sequences {format_bytes(kv)}."
    )
    return values, note


OXEN_MODELS = {
    "0.5B": "qwen2.5-0.5b",
    "1B": "llama-3.2-1b",
    "3B": "llama-3.2-3b",
    "8B": "llama-3.1-8b",
    "14B": "qwen2.5-14b",
}
"""The page does not name its models; these have its sizes (its sample code uses Llama-3.2-1B)."""
OXEN_RUNS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "optimizer": "adamw"},
    "full, 8-bit": {"method": "full", "optimizer": "adamw-8bit"},
    "full, 8-bit, checkpointing": {
        "method": "full",
        "optimizer": "adamw-8bit",
        "checkpointing": "full",
    },
    "LoRA": {"method": "lora", "lora": {"rank": 16}, "optimizer": "adamw-8bit"},
}
OXEN_GPU = "h100-sxm"
LORA_TARGETS = ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")


def _oxen() -> dict[str, Any]:
    """Return the twenty cells: 256 + 786 tokens, 4 generations in one forward pass, TRL of 2025-02."""
    rows = []
    right = 0
    for index, row in enumerate(sorted(_oxen_rows(), key=lambda item: item["id"])):
        run = list(OXEN_RUNS)[index // len(OXEN_MODELS)]
        size = list(OXEN_MODELS)[index % len(OXEN_MODELS)]
        result = _oxen_plan(size, run, row)
        printed_fits = row["quantity_measured"] != "oom_gt"
        right += result.tensors_fit == printed_fits
        rows.append(
            {
                "line": run,
                "column": size,
                "published": float(row["value"]) if printed_fits else f">{row['value']}",
                "published_fits": printed_fits,
                "reproduced": round(result.device_used_bytes / GiB, 1),
                "reproduced_fits": result.tensors_fit,
                "unit": "GB as printed; GiB of device memory here",
                "derivation": f"{OXEN_MODELS[size]}, {result.why}",
                "op_level_bytes": result.peak_bytes,
            }
        )
    return {
        "schema_version": 1,
        "table": "oxen-grpo",
        "title": TABLES["oxen-grpo"],
        "source": next(iter(_oxen_rows()))["source_url_or_repo"],
        "rows": rows,
        "right_cells": right,
        "notes": [
            "Good for ordering and for fit or OOM; the printed values wobble by 30%: its 8-bit "
            "savings cannot be optimizer state alone.",
            "Not stated on the page, so assumed: the models, and the LoRA row's rank, 8-bit "
            "optimizer and checkpointing.",
        ],
    }


def _oxen_rows() -> list[dict[str, str]]:
    wanted = len(OXEN_MODELS) * len(OXEN_RUNS)
    found = [row for key, row in _rows("rl.csv").items() if key.startswith("OX")]
    return sorted(found, key=lambda row: row["id"])[:wanted]


def _oxen_plan(size: str, run: str, row: dict[str, str]) -> Plan:
    fields: dict[str, Any] = dict(OXEN_RUNS[run])
    if fields["method"] == "lora":
        fields["lora"] = {**fields["lora"], "targets": LORA_TARGETS}
    generations = int(row["num_generations"])
    fields = {
        "checkpointing": "none",
        **fields,
        "task": "grpo",
        "framework": "trl-0.15",
        "dtype": row["dtype"],
        "mixed_precision": "bf16",
        "attention": "flash",
        "micro_batch_size": generations,
        "num_generations": generations,
        "prompt_length": int(row["prompt_len"]),
        "completion_length": int(row["completion_len"]),
        "gradient_accumulation": 4,
        "engine": {"kind": "transformers"},
    }
    try:
        return plan(
            catalogue_model(OXEN_MODELS[size]), make_recipe(**fields), make_machine(OXEN_GPU)
        )
    except VramwiseError as error:
        raise VramwiseError(f"oxen-grpo, {run} {size}: {error.message}") from error


def render(document: dict[str, Any]) -> str:
    """Return a table document as text."""
    lines = [document["title"], f"source: {document['source']}", ""]
    if document["table"] == "oxen-grpo":
        cells = [
            [
                row["line"],
                row["column"],
                str(row["published"]),
                f"{row['reproduced']}",
                "fits" if row["reproduced_fits"] else "OOM",
                "right" if row["reproduced_fits"] == row["published_fits"] else "WRONG",
                format_bytes(row["op_level_bytes"]),
            ]
            for row in document["rows"]
        ]
        headers = ["run", "model", "printed GB", "device GiB", "verdict", "fit or OOM", "tensors"]
    else:
        cells = [
            [
                row["column"],
                row["line"],
                f"{row['published']:g}",
                f"{row['reproduced']:g}",
                f"{row['exact']:.3f}",
                row["unit"],
                format_bytes(row["op_level_bytes"]),
                row["derivation"],
            ]
            for row in document["rows"]
        ]
        headers = [
            "run",
            "line",
            "printed",
            "reproduced",
            "exact",
            "unit",
            "op level",
            "derivation",
        ]
    lines.append(table(headers, cells))
    lines += ["", *(f"* {note}" for note in document["notes"])]
    return "\n".join(lines)
