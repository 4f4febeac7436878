"""What a cause is, what the rules look at, and the static-state inequality they share."""

from dataclasses import dataclass, field
from enum import StrEnum

from planner.doctor.budget import Budget
from planner.doctor.candidates import Candidate
from planner.doctor.context import Context
from planner.doctor.event import Event
from planner.doctor.series import Growth
from planner.doctor.titles import TITLES
from planner.doctor.vllm_log import VllmLog


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

    @property
    def title(self) -> str:
        """The cause as a sentence."""
        return TITLES.get(self.category, self.category.replace("_", " ").capitalize())


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
    held: dict[int, float] = field(default_factory=dict)
    """The most GB that each rank says it uses."""
    growth: Growth | None = None
    """How the log's own memory figures move from step to step."""

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
