"""plan(model, recipe, machine) -> Plan: will it fit, what takes the memory, when, and why."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import starmap
from typing import TYPE_CHECKING, Any

from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.phases import Phase, budget
from planner.reserved import Reserved, needed, outside_bytes, reserved
from planner.risk import EVEN, TAIL, Distribution, Risk, distribution, kind_of
from planner.run.card_notes import card_notes
from planner.run.engine_degrees import idle_note, refuse_degrees
from planner.run.experts import LOOPS, uneven_notes
from planner.run.framework import planned_as, spelled
from planner.run.made import made
from planner.run.ranks import RankPeak, RankRun, rank_runs
from planner.run.recipe import VLLM, EngineKind, Recipe, Task
from planner.run.resolve import resolve
from planner.run.resolved import Resolved
from planner.run.task_model import task_model
from planner.run.tasks import planned_task
from planner.terms.engine import Serving
from planner.terms.free_chunks import with_chunks
from planner.terms.groups import NO_GROUPS, Communicators, communicators
from planner.terms.shards import storage_note
from planner.terms.term import Term, merged
from planner.terms.vision import left_out
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.speed.time import Time

SCHEMA_VERSION = 1
FRAGMENTED = 1.1
"""Room left for fragments where no replay is made: a margin for searches, never a verdict."""
MOST_NEEDED = 2
"""No run needs twice what is alive at its peak: the allocator gives idle segments back (a test holds
it on fifty recipes)."""


@dataclass(frozen=True)
class Plan:
    """The answer: phases x terms, and the figures drawn from them."""

    model: str
    spec: ModelSpec = field(repr=False, compare=False)
    machine: Machine
    resolved: Resolved
    phases: tuple[Phase, ...]
    peak_phase: str
    peak_bytes: int
    """Tensors alive in the largest phase (what torch calls peak allocated)."""
    capacity_bytes: int
    """What torch sees on one GPU, less the CUDA context and the communicators of the run's groups."""
    host_peak_bytes: int
    host_terms: tuple[Term, ...] = ()
    assumptions: tuple[str, ...] = ()
    not_modeled: tuple[str, ...] = field(default=())
    serving: Serving | None = None
    """vLLM's own figures, as its start-up log prints them; None when none runs on this GPU."""
    risk_allowed: float = TAIL
    """`fits` means at most this risk of ending out of memory."""
    imbalance_bytes: int = 0
    """What the peak gains where a router sends every token to the same experts of a loop."""
    communicators: Communicators = NO_GROUPS
    """Groups of ranks it talks in."""
    ranks: tuple[RankPeak, ...] = ()
    """The distinct ranks, of which this plan is the fullest one's."""
    whole: tuple[ModelSpec, Resolved] | None = field(default=None, repr=False, compare=False)
    """The run before ranks took their parts; None for a rank's own plan."""
    asked: Recipe = field(default=Recipe(), repr=False, compare=False)
    """The recipe, before the framework's defaults."""
    problem: str = ""
    """Why the run cannot start whatever the memory (an engine that refuses); "" = it can."""

    @cached_property
    def reserved(self) -> Reserved:
        """What torch's allocator holds: replayed when somebody asks, milliseconds after the rest."""
        return self.reserved_over()

    def reserved_over(self, lengths: tuple[int, ...] = ()) -> Reserved:
        """Return the same of a run whose steps have sequences of `lengths` tokens."""
        return reserved(self.spec, self.resolved, self.phases, self.capacity_bytes, lengths)

    @cached_property
    def time(self) -> "Time | None":
        """How long a step takes, worked out when somebody asks; None: the card's speed is not known."""
        from planner.speed.time import time_of

        return time_of(self)

    @property
    def needed_bytes(self) -> int:
        """The least pool the run goes through in: what is alive, and what fragments beside it."""
        return needed(self.spec, self.resolved, self.phases, self.capacity_bytes)

    @property
    def low_bytes(self) -> int:
        """torch's pool is larger than this in 95% of runs like this one, and never below what stands.

        Nor above what is alive at the peak: pools of their own for streams may be counted too large.
        """
        likely = int(self.reserved.on_card * self._spread(self._below("reserved")).quantile(TAIL))
        return min(max(likely, self._standing_bytes), self.peak_bytes)

    @property
    def _standing_bytes(self) -> int:
        """Return the tensors that a run has for certain at its peak: counted, not measured."""
        counted = ("weights", "adapters", "optimizer", "kv_cache")
        return max(
            sum(term.bytes for term in phase.terms if term.name in counted) for phase in self.phases
        )

    @property
    def high_bytes(self) -> int:
        """torch's pool would be smaller than this in 95% of runs like this one, had the card room.

        Experts in a loop hold more the less evenly they are used: the worst is counted here.
        """
        likely = int(self.reserved.with_room * self._spread("reserved").quantile(1 - TAIL))
        return likely + self.imbalance_bytes

    def _spread(self, quantity: str) -> Distribution:
        r = self.resolved
        return distribution(quantity, kind_of(r), r.framework.family)

    def interval(self, quantity: str, value: float) -> tuple[float, float]:
        """Return the 5% and 95% of a figure (allocated, reserved or device) over runs like this one."""
        below, above = self._spread(self._below(quantity)), self._spread(quantity)
        return value * below.quantile(TAIL), value * above.quantile(1 - TAIL)

    def _below(self, quantity: str) -> str:
        """Return the quantity that says how far a figure may be below: in expandable segments what is
        reserved follows what is alive, so it is not as far below as where segments were counted."""
        expandable = self.resolved.switches.expandable_segments
        return "allocated" if quantity == "reserved" and expandable else quantity

    @cached_property
    def risk(self) -> Risk:
        """How likely the run ends out of memory: the share of measured runs as far above their plan."""
        return self.risk_over(self._spread("allocated"))

    def risk_over(self, spread: Distribution) -> Risk:
        """Return the same by another distribution of measured runs."""
        if not self.tensors_fit:
            return Risk(1.0, "more than there is, by the plan itself")
        if not self.resolved.trains and self.serving is not None:
            return Risk(self.serving.refusal_risk, "vLLM refuses a pool under one request")
        least, most = (
            spread.above(self.capacity_bytes / (times * self.peak_bytes))
            for times in (1, MOST_NEEDED)
        )
        if least >= EVEN or most == 0:  # the replay could not change the verdict
            return Risk(least if least >= EVEN else most, spread.basis)
        return Risk(spread.above(self.capacity_bytes / self.needed_bytes), spread.basis)

    @property
    def reserved_peak_bytes(self) -> int:
        """Typical torch.cuda.max_memory_reserved on this card."""
        return self.reserved.on_card

    @property
    def device_used_bytes(self) -> int:
        """What nvidia-smi shows: reserved, the CUDA context and communicators."""
        return self.reserved.on_card + outside_bytes(self.resolved, self.machine)

    @property
    def allocated_peak_bytes(self) -> int:
        """Same as peak_bytes: the name published runs use."""
        return self.peak_bytes

    @property
    def headroom_bytes(self) -> int:
        """Capacity less the peak; negative when it does not fit."""
        return self.capacity_bytes - self.peak_bytes

    @property
    def verdict(self) -> str:
        """fits (the risk is at most `risk_allowed`), does not fit (at least even), tight between."""
        return self.verdict_of(self.risk)

    def verdict_of(self, risk: Risk) -> str:
        """Return the verdict at another risk."""
        p_oom = risk.p_oom
        if p_oom >= EVEN:
            return "does not fit"
        return "fits" if p_oom <= self.risk_allowed else "tight"

    @property
    def host_fits(self) -> bool:
        """True when host RAM is enough or not stated."""
        limit = self.machine.host_ram_bytes
        return limit is None or self.host_peak_bytes <= limit

    @property
    def fits(self) -> bool:
        """The run can be relied on: its risk is at most `risk_allowed`."""
        return self.risk.p_oom <= self.risk_allowed

    @property
    def may_run(self) -> bool:
        """The run is more likely to go through than not: the verdict is fits or tight."""
        return self.risk.p_oom < EVEN

    @property
    def has_room(self) -> bool:
        """It fits even as far above the plan as `risk_allowed` says and as fragmented. No replay."""
        return self.has_room_for(FRAGMENTED)

    def has_room_for(self, fragmented: float) -> bool:
        """Return the same where the allocator needs `fragmented` times what is alive."""
        if not self.resolved.trains:
            return self.tensors_fit and self.fits
        return self.tensors_fit and self.peak_bytes <= self.trusted_bytes(fragmented)

    def trusted_bytes(self, fragmented: float) -> int:
        """Return the largest peak that can be relied on where the allocator needs so much more."""
        if not self.resolved.trains:
            return self.capacity_bytes
        most = self._spread("allocated").quantile(1 - self.risk_allowed)
        return int(self.capacity_bytes / (fragmented * most))

    @property
    def tensors_fit(self) -> bool:
        """What is alive is no more than there is, on the GPU and on the host. No replay needed."""
        return not self.problem and self.peak_bytes <= self.most_bytes and self.host_fits

    @property
    def most_bytes(self) -> int:
        """The capacity where communicators take the least that was ever read of them."""
        held = self.communicators.held
        return self.capacity_bytes + held.typical - held.low

    @property
    def sees_nothing(self) -> bool:
        """A model with towers is trained, and the recipe gives it no image, video or sound."""
        return bool(left_out(self.spec, self.resolved))

    @property
    def why(self) -> str:
        """One sentence: the largest phase, its largest terms and the room left."""
        if self.problem:
            return self.problem
        phase = self.phase(self.peak_phase)
        parts = sorted(phase.terms, key=lambda term: -term.bytes)[:3]
        listed = ", ".join(f"{term.name} {format_bytes(term.bytes)}" for term in parts)
        if not self.host_fits:
            return f"host RAM: needs {format_bytes(self.host_peak_bytes)}"
        room = (
            f"{format_bytes(self.headroom_bytes)} left"
            if self.headroom_bytes >= 0
            else f"{format_bytes(-self.headroom_bytes)} too much"
        )
        return (
            f"the peak is in {phase.name}: {listed}; {room} of {format_bytes(self.capacity_bytes)}"
        )

    def phase(self, name: str) -> Phase:
        """Return the phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    def _framework(self) -> dict[str, Any]:
        law, asked = self.resolved.framework, spelled(self.resolved.framework_asked)
        return {
            "name": law.name,
            "family": law.family,
            "version_asked": asked.version or None,
            "versions": law.versions,
            "package": law.package or law.family,
            "planned_as": planned_as(law, self.resolved.framework_asked),
            "source": law.source,
        }

    def _engine(self) -> dict[str, Any]:
        """Return the engine's settings with every default filled in, {} where none runs."""
        r = self.resolved
        if r.engine not in VLLM:
            return {}
        return {
            "resolved": {
                "engine": {
                    "kind": r.engine.value,
                    "gpu_memory_utilization": r.utilization,
                    "max_num_seqs": r.max_num_seqs,
                    "max_num_batched_tokens": r.max_num_batched_tokens,
                    "kv_dtype": r.kv_dtype,
                    "tensor_parallel": r.tensor_parallel,
                    "pipeline_parallel": r.pipeline_parallel,
                    "expert_parallel": r.expert_parallel,
                    "sleep_level": r.sleep_level,
                    "cuda_graphs": r.cuda_graphs,
                }
            }
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of `vramwise plan --json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "framework": self._framework(),
            "verdict": self.verdict,
            "fits": self.fits,
            "why": self.why,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "low_bytes": self.low_bytes,
            "high_bytes": self.high_bytes,
            "allocated_peak_bytes": self.allocated_peak_bytes,
            "reserved_peak_bytes": self.reserved_peak_bytes,
            "device_used_bytes": self.device_used_bytes,
            "reserved": {
                "low_bytes": self.low_bytes,
                "typical_bytes": self.reserved.on_card,
                "high_bytes": self.high_bytes,
            },
            "needed_bytes": self.needed_bytes,
            "imbalance_bytes": self.imbalance_bytes,
            "risk": {**self.risk.to_dict(), "allowed": self.risk_allowed},
            "capacity_bytes": self.capacity_bytes,
            "headroom_bytes": self.headroom_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "host_terms": [term.to_dict() for term in self.host_terms],
            "ranks": [rank.to_dict() for rank in self.ranks],
            "groups": self.communicators.to_list(),
            "recipe": made(self.asked, self.resolved),
            "phases": [phase.to_dict() for phase in self.phases],
            "time": self.time.to_dict() if self.time is not None else None,
            "assumptions": list(self.assumptions),
            "not_modeled": list(self.not_modeled),
            **self._engine(),
            **({"serving": self.serving.to_dict()} if self.serving else {}),
        }


def plan(model: ModelSpec, recipe: Recipe, machine: Machine, *, risk: float = TAIL) -> Plan:
    """Return what `recipe` needs for `model` on `machine`, phase by phase.

    `risk`: of ending out of memory that "fits" still allows, between 0 and 0.5. Raises
    UsageError for contradictions in the recipe, UnsupportedError for what cannot be expressed.
    """
    if not 0 < risk < EVEN:
        raise UsageError(f"risk: {risk:g} is not allowed", hint=f"between 0 and {EVEN:g}, as 0.01")
    model = task_model(model, planned_task(recipe))
    resolved = resolve(model, recipe, machine)
    refuse_degrees(model, resolved, machine.num_gpus)
    return replace(plan_resolved(model, resolved, machine, risk=risk), asked=recipe)


def plan_resolved(
    model: ModelSpec, resolved: Resolved, machine: Machine, *, risk: float = TAIL
) -> Plan:
    """Return the plan of a recipe whose choices are all made."""
    kinds = rank_runs(model, resolved)
    plans = plans_of_ranks(model, resolved, machine, risk=risk)
    ranks = tuple(starmap(_rank_peak, zip(kinds, plans, strict=True)))
    fullest = max(plans, key=lambda found: found.peak_bytes)
    return replace(fullest, ranks=ranks, whole=(model, resolved))


def _rank_peak(kind: RankRun, found: Plan) -> RankPeak:
    return RankPeak(
        kind.number, kind.count, kind.role, found.peak_bytes, found.peak_phase,
        {term.name: term.bytes for term in merged(*found.phase(found.peak_phase).terms)},
    )  # fmt: skip


def plans_of_ranks(
    model: ModelSpec, resolved: Resolved, machine: Machine, *, risk: float = TAIL
) -> list[Plan]:
    """Return the plan of every distinct rank, the first pipeline stage's first."""
    kinds = rank_runs(model, resolved)
    return [_of_rank(kind.model, kind.resolved, machine, risk) for kind in kinds]


def _of_rank(model: ModelSpec, resolved: Resolved, machine: Machine, risk: float) -> Plan:
    """Return the plan of one rank."""
    resolved = with_chunks(model, resolved, machine)
    result = budget(model, resolved, machine)
    peak = max(result.phases, key=lambda phase: phase.total_bytes)
    uneven = 0
    divided = resolved.layout.expert > 1
    if (resolved.experts in LOOPS or divided) and not resolved.imbalance:
        worst = budget(model, replace(resolved, imbalance=True), machine)
        uneven = max(0, max(phase.total_bytes for phase in worst.phases) - peak.total_bytes)
    host_bytes = sum(term.bytes for term in result.host)
    unified = machine.gpu is not None and machine.gpu.unified
    # unified memory: what is "offloaded" to the host stays in the same memory
    shared = host_bytes if unified else 0
    talk = communicators(resolved, machine)
    outside = machine.context_bytes + talk.held.typical
    capacity = max(0, machine.vram_bytes - outside - shared)
    return Plan(
        model=model.name,
        spec=model,
        machine=machine,
        resolved=resolved,
        phases=result.phases,
        peak_phase=peak.name,
        peak_bytes=peak.total_bytes,
        capacity_bytes=capacity,
        host_peak_bytes=host_bytes,
        host_terms=result.host,
        assumptions=(
            *_assumptions(resolved, machine, shared),
            *uneven_notes(model, resolved, uneven),
            *storage_note(model, resolved),
        ),
        not_modeled=_not_modeled(model, resolved),
        serving=result.serving,
        risk_allowed=risk,
        imbalance_bytes=uneven,
        problem=result.problem,
        communicators=talk,
    )


def _assumptions(resolved: Resolved, machine: Machine, shared: int) -> tuple[str, ...]:
    notes = [
        *resolved.assumptions,
        *filter(None, [idle_note(resolved, machine.num_gpus)]),
        *card_notes(resolved, machine.gpu),
    ]
    gpu = machine.gpu
    guessed = gpu is not None and gpu.torch_total_basis == "derived"
    if gpu is not None and guessed and machine.vram_bytes == gpu.torch_total_bytes:
        notes.append(
            f"{format_bytes(machine.vram_bytes)} is derived for this card, not read on one "
            f"({gpu.source['torch_total_mib']}); --vram states what yours shows"
        )
    if machine.calibration and not machine.cpu:
        notes.append(f"CUDA context {machine.calibration}")
    if shared:
        notes.append(
            f"unified memory: the {format_bytes(shared)} of host terms are taken off the capacity"
        )
    return tuple(notes)


def _not_modeled(model: ModelSpec, r: Resolved) -> tuple[str, ...]:
    notes = []
    if r.task is Task.SERVE and r.engine in VLLM and model.towers:
        notes.append(
            "vision or audio encoder: vLLM's profile runs it on the largest inputs and caches what it "
            "makes; only its weights are counted (one log's peak was six times the text's)"
        )
    if r.trains and r.engine is EngineKind.VLLM_SERVER and r.transfer == "ipc":
        notes.append(
            "transfer ipc: the server that holds its weights and KV pool on this GPU, and the buffer of one "
            "tensor through which weights reach it"
        )
    if missing := left_out(model, r):
        notes.append(missing)
    return tuple(notes)
