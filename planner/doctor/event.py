"""What a log says about memory at one place, and the rules that read it from a line."""

from collections.abc import Callable
from dataclasses import dataclass, field
from re import Match

from planner.doctor.cuda_message import CudaMessage
from planner.units import GiB

Facts = dict[str, int | float | str]
Reader = Callable[[Match[str]], Facts]
Row = tuple[str, str, int, Reader]
"""(kind, pattern, regex flags, reader of the facts)."""

MAX_NAMED = 8
"""Ranks that are named one by one."""
MAX_DESCRIPTION = 20_000
"""Characters up to which a text is taken for a person's description."""
NOTICES = frozenset({"sleep_line", "host_usage", "host_user", "device_usage", "sglang_line"})
"""Kinds that explain a failure and are none themselves."""
WEAK = frozenset({"killed", "worker_died", "other_error"})
"""Kinds that say nothing where a failure of memory stands in the same log."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something a log says about memory, with what led to it."""

    kind: str
    """cuda_oom, cumem_oom, tms_oom, driver_refused, vllm_kv_len, vllm_no_blocks, vllm_free_memory,
    vllm_sampler, vllm_profile_race, sglang_pool, host_killed, host_alloc, killed, worker_died,
    other_error, and the notices above."""
    line: int
    text: str
    rank: str = ""
    facts: Facts = field(default_factory=dict)
    cuda: CudaMessage | None = None
    stack: tuple[str, ...] = ()
    """Lines before it in the same stream, the nearest last."""
    ranks: tuple[str, ...] = ()
    """Every stream that reported the same."""

    @property
    def streams(self) -> tuple[str, ...]:
        """The ranks and workers that reported it."""
        return tuple(rank for rank in (self.ranks or (self.rank,)) if rank)

    def told_by(self) -> str:
        """Return who reported it in words, "" where the log does not tell."""
        names = self.streams
        if not names:
            return ""
        if not all(name.isdigit() for name in names):
            return names[0] if len(names) == 1 else f"{len(names)} workers"
        if len(names) > MAX_NAMED:
            return f"{len(names)} ranks"
        return f"rank{'s' * (len(names) > 1)} {', '.join(names)}"

    @property
    def is_error(self) -> bool:
        """True when it ended the run (a notice such as a sleep line does not)."""
        return self.kind not in NOTICES

    @property
    def is_weak(self) -> bool:
        """True when another error of the log explains it."""
        return self.kind in WEAK or self.facts.get("killer") in ("launcher", "shell")


def gib(text: str) -> int:
    """Return the bytes of a figure in GiB."""
    return round(float(text) * GiB)


def nothing(_match: Match[str]) -> Facts:
    """Return no facts: the line's being there says all."""
    return {}
