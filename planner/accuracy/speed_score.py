"""Scores the speed model: rows -> samples -> errors, with every source (or run group) left out in turn."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import ValidationError

from planner.accuracy.prediction import NotARun, NotCovered, Prediction
from planner.accuracy.rows import Layout, Row
from planner.accuracy.speed_decode import PLANNED, DecodeRun, card_of, decode_run
from planner.accuracy.speed_fit import BEFORE, Fit
from planner.accuracy.speed_rows import SpeedRun, grpo_run, training_run
from planner.datafiles import data_dir
from planner.errors import VramwiseError
from planner.speed.cards import CardSpeed, card_speed
from planner.speed.engine import Engine, EngineWork, engine_work
from planner.speed.parameters import Parameters, parameters
from planner.speed.roofline import Rates, rates
from planner.speed.spread import GENERATE, GRPO, TRAIN, TRAIN_UNSTATED, spread
from planner.speed.time import compute_dtype, timed, training_kind, training_seconds
from planner.speed.traffic import Traffic, traffic
from planner.speed.work import Work, training_work

MIN_CONFIDENCE = 0.55
"""Of a row that is scored: below it a row contradicts itself, or a card's peak."""
TRAINING = Fit(
    (
        "product",
        "attention",
        "attention_tflops",
        "bandwidth",
        "unpack",
        "unpack_integer",
        "launch_s",
        "unit_s",
    ),
    BEFORE,
)
DECODING = Fit(
    (
        *("decode_bandwidth", "engine_step_s", "sequence_s", "generate_launch_s"),
        *("kernel_s", "reduce_s", "engine_product"),
    ),
    BEFORE,
)
TERA = 1e12
OTHER = "other engines"


class Refused(NamedTuple):
    """A row that is not scored, and why."""

    id: str
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A measured training step."""

    row: Row
    run: SpeedRun
    work: Work
    sent: Traffic
    card: CardSpeed
    dtype: str

    @property
    def kind(self) -> str:
        """Which parameters it decides."""
        return TRAIN

    @property
    def decides(self) -> bool:
        """Its samples' lengths are stated: else it is scored, and no parameter is read off it."""
        return self.row["tokens_known"] != "0"

    def _rates(self, p: Parameters) -> Rates:
        return rates(self.card, self.dtype, p, newest=self.row["attention"].endswith("3"))

    def spread_kind(self, p: Parameters) -> str:
        """Return what its error says something about."""
        if not self.decides:
            return TRAIN_UNSTATED
        phases = training_seconds(self.work, self.sent, self._rates(p), self.card, p)
        return training_kind(phases, self.row.integer("n_gpus") or 1)

    @property
    def source(self) -> str:
        """Who measured it."""
        return self.row["source"]

    @property
    def group(self) -> str:
        """Runs of one setting."""
        return self.row["group"] or self.row["id"]

    @property
    def measured(self) -> float:
        """Seconds of the step."""
        return self.run.seconds

    def predicted(self, p: Parameters) -> float:
        """Return seconds of the step, or of its micro-batches alone."""
        found = training_seconds(self.work, self.sent, self._rates(p), self.card, p)
        if self.row["quantity"] == "s_per_micro_batch":
            total = sum(each.seconds for name, each in found if name != "step")
            return total / self.work.micro_batches
        return sum(each.seconds for _, each in found)


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A measured rate of generation, as seconds of a step."""

    row: Row
    run: DecodeRun
    work: EngineWork
    card: CardSpeed
    memo: dict[int, float]
    decides = True

    @property
    def kind(self) -> str:
        """Of engines that are not planned a kind of its own: they decide no parameter."""
        return GENERATE if self.row["engine"].startswith(PLANNED) else OTHER

    def spread_kind(self, p: Parameters) -> str:
        """Return what its error says something about."""
        if self.kind == OTHER:
            return OTHER
        return Engine(self.run.plan.spec, self.run.plan.resolved, self.card, p, self.work, {}).kind

    @property
    def source(self) -> str:
        """Who measured it."""
        return self.row["source"]

    @property
    def group(self) -> str:
        """One model on one card."""
        return f"{self.row['source']}|{self.row['model']}|{self.row['gpu']}"

    @property
    def measured(self) -> float:
        """Seconds a token of one sequence takes."""
        return self.run.seconds

    def predicted(self, p: Parameters) -> float:
        """Return the same by the engine's own laws."""
        run = self.run
        made = Engine(run.plan.spec, run.plan.resolved, self.card, p, self.work, self.memo)
        if run.steps_alone:
            step = made.decode(run.running, run.prompt + run.output / 2).seconds
            return step * run.concurrency / run.running
        first, rest = made.generate(
            run.requests, run.prompt, run.lengths, prompts=run.requests, at_once=run.running
        )
        return (first.seconds + rest.seconds) * run.concurrency / (run.requests * run.output)


