"""An Accuracy as JSON, as text and as docs/accuracy.md."""

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from planner.accuracy.calibrate import ratio_of
from planner.accuracy.score import SPILLED, Accuracy, Scored, Statistics, Uncovered, Verdicts
from planner.risk import MIN_ROWS, TAIL, Distribution, choose, kind_of

SCHEMA_VERSION = 1
WORST_ROWS = 15
TARGETS: dict[str, tuple[float, float | None]] = {
    "peak_allocated": (0.03, 0.10),
    "peak_reserved": (0.08, None),
    "nvidia_smi_used_peak": (0.12, None),
    "model_weights": (0.005, 0.025),
    "activation_peak": (0.15, None),
    "kv_cache_memory": (0.05, None),
    "log_kv_cache_tokens_printed": (0.001, 0.01),
}
"""Median and p90 absolute error that the project promises, as fractions."""


_EXPLANATIONS = """
## Allocations that explained differences

No constant is tuned until rows match; a difference stays until an allocation explains it. These did:

* **FSDP with frozen weights** holds every layer's input and the input's gradient to the end of the backward: FSDP1 watches the inputs of
  units without trained parameters with `register_multi_grad_hook`. Slope +2LH bytes per token, in the backward only (Mistral, Llama-3, Llama-2-70B).
* **FSDP gathers** the root unit (embeddings, head) from forward to backward: +1.95 GiB on Llama-3-8B, in the loss phase. Shards, gradients and
  states of a full fine-tune are fp32; what is gathered, and the residual stream, are 16-bit.
* **FSDP1's wrapping** leaves its tracks in the cache: a unit's tensors come to the GPU one by one, rank 0's are broadcast in buckets of 250 MiB, all are joined
  and cut; bf16 parts become fp32 after the last unit. Up to 4 GiB of segments that later steps fill only in part (Mistral, Llama-3 on 2 and 4 GPUs).
* **Quantised bases under FSDP**: adapters and their states are not sharded.
* **Old bitsandbytes and auto-gptq** keep the input of every quantised matmul as an attribute of the autograd node, freed with the graph: +(I + H)
  elements per token at the peak of a recomputed layer.
* **`prepare_model_for_kbit_training`** makes the residual stream fp32 (norms in fp32; `Linear4bit` returns its input's dtype).
* **Loss heads**: 12 bytes per logit in the backward of transformers since 4.46, 14 in the forward of releases that copied shifted logits, 18 with fp32 outputs held, 8 with
  fused cross-entropy on fp32 logits; LitGPT 8 (Fabric converts outputs to fp32); torchtune's compiled chunks 2.
* **GRPO with full logits**: 16 bytes per logit while TRL divides by the temperature first (1.0 to 1.11), 12 in 1.12: both groups of the 21 public runs within 0.5%.
* **Reserved against allocated**: loading and two steps are replayed, allocation by allocation, through the rules of CUDA's caching allocator (planner/replay):
  a freed block serves a request of another size only when that is smaller, so blocks of vocabulary width, of a layer and of the step are kept beside each other;
  near the card's limit idle segments are given back first. Steps of many lengths are replayed one after the other, each meeting the cache of the one before.
* **LitGPT** gives every model a head of its own, quantises it, joins q, k and v (the values stay a view of all three) and loads the
  whole model on each GPU before FSDP shards it.
* **vLLM** weights hold the rotary cache (positions x rotary width x 2 bytes) and the LoRA slots.
"""


def only_source(result: Accuracy, text: str) -> Accuracy:
    """Return the part of `result` whose source contains `text`."""
    wanted = text.lower()
    kept = [item for item in result.scored if wanted in item.row.source.lower()]
    refused = [item for item in result.not_covered if wanted in item.source.lower()]
    return Accuracy(
        rows=len(kept) + len(refused),
        scored=kept,
        low_confidence=[i for i in result.low_confidence if wanted in i.row.source.lower()],
        not_covered=refused,
        elsewhere=[item for item in result.elsewhere if wanted in item.source.lower()],
        runs={key: row for key, row in result.runs.items() if wanted in row.source.lower()},
        spilled={k: row for k, row in result.spilled.items() if wanted in row.source.lower()},
    )


