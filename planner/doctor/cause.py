"""What a cause is, what the rules look at, and the static-state inequality they share."""

from dataclasses import dataclass, field
from enum import StrEnum

from planner.doctor.budget import Budget
from planner.doctor.candidates import Candidate
from planner.doctor.context import Context
from planner.doctor.events import Event
from planner.doctor.vllm_log import VllmLog
from planner.units import format_bytes


class Certainty(StrEnum):
    """How sure a cause is."""

    PROVEN = "proven by arithmetic"
    CONSISTENT = "consistent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One reading of a failure."""

    category: str
    certainty: Certainty
    explanation: str
    formula: str = ""


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Everything known about one failure."""

    event: Event | None
    """None when the text only describes what it saw."""
    context: Context
    budget: Budget | None = None
    phases: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    vllm: VllmLog = field(default_factory=VllmLog)
    notices: tuple[Event, ...] = ()
    """Sleep lines and usage reports of the same log."""

    def has(self, *phases: str) -> bool:
        """Return whether any of the phases was seen."""
        return any(phase in self.phases for phase in phases)

    def first(self, *phases: str) -> bool:
        """Return whether the most telling phase is one of these."""
        return bool(self.phases) and self.phases[0] in phases

    @property
    def tried_bytes(self) -> int | None:
        """Size of the request that failed."""
        return self.budget.requested_bytes if self.budget else None

    @property
    def card_bytes(self) -> int | None:
        """Memory of the card: the message's, else the named GPU's."""
        if self.budget and self.budget.total_bytes:
            return self.budget.total_bytes
        return self.context.vram_bytes

    def candidate(self, *kinds: str) -> Candidate | None:
        """Return the most likely candidate of these kinds, or None."""
        return next((found for found in self.candidates if found.kind in kinds), None)


@dataclass(frozen=True, kw_only=True)
class StaticState:
    """Bytes one GPU holds before the first batch, as an inequality against the card."""

    low_bytes: int
    high_bytes: int
    formula: str
    exact: bool
    """The parameter count is the model's own, not read from its name."""


def weights_bytes(context: Context) -> int | None:
    """Return the bytes of one whole copy of the base weights, or None if the size is unknown."""
    if context.parameters is None:
        return None
    if context.method == "qlora" and context.model_name:
        return int(0.55 * context.parameters)
    return (4 if "fp32" in context.model_name else 2) * context.parameters


def static_state(context: Context) -> StaticState | None:
    """Return weights + gradients + optimizer on one GPU; None if the size is unknown.

    Full fine-tuning is bracketed: 8 bytes/parameter when everything is 16 bit, 16 with fp32
    weights or masters (data/frameworks has each framework's choice). LoRA counts the base.
    """
    params = context.parameters
    sharded = context.sharding in ("zero1", "zero2", "zero3", "fsdp")
    if params is None or (sharded and "gpus" not in context.numbers):
        return None  # a shard's size needs the number of ranks
    ranks = context.gpus
    models = 2 if context.task == "ppo" else 1
    frozen = 2 if context.task == "ppo" else 0
    weight = 0.55 if context.method == "qlora" else 2.0
    low_rest, high_rest = (
        (6.0, 14.0)
        if context.method == "full" or (models == 2 and not context.method)
        else (0.0, 0.0)
    )
    weight_share = ranks if context.sharding in ("zero3", "fsdp") else 1
    rest_share = ranks if context.sharding in ("zero1", "zero2", "zero3", "fsdp") else 1

    def total(rest: float) -> int:
        return int(
            params * ((models + frozen) * weight / weight_share + models * rest / rest_share)
        )

    low, high = total(low_rest), total(high_rest)
    text = f"{params:,} parameters * {weight:g} B"
    text += f" / {weight_share}" if weight_share > 1 else ""
    if models == 2:
        text = f"4 models (actor, critic, reference, reward): {text} each"
    if high_rest:
        share = f" / {rest_share}" if rest_share > 1 else ""
        text += f" + {low_rest:g}..{high_rest:g} B{share} for gradients and Adam"
    span = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    return StaticState(
        low_bytes=low, high_bytes=high, formula=f"{text} = {span}", exact=context.model is not None
    )
