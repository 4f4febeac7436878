"""docs/speed.md: what the speed model is worth, from data/calibration/speed_ratios.csv.

python -m planner.accuracy.speed_report > docs/speed.md
"""

import csv
import sys
from collections import Counter
from statistics import median
from typing import NamedTuple

from planner.accuracy.speed_calibrate import RatioRow, held_out
from planner.accuracy.speed_score import OTHER, Refused, TimeSample, samples_of, shipped_rows
from planner.datafiles import data_dir
from planner.speed.parameters import document
from planner.speed.spread import GENERATE, GRPO, KINDS, TRAIN, spread

WORST = 40
TITLES = {
    TRAIN: "Training: seconds of a step",
    GRPO: "GRPO: seconds of a step, rollout and all",
    GENERATE: "Generation by vLLM and transformers: seconds of a step",
    OTHER: "Generation by engines that are not planned (SGLang, TensorRT-LLM)",
}
FITTED = (TRAIN, GENERATE)
INTRO = """# How long a step takes, and how well that is known

`vramwise plan` prints seconds, hours, dollars and energy beside memory. They come from the same tape:
[planner/speed](../planner/speed) counts the FLOPs, bytes and launches of every pass over the layers the memory
model describes, and a roofline turns them into seconds.

* **Products** take their FLOPs at a share of the best matmul anybody measured on the card (data/speed/matmul.csv;
  of the sheet's peak where none was), and the bytes of their matrices at a share of its bandwidth: both are added,
  so that few rows reach little of what many reach.
* **Attention** takes its causal FLOPs, the backward five products instead of two.
* **Pointwise operations**, norms, copies, casts and logits take their bytes, operation by operation as the tape runs
  them; under torch.compile a third.
* **Packed weights** are dequantised in every pass, at so many elements for every fp32 FLOP of the card; reading them and
  writing 16-bit ones takes its bytes on top. An engine's product of several rows reads those as well; of one row bitsandbytes
  has a kernel that looks elements up as it reads.
* **The host** starts every kernel: a pass takes the longer of that and the device's time.
* **Traffic** between GPUs and to the host takes its bytes at four fifths of the links' one-way bandwidth
  (data/speed/links.csv), behind the computation unless a layer waits for it; every gathered unit costs a wait of its own.
  A bridge of NVLink joins two cards: between more the bytes go by PCIe.
* **An offloaded optimizer** is waited for: states that come from the host and go back while the GPU steps, or the host's
  own step (DeepSpeed, FSDP) at what the memory of the nodes moves that the card is sold in (data/speed/hosts.csv; a range
  where they differ, which widens the interval), and then the weights' way back.
* **Generation** reads weights (of experts those that some token chose) and the running sequences' cache, moves activations,
  computes (routed experts at a share of their own), pays every kernel of the replayed graph, sums over tensor ranks (over
  PCIe one rank after another), and pays the engine's own time a step and a sequence. Stages of a pipeline work on parts of
  the batch.
* **A GRPO step** adds the rollout as the framework runs it: completions of accumulated micro-batches together or one after
  another, adapters beside the weights where transformers generate, Unsloth's gpt-oss with every expert, its vision models
  one sequence at a time.
* **A machine of your own**: `vramwise profile calibrate` measures matmul, attention, bandwidth, links and launches; plans
  for that card go by them and say so. `--cpu` does the same for a processor, and `python benchmarks/cpu_speed.py` predicts
  five shapes of a real step on it and times them: a check of the method that needs no GPU.

With a source left out, the parameters are fitted again from `planner/accuracy/speed_fit.py:BEFORE`, not from the shipped
ones, in which it had its part. Intervals are judged the same way: between factors that other sources' rows gave.

"""


class Judged(NamedTuple):
    """A row with its predictions."""

    sample: TimeSample
    ratio: float
    """Measured over predicted, its source left out."""
    group_ratio: float
    spread: str
    """The kind of step whose interval it has."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return 1 / self.ratio - 1

    @property
    def group_error(self) -> float:
        """The same where only the run's group was left out."""
        return 1 / self.group_ratio - 1


