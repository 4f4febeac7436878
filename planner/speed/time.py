"""Seconds of a plan: every phase of one step with what bounds it, and tokens a second."""

import csv
from functools import cache
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.datafiles import data_dir
from planner.run.recipe import VLLM, EngineKind
from planner.run.resolved import Resolved
from planner.run.tasks import TASKS
from planner.speed.cards import GIGA, HOST_SHARE, CardSpeed, host_memory
from planner.speed.engine import Engine, engine
from planner.speed.measured import said, speed_of
from planner.speed.parameters import Parameters
from planner.speed.roofline import HOST, LAUNCHES, LINK, LINK_SHARE, Rates, Seconds, rates, seconds
from planner.speed.spread import Spread, kind_of, spread
from planner.speed.traffic import Traffic, traffic
from planner.speed.work import Work, micro_batches, training_work
from planner.terms.kv_cache import rollout_sequences

if TYPE_CHECKING:
    from planner.plan import Plan

NETWORK_BYTES_PER_S = 400 * GIGA / 8
"""One direction of a 400 Gb/s adapter, one a GPU, as DGX and HGX nodes have."""
SHARED_MEMORY_BYTES_PER_S = 63 * GIGA
"""One direction of PCIe 5.0 x16: links of cards that share the host's memory."""


HOST_STEP = "host step"


class TimedPhase(NamedTuple):
    """One phase of a step."""

    name: str
    seconds: float
    low: float
    high: float
    bound_by: str
    """compute, bandwidth, link, launches or host."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "seconds": round(self.seconds, 6),
            "low": round(self.low, 6),
            "high": round(self.high, 6),
            "bound_by": self.bound_by,
        }


class Time(NamedTuple):
    """How long one optimizer step takes; of an engine alone, one round of requests."""

    phases: tuple[TimedPhase, ...]
    tokens: float
    """Tokens of a step on all GPUs: trained, or generated where nothing trains."""
    samples: float
    """Samples (GRPO: prompts) of a step on all GPUs."""
    notes: tuple[str, ...]
    basis: str

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def low(self) -> float:
        """Return its lower end: phases are as wrong together as they are apart."""
        return sum(phase.low for phase in self.phases)

    @property
    def high(self) -> float:
        """Return its upper end."""
        return sum(phase.high for phase in self.phases)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second on all GPUs."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def bound_by(self) -> str:
        """Return what bounds the largest part of a step."""
        parts: dict[str, float] = {}
        for phase in self.phases:
            parts[phase.bound_by] = parts.get(phase.bound_by, 0.0) + phase.seconds
        return max(parts, key=lambda name: parts[name])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "phases": [phase.to_dict() for phase in self.phases],
            "step_seconds": round(self.step_seconds, 6),
            "low_seconds": round(self.low, 6),
            "high_seconds": round(self.high, 6),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "tokens_per_step": round(self.tokens),
            "samples_per_step": round(self.samples, 3),
            "bound_by": self.bound_by,
            "basis": self.basis,
            "assumptions": list(self.notes),
        }


def time_of(plan: "Plan", *, longest: int = 0) -> Time | None:
    """Return the time of a plan's step, or None where its card's speed is not known.

    `longest`: tokens of the longest completion, where the plan's are its mean's.
    """
    speeds = speed_of(plan.machine)
    if speeds is None or plan.problem:
        return None
    found = timed(plan, *speeds, longest=longest)
    note = said(plan.machine)
    return found._replace(notes=(*found.notes, note)) if note else found


def why_not(plan: "Plan") -> str:
    """Return why a plan has no time, in one sentence."""
    gpu = plan.machine.gpu
    if plan.problem:
        return "the run cannot start"
    if plan.machine.cpu:
        return (
            "how fast this CPU computes is not known: vramwise profile calibrate --cpu measures it"
        )
    if gpu is None:
        return "no card is named: memory only"
    return f"how fast {gpu.name} computes is not known: memory only"


class _Timed(NamedTuple):
    name: str
    seconds: Seconds
    spread: Spread


def timed(plan: "Plan", card: CardSpeed, p: Parameters, *, longest: int = 0) -> Time:
    """Return the time of a plan's step with given parameters."""
    r = plan.whole[1] if plan.whole is not None else plan.resolved
    notes: list[str] = []
    if r.trains:
        phases = _training(plan, card, p, notes, longest)
        each = micro_batches(r) * r.layout.data
        tokens, samples = float(r.tokens * each), float(r.batch * each)
        if TASKS[r.task].generates:
            samples /= max(1, r.num_generations)
    else:
        phases, tokens, samples = _serving(plan, card, p, notes)
    found = tuple(
        TimedPhase(
            each.name,
            each.seconds.seconds,
            each.seconds.seconds * each.spread.low,
            each.seconds.seconds * each.spread.high,
            each.seconds.bound_by,
        )
        for each in phases
        if each.seconds.seconds > 0
    )
    basis = max(phases, key=lambda each: each.seconds.seconds).spread.basis
    return Time(phases=found, tokens=tokens, samples=samples, notes=tuple(notes), basis=basis)


