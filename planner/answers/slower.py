"""The price in time of a change to a run: how much longer a step takes with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.answers.changes import Change, apply
from planner.errors import VramwiseError
from planner.plan import Plan, plan
from planner.run.recipe import Recipe
from planner.speed.time import Time

HARDLY = 0.005
"""A smaller part is no price."""


class Slower(NamedTuple):
    """The price in time of a change."""

    share: float
    """0.27 = it takes 27% longer."""
    of: str
    """step time, or time a token where a step has fewer of them."""

    @property
    def words(self) -> str:
        """Return it for people."""
        return f"same {self.of}" if abs(self.share) < HARDLY else f"{self.share:+.0%} {self.of}"


def slower(base: Time | None, changed: Plan) -> Slower | None:
    """Return how much longer a changed run takes than one of that time; None = not known."""
    time = changed.time if base is not None else None
    if base is None or time is None or not base.tokens_per_s or not time.tokens_per_s:
        return None
    alike = round(base.tokens) == round(time.tokens)
    return Slower(
        base.tokens_per_s / time.tokens_per_s - 1, "step time" if alike else "time a token"
    )


def with_time(price: str, found: Slower | None) -> str:
    """Return a price in words with its part in time."""
    return f"{price} ({found.words})" if found is not None else price


@dataclass(frozen=True, slots=True)
class Lever:
    """A setting that was changed so that a run fits, and what it costs."""

    change: str
    price: str
    slower: float | None
    """0.27 = a step takes 27% longer with it; None = not known."""

    @property
    def words(self) -> str:
        """Return the change with its price in time, for people."""
        time = "" if self.slower is None else f": {Slower(self.slower, 'step time').words}"
        return f"{self.change}{time}"


QUICKEST: dict[str, Any] = {"checkpointing": "none"}
"""What searches begin with where it is not the framework's default."""


def lever_times(made: Plan, changes: Sequence[Change]) -> tuple[Lever, ...]:
    """Return the changes of a run that fits, each with the time that taking it back would save."""
    return tuple(Lever(each.name, each.price, _saved(made, each)) for each in changes)


def _saved(made: Plan, change: Change) -> float | None:
    if made.time is None:
        return None
    back = {name: QUICKEST.get(name, _default(name)) for name in change.update}
    undone = Change(change.name, back, change.price, change.rank)
    try:
        without = plan(made.spec, apply(made.asked, undone), made.machine)
    except VramwiseError:
        return None
    found = slower(without.time, made)
    return round(found.share, 4) if found is not None else None


def _default(name: str) -> Any:
    """Return a recipe's default; a name like "engine.kind" reaches into a section."""
    value: Any = Recipe()
    for part in name.split("."):
        value = getattr(value, part)
    return value