def to_json(result: Accuracy, *, tier: str = "analytic", rows: bool = False) -> str:
    """Return one JSON document."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "tier": tier,
        "rows": result.rows,
        "scored": len(result.scored),
        "expressible": _share(result),
        "planned": sum(item.prediction.planned for item in result.scored),
        "interval_coverage": result.interval_coverage,
        "verdicts": result.verdicts.to_dict(),
        "verdicts_left_out": {
            source: verdicts.to_dict() for source, verdicts in verdicts_left_out(result)
        },
        "verdicts_not_judged": [
            {"id": row.id, "reason": row.reason} for row in result.spilled.values()
        ],
        "left_out": [
            {"quantity": q, "source": s, "n": n, "interval_coverage": c, "interval_width": w}
            for q, s, n, c, w in left_out(result)
        ],
        "low_confidence_rows": len(result.low_confidence),
        "elsewhere": dict(_counted(result.elsewhere)),
        "not_covered": [{"id": row.id, "reason": row.reason} for row in result.not_covered],
        "by_quantity": {name: asdict(stats) for name, stats in result.by_quantity().items()},
        "by_source": {
            source: {name: asdict(stats) for name, stats in groups.items()}
            for source, groups in result.by_source().items()
        },
    }
    if rows:
        document["predictions"] = [_row(i) for i in (*result.scored, *result.low_confidence)]
        document["verdict_rows"] = [
            {"id": row.id, "source": row.source, "ran": row.ran, "verdict": row.verdict}
            for row in result.verdicts.rows
        ]
    return json.dumps(document, indent=1)


def _row(item: Scored) -> dict[str, Any]:
    return {
        "id": item.row.id,
        "source": item.row.source,
        "quantity": item.prediction.quantity,
        "published": item.truth,
        "predicted": item.prediction.value,
        "low": item.prediction.low,
        "high": item.prediction.high,
        "error": item.error,
        "inside": item.inside,
        "planned": item.prediction.planned,
        "confidence": item.row.confidence,
    }


def to_text(result: Accuracy, *, rows: bool = False) -> str:
    """Return the tables for a terminal."""
    lines = [_headline(result), *_verdict_lines(result), "", _header()]
    lines += [_line(name, stats) for name, stats in result.by_quantity().items()]
    for source, groups in sorted(result.by_source().items()):
        lines += ["", source]
        lines += [_line(f"  {name}", stats) for name, stats in groups.items()]
    if rows:
        lines += ["", "row, quantity, published, predicted, error"]
        ordered = sorted(result.scored, key=lambda item: -abs(item.error))
        lines += [
            f"{item.row.id:8} {item.prediction.quantity:28} {item.truth:>18.4g} "
            f"{item.prediction.value:>18.4g} {item.error:+8.1%}{'' if item.inside else '  outside'}"
            for item in ordered
        ]
    lines += ["", "not covered:"]
    lines += [f"  {count:4} x {why}" for why, count in _counted(result.not_covered)]
    lines += ["", "no run's memory, scored elsewhere:"]
    lines += [f"  {count:4} x {why}" for why, count in _counted(result.elsewhere)]
    return "\n".join(lines)


def to_markdown(result: Accuracy) -> str:
    """Return docs/accuracy.md."""
    lines = [
        "# Accuracy against published measurements",
        "",
        "Generated by `vramwise accuracy --markdown`; a test keeps it true. Rows: facts of",
        "`data/measurements`; one row is one figure, predicted from what was known before its run (arguments,",
        "version, card). Errors are relative to the published value; bias is the median signed error (plus:",
        "the planner says too much); coverage is the share of rows whose published value lies in the",
        "predicted interval, width the interval's median width over the prediction. Rows of confidence below",
        "0.8 are scored apart (`low_confidence_`); `log_` is arithmetic on a log's own lines, no prediction.",
        "Kernel and loss-head benchmarks are no runs: `python -m benchmarks.laws.score`.",
        "",
        _headline(result),
        "",
        "## Verdicts",
        "",
        *_verdict_table(result),
        *_left_out_table(result),
        "",
        "## By quantity",
        "",
        "| quantity | n | median | p90 | bias | coverage | width | planned | target |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_cells(name, stats) for name, stats in result.by_quantity().items()]
    lines += ["", "## The worst rows", ""]
    lines += ["| row | source | quantity | published | predicted | error |"]
    lines += ["|---|---|---|---:|---:|---:|"]
    worst = sorted(result.scored, key=lambda item: -abs(item.error))[:WORST_ROWS]
    lines += [
        f"| {item.row.id} | {item.row.source} | {item.prediction.quantity} | {item.truth:.4g} | "
        f"{item.prediction.value:.4g} | {item.error:+.0%} |"
        for item in worst
    ]
    lines += ["", "## Each source judged by the others", ""]
    lines += [
        "The 5% to 95% interval made of all other sources' ratios, on the source's own rows.",
        "",
    ]
    lines += ["| figure | source | rows | coverage | width |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| {quantity} | {source} | {count} | {share:.0%} | {width:.0%} |"
        for quantity, source, count, share, width in left_out(result)
    ]
    lines += ["", "## By source", ""]
    lines += ["| source | quantity | n | median | p90 | bias | coverage | width | planned |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for source, groups in sorted(result.by_source().items()):
        for name, s in groups.items():
            lines.append(f"| {source} | {name} | {_numbers(s)} |")
    lines += ["", "## Rows that cannot be expressed", "", "| rows | reason |", "|---:|---|"]
    lines += [f"| {count} | {why} |" for why, count in _counted(result.not_covered)]
    lines += ["", _EXPLANATIONS.strip()]
    return "\n".join(lines) + "\n"


def left_out(result: Accuracy) -> list[tuple[str, str, int, float, float]]:
    """Return (quantity, source, rows, coverage, width) of each source, judged by all the others."""
    rows = [row for item in result.scored if (row := ratio_of(item)) is not None]
    found = []
    for quantity in dict.fromkeys(row.quantity for row in rows):
        for source in sorted({row.source for row in rows if row.quantity == quantity}):
            others = [row for row in rows if row.source != source]
            if sum(row.quantity == quantity for row in others) < MIN_ROWS:
                continue  # the other sources have too few such figures to judge by
            inside, widths = 0, []
            own = [row for row in rows if row.source == source and row.quantity == quantity]
            for row in own:
                spread = choose(others, quantity, row.kind, row.family)
                low, high = spread.quantile(TAIL), spread.quantile(1 - TAIL)
                inside += low <= row.ratio <= high
                widths.append(high - low)
            found.append((quantity, source, len(own), inside / len(own), max(widths)))
    return found


def verdicts_left_out(result: Accuracy) -> list[tuple[str, Verdicts]]:
    """Return each source's runs with their verdicts by the ratios of all other sources."""
    rows = [row for item in result.scored if (row := ratio_of(item)) is not None]
    found = []
    judged = result.verdicts.rows
    for source in sorted({verdict.source for verdict in judged}):
        others = [row for row in rows if row.source != source]
        if not any(row.quantity == "allocated" for row in others):
            continue  # nothing else was measured
        spreads: dict[tuple[str, str], Distribution] = {}
        own = []
        for verdict in judged:
            if verdict.source != source:
                continue
            plan, r = verdict.plan, verdict.plan.resolved
            key = kind_of(r), r.framework.family
            if key not in spreads:
                spreads[key] = choose(others, "allocated", *key)
            own.append(verdict._replace(verdict=plan.verdict_of(plan.risk_over(spreads[key]))))
        found.append((source, Verdicts(tuple(own))))
    return found