@dataclass(frozen=True, slots=True)
class GrpoSample:
    """A measured GRPO step, rollout and all. It decides no parameter: others' make it up."""

    row: Row
    run: SpeedRun
    card: CardSpeed
    decides = False

    @property
    def kind(self) -> str:
        """Which parameters it decides: none."""
        return GRPO

    @property
    def source(self) -> str:
        """Who measured it."""
        return self.row["source"]

    @property
    def group(self) -> str:
        """Runs of one setting."""
        return self.row["group"] or self.row["id"]

    @property
    def measured(self) -> float:
        """Seconds of the step."""
        return self.run.seconds

    def spread_kind(self, p: Parameters) -> str:
        """Return what its error says something about."""
        return GRPO

    def predicted(self, p: Parameters) -> float:
        """Return seconds of the step."""
        return timed(self.run.plan, self.card, p, longest=self.run.longest).step_seconds


TimeSample = TrainSample | DecodeSample | GrpoSample


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample with its prediction by parameters that its source (or group) had no part in."""

    sample: TimeSample
    predicted: float

    @property
    def error(self) -> float:
        """Relative, signed: positive when the planner says too long."""
        return self.predicted / self.sample.measured - 1


def samples_of(rows: Iterable[Row]) -> tuple[list[TimeSample], list[Refused]]:
    """Return rows as samples, and those that are none."""
    found: list[TimeSample] = []
    refused = []
    for row in rows:
        try:
            found.append(sample_of(row))
        except (NotCovered, NotARun) as reason:
            refused.append(Refused(row.id, row["source"], str(reason)))
        except VramwiseError as error:
            refused.append(Refused(row.id, row["source"], error.message))
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            text = f"the row's {where} is outside what a recipe allows"
            refused.append(Refused(row.id, row["source"], text))
    return found, refused


def sample_of(row: Row) -> TimeSample:
    """Return one row as a sample; raises NotCovered with the reason."""
    if (row.number("confidence") or 0.0) < MIN_CONFIDENCE:
        raise NotCovered(f"confidence {row['confidence']}: below {MIN_CONFIDENCE}")
    if row.layout is Layout.DECODE:
        run = decode_run(row)
        card = _card(run.plan.machine.gpu.id if run.plan.machine.gpu else "")
        engine = engine_work(run.plan.spec, run.plan.resolved, card, run.release)
        return DecodeSample(row, run, engine, card_of(row, card), {})
    if "grpo" in row["method"] or "swe" in row["method"]:
        stepped = grpo_run(row)
        gpu = stepped.plan.machine.gpu
        return GrpoSample(row, stepped, _card(gpu.id if gpu else ""))
    found = training_run(row)
    made = found.plan
    card = _card(made.machine.gpu.id if made.machine.gpu else "")
    whole, resolved = made.whole or (made.spec, made.resolved)
    work = training_work(whole, resolved)
    sent = traffic(whole, resolved, made.machine.node_gpus)
    sample = TrainSample(row, found, work, sent, card_of(row, card), compute_dtype(made))
    refuse_impossible(sample)
    return sample


def predict_speed(row: Row) -> Prediction:
    """Return what the shipped parameters say about a row: step_seconds of training, tokens_per_s of engines."""
    sample = sample_of(row)
    kind = sample.spread_kind(parameters())
    if kind == OTHER:
        raise NotCovered(f"the engine {row['engine'][:30]!r} is not planned")
    seconds, factors = sample.predicted(parameters()), spread(kind)
    made, low, high = sample.run.plan, seconds * factors.low, seconds * factors.high
    if not isinstance(sample, DecodeSample):
        return Prediction(
            "step_seconds", seconds, low, high, made, truth=sample.measured, judged=False
        )
    at_once = sample.run.concurrency * sample.run.copies
    return Prediction(
        "tokens_per_s", at_once / seconds, at_once / high, at_once / low, made,
        truth=at_once / sample.measured, judged=False,
    )  # fmt: skip


def refuse_impossible(sample: TrainSample) -> None:
    """Raise NotCovered with the arithmetic when the products alone exceed what the card can do."""
    flops = sum(
        each.flops + each.narrow_flops + each.attention_flops for each in sample.work.passes
    )
    dtype = "fp8" if sample.run.plan.resolved.float8 is not None else sample.dtype
    most = sample.card.fastest(dtype) or sample.card.fastest("fp32")
    reached = flops / sample.measured
    if reached > most:
        raise NotCovered(
            f"impossible: {flops:.3g} FLOPs in {sample.measured:.3g} s are {reached / TERA:,.0f} TFLOPS; "
            f"{sample.card.id} does {most / TERA:,.0f} in {dtype}"
        )


def _card(gpu_id: str) -> CardSpeed:
    card = card_speed(gpu_id) if gpu_id else None
    if card is None:
        raise NotCovered(f"how fast {gpu_id or 'the card'} is, is not known")
    return card


def shipped_rows() -> list[Row]:
    """Return the rows of data/speed."""
    folder = Path(str(data_dir() / "speed"))
    return [row for name in ("throughput", "decode") for row in read(folder / f"{name}.csv")]


def read(path: Path) -> list[Row]:
    """Return a file's rows; its columns say which kind they are."""
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        decode = "output_len" in (reader.fieldnames or [])
        layout = Layout.DECODE if decode else Layout.THROUGHPUT
        return [Row(layout, {k: v or "" for k, v in fields.items() if k}) for fields in reader]


