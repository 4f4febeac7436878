"""The longest context that one recipe's own settings hold, found with few plans and proved by a replay."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from planner.answers.unchanged import Settled
from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import Recipe

STEPS = (4, 5, 6, 7)
"""Contexts are looked for at 2^n times a quarter of these."""
SHORTEST, LONGEST = 8, 20
USUAL = 1.03
"""Room that is left for fragments where a replay follows: half of the catalogue's runs need no more."""
TRIES = 5
"""Replays of one run at most."""


def contexts(least: int, most: int) -> list[int]:
    """Return the lengths that are tried: `least`, `most`, and steps of a quarter of a power of two between."""
    between = (2**power * step // 4 for power in range(SHORTEST, LONGEST + 1) for step in STEPS)
    return sorted({least, max(least, most), *(each for each in between if least < each < most)})


def at(recipe: Recipe, tokens: int) -> Recipe:
    """Return the recipe at another context."""
    lengths = {"context": tokens, "prompt_length": None, "completion_length": None}
    return recipe.model_copy(update=lengths)


def longest(
    model: ModelSpec, recipe: Recipe, machine: Machine, lengths: Sequence[int], fragmented: float
) -> Plan | None:
    """Return the plan at the last of growing `lengths` that has room; None when the first has none.

    What is alive grows nearly linearly with the tokens: the next length is where a line through two plans
    meets what there is, and an error of that guess costs one more plan.
    """

    def tried(index: int) -> Plan | None:
        try:
            return plan(model, at(recipe, lengths[index]), machine)
        except VramwiseError:
            return None

    best = tried(0)
    if best is None or not best.has_room_for(fragmented):
        return None
    low, high = 0, len(lengths)
    points = [(lengths[0], best.peak_bytes)]
    while high - low > 1:
        index = _guess(lengths, low, high, points, best.trusted_bytes(fragmented))
        found = tried(index)
        if found is not None:
            points.append((lengths[index], found.peak_bytes))
        if found is not None and found.has_room_for(fragmented):
            low, best = index, found
        else:
            high = index
    return best


def _guess(
    lengths: Sequence[int], low: int, high: int, points: list[tuple[int, int]], room: int
) -> int:
    """Return the index to try next, between `low` (has room) and `high` (has none)."""
    middle = (low + high) // 2
    if len(points) < 2 or points[-1][1] == points[-2][1]:
        return middle
    (tokens, peak), (other, below) = points[-1], points[-2]
    slope = (peak - below) / (tokens - other)
    if slope <= 0:
        return middle
    wanted = tokens + (room - peak) / slope
    fitting = [index for index in range(low + 1, high) if lengths[index] <= wanted]
    return fitting[-1] if fitting else low + 1


def proved(
    model: ModelSpec,
    machine: Machine,
    lengths: Sequence[int],
    end: Plan,
    start_bytes: int,
    find: Callable[[int, float], Settled],
) -> Settled | None:
    """Return what `find(tokens, fragmented)` finds at the longest length that fits when it is replayed.

    `end`: the plan at the longest that has room; `start_bytes`: the peak at the first length. Where a replay
    needs more than there is, the next length is where a line from the first length to that need meets it.
    What fits goes on to the last length that the same settings hold.
    """
    index, fragmented = lengths.index(end.resolved.seq_tokens), USUAL
    for _ in range(TRIES):
        made = find(lengths[index], fragmented)
        if made.plan.fits:
            return _carried_on(model, machine, made, lengths[index + 1 :])
        if index == 0 or not made.plan.resolved.trains:
            return None
        needed, first = made.plan.needed_bytes, USUAL * start_bytes
        share = (made.plan.trusted_bytes(1.0) - first) / max(1, needed - first)
        share = min(1.0, max(0.0, share))
        wanted = lengths[0] + share * (lengths[index] - lengths[0])
        index = max(0, min(index, bisect_right(lengths, wanted)) - 1)
        fragmented = USUAL + share * max(0.0, needed / made.plan.peak_bytes - USUAL)
    return None


def _carried_on(
    model: ModelSpec, machine: Machine, made: Settled, longer: Sequence[int]
) -> Settled:
    """Return the same settings at the last of these lengths before one at which they do not fit."""
    for tokens in longer:
        try:
            found = plan(model, at(made.recipe, tokens), machine)
        except VramwiseError:
            break
        if not found.fits:
            break
        made = made._replace(plan=found)
    return made