def compute_dtype(plan: "Plan") -> str:
    """Return the dtype of a run's products on its card: without bf16 units frameworks take fp16."""
    gpu, dtype = plan.machine.gpu, plan.resolved.compute_dtype
    return "fp16" if dtype == "bf16" and gpu is not None and not gpu.bf16_native else dtype


def training_seconds(
    work: Work, sent: Traffic, speed: Rates, card: CardSpeed, p: Parameters
) -> list[tuple[str, Seconds]]:
    """Return the phases of the update, and what of its traffic nothing hides."""
    found = [(each.name, seconds(each, speed, p)) for each in work.passes]
    busy = sum(each.seconds for _, each in found)
    if sent.host_steps:
        reached = host_memory(card.id).reached
        found.append((HOST_STEP, Seconds(sent.host_steps / reached, HOST)))
    talk = link_seconds(sent, card, work.gpus)
    # what a layer needs of others is waited for; weights and gradients travel while others compute
    waited = talk if work.serial else max(0.0, talk - busy)
    waited += work.gathers * p.unit_s
    waited += sent.stepping / ((card.pcie or SHARED_MEMORY_BYTES_PER_S) * LINK_SHARE)
    if waited:
        found.append(("communication", Seconds(waited, LINK)))
    return found


def link_seconds(sent: Traffic, card: CardSpeed, gpus: int) -> float:
    """Return what a step's traffic between `gpus` cards and to the host takes on links that work at once.

    What moves inside the optimizer's step is not of it: nothing hides that.
    """
    pcie = card.pcie or SHARED_MEMORY_BYTES_PER_S
    inside = sent.node / ((card.link(gpus) or pcie) * LINK_SHARE)
    outside = sent.network / (NETWORK_BYTES_PER_S * LINK_SHARE)
    return max(inside + outside, (sent.host - sent.stepping) / (pcie * LINK_SHARE))


def _training(
    plan: "Plan", card: CardSpeed, p: Parameters, notes: list[str], longest: int
) -> list[_Timed]:
    r, model = plan.resolved, plan.spec
    whole, run = plan.whole or (model, r)
    found = []
    if TASKS[r.task].generates and r.engine is not EngineKind.NONE:
        made = engine(model, r, card, p)
        prefill, decode = rollout(plan, made, notes, longest)
        generate = spread(made.kind)
        found.append(_Timed("prefill", prefill, generate))
        found.append(_Timed("rollout", decode, generate))
    elif TASKS[r.task].generates:
        notes.append("no engine generates: the rollout's time is left out")
    notes += _left_out(run)
    speed = rates(card, compute_dtype(plan), p)
    work = training_work(whole, run)
    sent = traffic(whole, run, plan.machine.node_gpus)
    phases = training_seconds(work, sent, speed, card, p)
    train = spread(training_kind(phases, run.layout.gpus))
    memory = host_memory(card.id)
    wider = train._replace(low=train.low / memory.either, high=train.high * memory.either)
    if sent.host_steps:
        notes.append(
            f"the host steps at {memory.reached / GIGA:,.0f} GB/s, {HOST_SHARE:.0%} of what the memory of "
            f"{memory.host} moves"
            + (
                f", {memory.low / GIGA:,.0f} to {memory.high / GIGA:,.0f}"
                if memory.either > 1
                else ""
            )
        )
    return [
        *found,
        *(_Timed(name, each, wider if name == HOST_STEP else train) for name, each in phases),
    ]


def _left_out(r: Resolved) -> list[str]:
    """Return what a step computes beside the trained model, and the time does not count."""
    models = [each.role for each in r.companions if each.role != "reference"]
    found = [f"the {role} model's own passes are left out of the time" for role in models]
    if r.images or r.videos or r.audio:
        found.append("the towers of images and sounds are left out of the time")
    if r.offload.device == "nvme" and r.placement.offload.states:
        found.append("the disk's reads and writes of states are left out of the time")
    return found


def training_kind(phases: list[tuple[str, Seconds]], gpus: int) -> str:
    """Return the kind of a step by its phases."""
    total = sum(each.seconds for _, each in phases)
    launching = sum(each.seconds for _, each in phases if each.bound_by == LAUNCHES)
    return kind_of(trains=True, gpus=gpus, launches=2 * launching > total)


