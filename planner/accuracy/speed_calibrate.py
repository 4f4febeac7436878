"""Writes data/calibration/speed.json and speed_ratios.csv: parameters with their rows, and how far off they are.

    python -m planner.accuracy.speed_calibrate

Every ratio is measured over predicted, by parameters that the row's source (`ratio`) or its run group
(`group_ratio`) had no part in. docs/speed.md and the intervals of `plan` are read off that file.
"""

import csv
import io
import json
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from planner.accuracy.speed_fit import BEFORE, Fit
from planner.accuracy.speed_score import (
    DECODING,
    OTHER,
    TRAINING,
    TimeSample,
    left_out,
    samples_of,
    shipped_rows,
)
from planner.datafiles import data_dir
from planner.speed.parameters import Parameters
from planner.speed.spread import GENERATE, GRPO, KINDS, TRAIN, Spread

GROUP_FOLDS = 10
"""Run groups are left out in so many parts: one fit a group would say the same."""
INSIDE = 0.9
"""Share of the rows between a plan's low and high. Of a source that had no part in them fewer are: about 85%, which
is what an interval is for (`held_out`; docs/speed.md has both)."""
MIN_ROWS = 20
"""Kinds of steps with fewer rows are as well known as all of training, or of generation."""
SOURCE_SHARE = 30
"""Rows that one source counts as, at most (like planner/risk.py)."""
MEANING = {
    "product": "large products, of the best matmul measured on the card",
    "attention": "flash and SDPA kernels, of the best matmul measured",
    "attention_tflops": "and at most that many TFLOPS, of kernels made for Ampere's instructions",
    "bandwidth": "pointwise kernels of training, of the memory's bandwidth",
    "unpack": "elements dequantised for every fp32 FLOP the card could do, beside what is read and written",
    "unpack_integer": "the same of packed integers (GPTQ, AWQ)",
    "launch_s": "host time of one eager operation and its autograd node, seconds",
    "unit_s": "waiting for one unit's weights to be gathered, beside their bytes, seconds",
    "decode_bandwidth": "weights and cache read by an engine, of the memory's bandwidth",
    "engine_step_s": "vLLM's own time for a step with graphs (hidden from 0.14 on), seconds",
    "sequence_s": "and for every running sequence, seconds",
    "kernel_s": "one kernel of a replayed graph, beside the bytes it moves, seconds",
    "generate_launch_s": "host time of one eager operation without a graph, seconds",
    "reduce_s": "one sum over an engine's tensor ranks, beside its bytes, seconds",
    "engine_product": "an engine's products with routed experts, of the best matmul measured",
}


class RatioRow(NamedTuple):
    """One row of speed_ratios.csv."""

    id: str
    source: str
    kind: str
    ratio: str
    group_ratio: str


def spread_of(ratios: Sequence[tuple[str, float]]) -> Spread:
    """Return the nearest two factors between which INSIDE of the weight lies, of (source, measured over predicted)."""
    ordered = sorted(ratios, key=lambda row: row[1])
    counts = Counter(source for source, _ in ordered)
    shares, run = [], 0.0
    for source, _ in ordered:
        run += min(1.0, SOURCE_SHARE / counts[source])
        shares.append(run)
    best = (ordered[0][1], ordered[-1][1])
    for first, (_, low) in enumerate(ordered):
        before = shares[first - 1] if first else 0.0
        last = bisect_left(shares, before + INSIDE * run)
        if last >= len(ordered):
            break
        if ordered[last][1] - low < best[1] - best[0]:
            best = (low, ordered[last][1])
    return Spread(*best, len(ordered), len(counts))


def factors_of(kind: str, ratios: Sequence[RatioRow]) -> Spread:
    """Return the factors of a kind of step, of all training or generation where few rows are of it."""
    own = [(row.source, float(row.ratio)) for row in ratios if row.kind == kind]
    if len(own) < MIN_ROWS:
        root = kind.split(",")[0]
        own = [(row.source, float(row.ratio)) for row in ratios if row.kind.startswith(root)]
    return spread_of(own)