def _left_out_table(result: Accuracy) -> list[str]:
    """Return the verdicts of each source by the others, and their sums."""
    table = verdicts_left_out(result)
    if not table:
        return []
    lines = [
        "",
        "Each source's runs judged by the ratios of all other sources:",
        "",
        "| source | ran | called does not fit | called tight | out of memory | called fits |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    sums = Verdicts(tuple(row for _, verdicts in table for row in verdicts.rows))
    for source, verdicts in (*table, ("**all**", sums)):
        counts = verdicts.to_dict()
        names = ("ran", "ran_called_no", "ran_called_tight", "oom", "oom_called_fits")
        lines.append(f"| {source} | {' | '.join(str(counts[name]) for name in names)} |")
    if result.spilled:
        named = ", ".join(row.id for row in result.spilled.values())
        lines += ["", f"Not judged, {SPILLED}: {named}."]
    return lines


def _verdict_table(result: Accuracy) -> list[str]:
    verdicts = result.verdicts
    lines = ["| the run | fits | tight | does not fit |", "|---|---:|---:|---:|"]
    for name, ran in (("ran", True), ("ran out of memory, or its engine refused", False)):
        counts = [str(verdicts.count(word, ran=ran)) for word in ("fits", "tight", "does not fit")]
        lines.append(f"| {name} | {' | '.join(counts)} |")
    return lines


def _share(result: Accuracy) -> float:
    return len(result.scored) / max(1, result.rows)


def _headline(result: Accuracy) -> str:
    return (
        f"{result.rows} rows, {len(result.scored)} expressed ({_share(result):.1%}), "
        f"{result.interval_coverage:.1%} of them inside the predicted interval."
    )


def _header() -> str:
    return f"{'quantity':34} {'n':>5} {'median':>8} {'p90':>8} {'bias':>8} {'inside':>8} {'width':>8} {'planned':>8}"


def _line(name: str, s: Statistics) -> str:
    return (
        f"{name:34} {s.n:5} {s.median_abs_error:8.2%} {s.p90_abs_error:8.2%} "
        f"{s.bias:+8.2%} {s.interval_coverage:8.1%} {s.interval_width:8.1%} {s.planned:8}"
    )


def _numbers(s: Statistics) -> str:
    return (
        f"{s.n} | {s.median_abs_error:.2%} | {s.p90_abs_error:.2%} | {s.bias:+.2%} | "
        f"{s.interval_coverage:.0%} | {s.interval_width:.0%} | {s.planned}"
    )


def _cells(name: str, s: Statistics) -> str:
    goal = ""
    if name in TARGETS:
        middle, tail = TARGETS[name]
        goal = f"median {middle:.0%}" + (f", p90 {tail:.0%}" if tail else "")
    return f"| {name} | {_numbers(s)} | {goal} |"


def _counted(rows: list[Uncovered]) -> list[tuple[str, int]]:
    return Counter(row.reason for row in rows).most_common()


def _verdict_lines(result: Accuracy) -> list[str]:
    """Return what the verdicts were worth, in two sentences."""
    counts = result.verdicts.to_dict()
    if not counts["ran"] + counts["oom"]:
        return []
    return [
        f"{counts['oom']} runs ran out of memory or were refused: {counts['oom_called_fits']} called fits.",
        f"{counts['ran']} runs ran: {counts['ran_called_no']} called does not fit, "
        f"{counts['ran_called_tight']} called tight.",
    ]