def left_out(
    samples: Sequence[TimeSample], key: Callable[[TimeSample], str], fit: Fit, *, folds: int = 0
) -> list[Scored]:
    """Return every sample predicted by a fit without its own source or group.

    `folds`: so many groups of keys instead of one fit a key.
    """
    keys = sorted({key(sample) for sample in samples})
    parts = [keys[k::folds] for k in range(folds)] if folds else [[each] for each in keys]
    found = []
    for part in parts:
        without = [each for each in samples if key(each) not in part and each.decides]
        if not without:
            continue
        p = fit.run(without)
        found += [Scored(each, each.predicted(p)) for each in samples if key(each) in part]
    return found


class Errors(NamedTuple):
    """Statistics of absolute errors."""

    n: int
    median: float
    p90: float
    bias: float


def errors_of(scored: Sequence[Scored]) -> Errors:
    """Return statistics of rows that count alike."""
    sizes = sorted(abs(each.error) for each in scored)
    rank = min(len(sizes) - 1, int(0.9 * len(sizes)))
    return Errors(len(sizes), median(sizes), sizes[rank], median(each.error for each in scored))


def weighted(scored: Sequence[Scored], share: float) -> float:
    """Return a quantile of absolute errors in which every source counts the same."""
    counts: dict[str, int] = {}
    for each in scored:
        counts[each.sample.source] = counts.get(each.sample.source, 0) + 1
    ordered = sorted((abs(each.error), 1 / counts[each.sample.source]) for each in scored)
    run = 0.0
    for size, weight in ordered:
        run += weight
        if run >= share * len(counts):
            return size
    return ordered[-1][0]
