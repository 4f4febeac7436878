"""From a log to a diagnosis: every failure with its budget, candidate tensors, causes and fixes."""

from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from planner.doctor import (
    causes_growth,
    causes_host,
    causes_outside,
    causes_ranks,
    causes_serving,
    causes_sglang,
)
from planner.doctor.budget import Budget, read_budget
from planner.doctor.candidates import Candidate, find_candidates
from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.causes_engine import (
    ENGINE_RULES,
    graph_capture,
    multimodal_profile,
    prompt_logprobs,
    sampler_warmup,
)
from planner.doctor.causes_training import TRAINING_RULES, Rule, other_process
from planner.doctor.context import Context, read_context
from planner.doctor.event import Event
from planner.doctor.fixes import Advice, advise
from planner.doctor.phases import phase_hints
from planner.doctor.planned import Planned, planned
from planner.doctor.scan import Scan, scan
from planner.doctor.slots import lora_slots
from planner.run.recipe import Recipe

ALL_RULES: tuple[Rule, ...] = (
    *causes_outside.OUTSIDE_RULES,
    lora_slots,
    *causes_host.HOST_RULES,
    *causes_sglang.SGLANG_RULES,
    *ENGINE_RULES,
    *causes_growth.GROWTH_RULES,
    *causes_ranks.RANK_RULES,
    *TRAINING_RULES,
)
"""In the order in which a reading wins."""
MAX_FAILURES = 20
"""Different errors of one log that are worked out; the first is the cause in practice."""
UNKNOWN = Cause(
    category="unknown",
    certainty=Certainty.UNKNOWN,
    explanation="the text does not say enough to tell: a stack trace, the full message, --config or --model would.",
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One error of a log and what is made of it."""

    event: Event | None
    budget: Budget | None
    phases: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    causes: tuple[Cause, ...]
    """Most likely first; never empty."""
    advice: Advice
    planned: Planned | None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything `explain` found."""

    failures: tuple[Failure, ...]
    """First cause first; one without an event when the text only describes."""
    context: Context
    scan: Scan
    notes: tuple[str, ...] = ()

    @property
    def parsed(self) -> dict[str, Any]:
        """Return the numbers of the first failure, keys as in data/measurements/oom_cases.jsonl."""
        return parsed_facts(self.failures[0], self.scan)


def diagnose(
    source: BinaryIO | str,
    *,
    model: str | None = None,
    gpu: str | None = None,
    recipe: Recipe | None = None,
    config_model: str | None = None,
    gpus: int | None = None,
) -> Diagnosis:
    """Read a log, a message or a description and return what it shows.

    `recipe`, `config_model` and `gpus` come from an imported config; flags win over it, and
    it wins over what the text says.
    """
    found = scan(source)
    prose = found.prose
    if found.vllm.settings:
        prose += "\n" + "\n".join(f"{key}: {value}" for key, value in found.vllm.settings.items())
    context = read_context(
        prose, model=model, gpu=gpu, recipe=recipe, config_model=config_model, gpus=gpus
    )
    if len(found.ranks) > 1 and "gpus" not in context.numbers:
        context = replace(context, numbers={**context.numbers, "gpus": max(found.ranks) + 1})
    notices = tuple(event for event in found.events if not event.is_error)
    errors = strong(found)
    events: list[Event | None] = list(errors[:MAX_FAILURES])
    if not events:
        events = [notices[-1] if notices else None]
    failures = tuple(_failure(event, context, found, notices, recipe) for event in events)
    notes = context.notes
    further = len(errors) - len(errors[:MAX_FAILURES]) + found.dropped_events
    if found.growth is not None and found.growth.kind == "unclear":
        notes = (*notes, found.growth.cannot_tell())
    if further:
        notes = (*notes, f"{further:,} further errors are not shown: the first cause comes first")
    return Diagnosis(failures=failures, context=context, scan=found, notes=notes)


def strong(found: Scan) -> list[Event]:
    """Return the errors that stand for themselves, first cause first.

    A launcher's lines about killed ranks, a worker that died and a plain exception say nothing
    where a failure of memory was printed; where there is none, they are what is known.
    """
    errors = found.errors
    crash = next((event.line for event in found.others if event.facts.get("device")), None)
    if (
        crash is not None
    ):  # after a crash of the device the driver refuses everything, without sizes
        errors = [event for event in errors if event.line < crash or not _says_nothing(event)]
    sure = [event for event in errors if not event.is_weak]
    if sure:
        first = sure[0].line
        kept = [event for event in errors if event in sure or event.kind == "host_killed"]
        return [event for event in kept if not event.is_weak or event.line < first]
    kills = [event for event in errors if event.kind == "host_killed"]
    if kills:
        return kills
    died = [event for event in errors if event.kind in ("killed", "worker_died")]
    if died:
        return died[:1]
    return errors[:1] or found.others[:1]


def _says_nothing(event: Event) -> bool:
    """Return whether the driver refused without a figure."""
    return event.cuda is not None and event.cuda.backend == "driver" and not event.cuda.facts


SERVING_RULES: tuple[Rule, ...] = (
    *causes_outside.OUTSIDE_RULES,
    lora_slots,
    sampler_warmup,
    graph_capture,
    multimodal_profile,
    prompt_logprobs,
    other_process,
    causes_serving.serving,
)
"""For a failure inside an engine, which no trainer's change helps."""


def rules_of(event: Event | None, *, serves: bool = False) -> tuple[Rule, ...]:
    """Return the rules that apply: a host kill has no reason on the GPU, a refusal names its own."""
    if serves:
        return SERVING_RULES
    if event is None:
        return ALL_RULES
    if event.kind in causes_host.KINDS:
        return (*causes_host.HOST_RULES, causes_growth.grows)
    if event.kind in causes_outside.KINDS:
        return causes_outside.OUTSIDE_RULES
    if event.kind in causes_sglang.KINDS:
        return causes_sglang.SGLANG_RULES
    if event.kind.startswith("vllm_"):
        return (*ENGINE_RULES, lora_slots)
    return ALL_RULES


def _failure(
    event: Event | None,
    context: Context,
    found: Scan,
    notices: tuple[Event, ...],
    recipe: Recipe | None,
) -> Failure:
    if event is not None and "max_num_seqs" in event.facts:
        context = replace(
            context, numbers={**context.numbers, "max_num_seqs": int(event.facts["max_num_seqs"])}
        )
    budget = read_budget(event) if event else None
    phases = phase_hints(event.stack if event else (), found.prose)
    candidates: tuple[Candidate, ...] = ()
    if event is not None and event.cuda is not None and "tried" in event.cuda.printed:
        rounded = event.cuda.backend == "native"
        candidates = tuple(
            find_candidates(event.cuda.printed["tried"], context, phases, rounded=rounded)
        )
    signals = Signals(
        event=event,
        context=context,
        budget=budget,
        phases=phases,
        candidates=candidates,
        vllm=found.vllm,
        notices=notices,
        growth=found.growth,
        held=found.held,
    )
    causes = [
        cause
        for rule in rules_of(event, serves=causes_serving.serves_vllm(signals))
        if (cause := rule(signals))
    ]
    unique = {cause.category: cause for cause in reversed(causes)}
    ordered = [unique[category] for category in dict.fromkeys(cause.category for cause in causes)]
    if ordered and ordered[0].certainty is not Certainty.UNKNOWN:
        # beside a reading that fits, no other is named that nothing supports
        ordered = [
            cause
            for cause in ordered
            if cause.category == "unknown" or cause.certainty is not Certainty.UNKNOWN
        ]
    best = tuple(ordered) or (UNKNOWN,)
    advice = advise(best[0], signals)
    run = planned(signals, best[0].category, recipe)
    if run is not None:
        advice = replace(advice, fixes=(*advice.fixes, *run.fixes))
    return Failure(
        event=event,
        budget=budget,
        phases=phases,
        candidates=candidates[:12],
        causes=best,
        advice=advice,
        planned=run,
    )


def parsed_facts(failure: Failure, found: Scan) -> dict[str, Any]:
    """Return the numbers of a failure and of the sleep lines around it."""
    facts: dict[str, Any] = {}
    for notice in found.events:
        if notice.kind == "sleep_line":
            facts.update(notice.facts)
    event = failure.event
    if event is not None:
        facts.update(event.facts)
        if event.cuda is not None:
            facts["printed"] = event.cuda.printed
            if event.cuda.others_bytes:
                facts["others_bytes"] = list(event.cuda.others_bytes)
            if event.cuda.gpu is not None:
                facts["gpu"] = event.cuda.gpu
    return facts