def ratio_rows() -> list[RatioRow]:
    """Return the rows of speed_ratios.csv."""
    text = (data_dir() / "calibration" / "speed_ratios.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [RatioRow(**row) for row in csv.DictReader(lines)]


def text() -> str:
    """Return the page."""
    samples, refused = samples_of(shipped_rows())
    known = {row.id: row for row in ratio_rows()}
    judged = [
        Judged(each, float(row.ratio), float(row.group_ratio), row.kind)
        for each in samples
        if (row := known.get(each.row.id)) is not None
    ]
    lines = [INTRO.rstrip(), "", *_parameters()]
    for kind in TITLES:
        lines += ["", *_kind(kind, [each for each in judged if each.sample.kind == kind])]
    lines += ["", *_worst(judged), "", *_refused(refused)]
    return "\n".join(lines) + "\n"


def _parameters() -> list[str]:
    found = document()["parameters"]
    lines = [
        f"## The {len(found)} parameters",
        "",
        "Written by `python -m planner.accuracy.speed_calibrate`; this page by "
        "`python -m planner.accuracy.speed_report > docs/speed.md`.",
        "",
        "| name | value | what |",
        "|---|---:|---|",
    ]
    return [
        *lines,
        *(f"| {name} | {each['value']:.4g} | {each['what']} |" for name, each in found.items()),
    ]


def _quantile(sizes: list[float], share: float) -> float:
    ordered = sorted(sizes)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _by_source(rows: list[Judged], share: float) -> float:
    """Return a quantile of absolute errors in which all sources weigh the same."""
    counts = Counter(each.sample.source for each in rows)
    run = 0.0
    for each in sorted(rows, key=lambda each: abs(each.error)):
        run += 1 / counts[each.sample.source]
        if run >= share * len(counts):
            break
    return abs(each.error)


def _kind(kind: str, rows: list[Judged]) -> list[str]:
    groups = [abs(each.group_error) for each in rows]
    errors = [abs(each.error) for each in rows]
    lines = [
        f"## {TITLES[kind]}",
        "",
        "| left out | rows | median error | p90 | sources weighing the same: median | p90 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    if kind in FITTED:
        lines.append(
            f"| a run group | {len(rows)} | {median(groups):.0%} | {_quantile(groups, 0.9):.0%} | | |"
        )
    lines.append(
        f"| {'a source' if kind in FITTED else 'all: nothing is fitted to them'} | {len(rows)} | "
        f"{median(errors):.0%} | {_quantile(errors, 0.9):.0%} "
        f"| {_by_source(rows, 0.5):.0%} | {_by_source(rows, 0.9):.0%} |"
    )
    stated = [each for each in rows if each.sample.decides]
    if kind in FITTED and len(stated) < len(rows):
        for name, sizes in (
            ("a run group", [abs(each.group_error) for each in stated]),
            ("a source", [abs(each.error) for each in stated]),
        ):
            lines.append(
                f"| {name}, of runs whose lengths are stated | {len(stated)} | {median(sizes):.0%} | "
                f"{_quantile(sizes, 0.9):.0%} | | |"
            )
    if kind != OTHER:
        lines += ["", *_intervals(rows)]
    lines += [
        "",
        "| source, left out, worst first | rows | median | p90 | bias |",
        "|---|---:|---:|---:|---:|",
    ]
    by: dict[str, list[Judged]] = {}
    for each in rows:
        by.setdefault(each.sample.source, []).append(each)
    ranked = sorted(by.items(), key=lambda item: -median(abs(each.error) for each in item[1]))
    for source, found in ranked:
        sizes = [abs(each.error) for each in found]
        bias = median(each.error for each in found)
        lines.append(
            f"| {source} | {len(found)} | {median(sizes):.0%} | {_quantile(sizes, 0.9):.0%} | {bias:+.0%} |"
        )
    return lines


def _intervals(rows: list[Judged]) -> list[str]:
    """Return what the intervals of plans hold, by the kind of step."""
    lines = [
        "| interval of | rows | times the prediction | holds | read off other sources, holds | width |",
        "|---|---:|---|---:|---:|---:|",
    ]
    known = ratio_rows()
    held, apart, judged, widths = 0, 0, 0, []
    for kind in KINDS:
        own = [each for each in rows if each.spread == kind]
        if not own:
            continue
        factors = spread(kind)
        inside = sum(factors.low <= each.ratio <= factors.high for each in own)
        width = factors.high - factors.low
        held += inside
        widths += [width] * len(own)
        found, among = held_out(kind, known)
        apart, judged = apart + found, judged + among
        lines.append(
            f"| {kind} | {len(own)} | {factors.low:.2f} to {factors.high:.2f} | {inside / len(own):.0%} "
            f"| {_share(found, among)} | {width:.0%} |"
        )
    return [
        *lines,
        f"| all | {len(rows)} | | {held / len(rows):.0%} | {_share(apart, judged)} | median {median(widths):.0%} |",
    ]


def _share(inside: int, judged: int) -> str:
    return f"{inside / judged:.0%}" if judged else "one source alone"


def _worst(rows: list[Judged]) -> list[str]:
    def size(each: Judged) -> float:
        return max(each.ratio, 1 / each.ratio)

    lines = [
        f"## The {WORST} worst rows",
        "",
        "| row | source | run | measured | predicted, its source left out |",
        "|---|---|---|---:|---:|",
    ]
    for each in sorted(rows, key=lambda each: -size(each))[:WORST]:
        row, measured = each.sample.row, each.sample.measured
        what = f"{row['model'].rsplit('/', 1)[-1]}, {row['quant'] or '16 bits'}, {row['gpu']}"
        if row["concurrency"]:
            what += f" x {row['tp']}, {row['engine']}, {row['concurrency']} at once"
        else:
            what += f" x {row['n_gpus']}, {row['method']}, batch {row['micro_batch']}"
        lines.append(
            f"| {row.id} | {row['source']} | {what} | {measured:.3g} s | {measured / each.ratio:.3g} s |"
        )
    return lines


def _refused(rows: list[Refused]) -> list[str]:
    lines = ["## Rows that are not scored", "", "| rows | why |", "|---:|---|"]
    impossible = [row for row in rows if row.reason.startswith("impossible")]
    counts = Counter(row.reason for row in rows if row not in impossible)
    lines += [f"| {count} | {reason} |" for reason, count in counts.most_common()]
    lines += [f"| 1 | {row.id}, {row.source}: {row.reason} |" for row in impossible]
    return lines


if __name__ == "__main__":
    sys.stdout.write(text())
