"""What somebody has: '24GiB, <6h, <$5' as limits on memory, hours and dollars."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.errors import UsageError
from planner.units import format_bytes, parse_bytes

MEMORY, HOURS, DOLLARS = "memory", "hours", "dollars"
HINT = "limits with commas between them: '24GiB, <6h, <$5'; hours as 6h, 90min or 2d"
SHELL = "in single quotes, '24GiB, <6h, <$5': between double ones a shell reads $5 as a variable"
_HOURS = {"h": 1.0, "hour": 1.0, "hours": 1.0, "min": 1 / 60, "d": 24.0, "day": 24.0, "days": 24.0}
_TIME = re.compile(r"^(\d+(?:\.\d+)?) ?(min|h|hours?|d|days?)$")
_MONEY = re.compile(r"^(?:\$ ?(\d+(?:\.\d+)?)|(\d+(?:\.\d+)?) ?(?:usd|dollars?|\$))$")


class Budget(NamedTuple):
    """Limits; None = none."""

    memory_bytes: int | None = None
    """Of one GPU: the card's, as torch sees it."""
    hours: float | None = None
    usd: float | None = None

    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        known = {MEMORY: self.memory_bytes, HOURS: self.hours, DOLLARS: self.usd}
        return {name: float(limit) for name, limit in known.items() if limit is not None}

    def over(self, values: Mapping[str, float | None]) -> dict[str, float]:
        """Return how many times its limit each value is; what is not known is far over."""
        return {
            name: float("inf") if values[name] is None else float(values[name] or 0) / limit
            for name, limit in self.limits().items()
        }

    def said(self, name: str) -> str:
        """Return a limit for people."""
        if name == MEMORY:
            return format_bytes(self.memory_bytes or 0)
        if name == DOLLARS:
            return f"${self.usd:g}"
        hours = self.hours or 0.0
        return f"{hours:g} h" if hours >= 1 else f"{hours * 60:g} min"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"memory_bytes": self.memory_bytes, "hours": self.hours, "usd": self.usd}


def parse_budget(text: str) -> Budget:
    """Return the limits that a text says; UsageError naming the part that cannot be read."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        said = part.strip().lower().removeprefix("<").removeprefix("=").strip()
        if not said:
            raise UsageError(f"budget: {text[:60]!r} has a limit without a figure", hint=SHELL)
        name, value = _limit(said, part.strip())
        if name in found:
            raise UsageError(f"budget: {name} is limited twice in {text[:60]!r}", hint=HINT)
        if value <= 0:
            raise UsageError(f"budget: {part.strip()[:40]!r} is not allowed", hint="more than 0")
        found[name] = value
    if not found:
        raise UsageError(f"budget: {text[:40]!r} says no limit", hint=HINT)
    return Budget(found.get(MEMORY), found.get(HOURS), found.get(DOLLARS))


def _limit(said: str, part: str) -> tuple[str, float]:
    if match := _TIME.match(said):
        return HOURS, float(match[1]) * _HOURS[match[2]]
    if match := _MONEY.match(said):
        return DOLLARS, float(match[1] or match[2])
    if re.fullmatch(r"\d+(?:\.\d+)? ?[kmgt]i?b?", said):
        return MEMORY, parse_bytes(said, field="budget")
    raise UsageError(f"budget: cannot read {part[:40]!r} as memory, time or dollars", hint=HINT)