QUANTILES = 64


def order(k: int, count: int) -> float:
    """Return the share of draws below the k-th smallest (from 0) of `count` normal ones, on average (Blom 1958)."""
    return (k + 0.625) / (count + 0.25)


@cache
def deviation() -> float:
    """Return the standard deviation of completions' lengths over their mean, where nobody says otherwise.

    Of the runs of data/speed/completions.csv the middle one's: the longest of a step's completions is as many
    deviations above their mean as the largest of so many normal draws.
    """
    from statistics import NormalDist, median  # a slow import, for those who ask

    text = (data_dir() / "speed" / "completions.csv").read_text(encoding="utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        count = int(row["sequences"])
        above = float(row["longest"]) / float(row["mean"]) - 1
        found.append(above / NormalDist().inv_cdf(order(count - 1, count)))
    return median(found)


def completion_lengths(mean: float, longest: float, count: int) -> tuple[float, ...]:
    """Return quantiles of `count` completions of that mean, log-normal, none above the longest."""
    from statistics import NormalDist  # a slow import, for those who ask

    width = log(1 + deviation() ** 2)
    logs = NormalDist(0, sqrt(width))
    parts = max(1, min(QUANTILES, count))
    drawn = [exp(logs.inv_cdf(order(k, parts))) for k in range(parts)]
    return tuple(min(longest, mean * each * parts / sum(drawn)) for each in drawn)


def rollout(plan: "Plan", made: Engine, notes: list[str], longest: int) -> tuple[Seconds, Seconds]:
    """Return prefill and decoding of one step's completions on one engine."""
    r = plan.resolved
    sequences = r.sequences * micro_batches(r) * max(1, r.tensor_parallel)
    prompts = sequences / max(1, r.num_generations)
    shares = r.engine in VLLM or r.switches.prefill_tokens > 0
    lengths: tuple[float, ...] = (float(r.completion_tokens),)
    if longest > r.completion_tokens:
        lengths = completion_lengths(r.completion_tokens, longest, sequences)
        notes.append(
            f"completions of {r.completion_tokens:,} tokens on average and {longest:,} at most, log-normal "
            f"with {deviation():.2g} of the mean as deviation"
        )
    else:
        notes.append(
            f"completions of {r.completion_tokens:,} tokens each, as long as the recipe allows: "
            "--mean-completion says how long they are"
        )
    at_once = _at_once(plan, sequences)
    if r.engine is EngineKind.VLLM_SERVER:
        notes.append("the server has a GPU like this one for every one that trains")
    return made.generate(
        sequences,
        float(r.prompt_tokens),
        lengths,
        prompts=prompts if shares else sequences,
        at_once=at_once,
    )


def _at_once(plan: "Plan", sequences: int) -> int:
    """Return how many sequences run together: the engine's limit, and what its cache holds."""
    r, serving = plan.resolved, plan.serving
    together = r.engine is EngineKind.TRANSFORMERS or r.switches.generates_whole_batch
    limit = min(sequences, rollout_sequences(r) if together else r.max_num_seqs or sequences)
    towers = r.framework.engine.multimodal_sequences if plan.spec.towers else 0
    if r.engine in VLLM and towers:
        limit = min(limit, towers)
    if serving is not None and serving.kv_tokens:
        limit = min(limit, int(serving.kv_tokens / max(1, r.seq_tokens)))
    return max(1, limit)


def _serving(
    plan: "Plan", card: CardSpeed, p: Parameters, notes: list[str]
) -> tuple[list[_Timed], float, float]:
    """Return a round of requests: as many as run at once, prompts read, completions generated."""
    r = plan.resolved
    made = engine(plan.spec, r, card, p)
    generate = spread(made.kind)
    sequences = _at_once(plan, max(1, r.sequences))
    prompt, output = _parts(r)
    prefill, decode = made.generate(
        sequences, prompt, (output,), prompts=float(sequences), at_once=sequences
    )
    replicas = max(1, r.data_parallel)
    notes.append(
        f"{sequences:,} requests at once, {prompt:,.0f} tokens in and {output:,.0f} out each"
    )
    phases = [_Timed("prefill", prefill, generate), _Timed("rollout", decode, generate)]
    return phases, sequences * output * replicas, float(sequences * replicas)


def _parts(r: Resolved) -> tuple[float, float]:
    """Return a request's tokens in and out; of a context alone, half each."""
    if r.prompt_tokens and r.completion_tokens:
        return float(r.prompt_tokens), float(r.completion_tokens)
    return r.seq_tokens / 2, r.seq_tokens / 2