def held_out(kind: str, ratios: Sequence[RatioRow]) -> tuple[int, int]:
    """Return how many of a kind's rows lie between factors that were read off other sources, and of how many."""
    inside = judged = 0
    for source in sorted({row.source for row in ratios if row.kind == kind}):
        rest = [row for row in ratios if row.source != source]
        if not any(row.kind.startswith(kind.split(",")[0]) for row in rest):
            continue  # nobody else measured such steps
        factors = factors_of(kind, rest)
        own = [float(row.ratio) for row in ratios if row.kind == kind and row.source == source]
        inside += sum(factors.low <= ratio <= factors.high for ratio in own)
        judged += len(own)
    return inside, judged


def document(p: Parameters, ratios: Sequence[RatioRow]) -> dict[str, Any]:
    """Return data/calibration/speed.json."""
    spreads = {kind: factors_of(kind, ratios) for kind in KINDS}
    kinds = {**dict.fromkeys(TRAINING.names, TRAIN), **dict.fromkeys(DECODING.names, GENERATE)}
    return {
        "what": "The speed model's parameters (planner/speed/parameters.py): shares of published speeds, and "
        "software's own times. Written by python -m planner.accuracy.speed_calibrate.",
        "parameters": {
            name: {
                "value": float(f"{getattr(p, name):.5g}"),
                "what": what,
                "rows": f"speed_ratios.csv, kinds {kinds[name]}"
                if name in kinds
                else "data/speed/cards.csv and matmul.csv",
            }
            for name, what in MEANING.items()
        },
        "spread": {kind: found._asdict() for kind, found in spreads.items()},
        "judged_on": "each source left out in turn: speed_ratios.csv",
    }


def ratios_of(samples: Sequence[TimeSample], fit: Fit, p: Parameters) -> list[RatioRow]:
    """Return the ratio rows of one kind of samples."""
    by_source = left_out(samples, lambda sample: sample.source, fit)
    by_group = left_out(samples, lambda sample: sample.group, fit, folds=GROUP_FOLDS)
    groups = {each.sample.row.id: each for each in by_group}
    return [
        RatioRow(
            each.sample.row.id,
            each.sample.source,
            each.sample.spread_kind(p),
            f"{each.sample.measured / each.predicted:.5g}",
            f"{each.sample.measured / groups[each.sample.row.id].predicted:.5g}",
        )
        for each in by_source
    ]


def shares(trained: Parameters) -> dict[str, float]:
    """Return the parameters that training's rows decide, by name."""
    return {name: getattr(trained, name) for name in TRAINING.names}


def main() -> int:
    """Fit, leave out, write."""
    samples, _ = samples_of(shipped_rows())
    folder = Path(str(data_dir() / "calibration"))
    rows = {kind: [s for s in samples if s.kind == kind] for kind in (TRAIN, GENERATE)}
    trained = TRAINING.run([each for each in rows[TRAIN] if each.decides])
    # prompts are read, and packed weights unpacked, by shares of training's that no generation row decides
    decoding = Fit(DECODING.names, BEFORE._replace(**shares(trained)))
    decoded = decoding.run(rows[GENERATE])
    values = shares(trained)
    values |= {name: getattr(decoded, name) for name in DECODING.names}
    p = Parameters(**values)
    steps = [
        RatioRow(s.row.id, s.source, s.kind, ratio, ratio)
        for s in samples
        if s.kind in (GRPO, OTHER)
        for ratio in [f"{s.measured / s.predicted(p):.5g}"]
    ]
    ratios = sorted(
        steps + ratios_of(rows[TRAIN], TRAINING, p) + ratios_of(rows[GENERATE], decoding, p)
    )
    text = json.dumps(document(p, ratios), indent=1)
    (folder / "speed.json").write_text(text + "\n", encoding="utf-8")
    stream = io.StringIO()
    stream.write("# measured over predicted; made by python -m planner.accuracy.speed_calibrate\n")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(RatioRow._fields)
    writer.writerows(ratios)
    (folder / "speed_ratios.csv").write_text(stream.getvalue(), encoding="utf-8")
    print({name: float(f"{getattr(p, name):.4g}") for name in MEANING})
    return 0


if __name__ == "__main__":
    sys.exit(main())
