"""Which linear gets how many bytes: each one's lower convex hull of (bytes, harm), the best byte first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from planner.errors import UsageError
from planner.units import format_bytes
from trainer.quantize.formats import Format
from trainer.quantize.harm import Candidate, Linear

KEPT = 0
"""The block of a linear that stays as it is."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store the linears that are chosen together."""

    block: int
    """Weights that share a scale, or KEPT."""
    bytes: int
    harm: float


@dataclass(frozen=True, slots=True)
class Group:
    """Linears that a reader joins, or one alone."""

    linears: tuple[Linear, ...]
    options: tuple[Option, ...]
    """On the hull: more bytes, less harm, and each byte buys less than those before."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the curve: all bytes written, and the nats a token that they lose."""

    bytes: int
    harm: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A block for every linear."""

    blocks: dict[str, int]
    bytes: int
    """Of everything that is written, the fixed part included."""
    harm: float

    def kept(self) -> list[str]:
        """Return the names of the linears that stay in 16 bits."""
        return [name for name, block in self.blocks.items() if block == KEPT]


def hull(options: Iterable[Option]) -> tuple[Option, ...]:
    """Return the options on the lower convex hull, from the least bytes on."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda each: (each.bytes, each.harm)):
        if kept and option.harm >= kept[-1].harm:
            continue
        while len(kept) > 1 and _gain(kept[-1], option) >= _gain(kept[-2], kept[-1]):
            kept.pop()
        if kept and option.bytes == kept[-1].bytes:
            kept.pop()
        kept.append(option)
    return tuple(kept)


def groups(linears: Sequence[Linear], form: Format, width: int) -> list[Group]:
    """Return the linears as `form`'s readers join them; one that stays takes `width` bytes a weight."""
    joined: dict[tuple[str, ...], list[Linear]] = {}
    for linear in linears:
        parent, _, last = linear.name.rpartition(".")
        together = next((names for names in form.fused if last in names), (last,))
        joined.setdefault((parent, *together), []).append(linear)
    return [_group(tuple(members), form, width) for members in joined.values()]


def _group(members: tuple[Linear, ...], form: Format, width: int) -> Group:
    kept = Option(KEPT, sum(prod((each.rows, each.columns)) * width for each in members), 0.0)
    options = [kept]
    by_block: dict[int, list[Candidate]] = {}
    for each in members:
        for candidate in each.candidates:
            if candidate.format == form.name:
                by_block.setdefault(candidate.block, []).append(candidate)
    for block, found in by_block.items():
        if len(found) == len(members):
            options.append(Option(block, sum(c.bytes for c in found), sum(c.harm for c in found)))
    return Group(members, hull(options))


def choose(parts: Sequence[Group], fixed_bytes: int, budget: int) -> Choice:
    """Return the least harm within `budget` bytes, `fixed_bytes` of what is never quantised included.

    Steps along the hulls in the order of what a byte buys; one too large for what is left ends its group's.
    Raises UsageError where the budget is below the least possible.
    """
    least = fixed_bytes + sum(part.options[0].bytes for part in parts)
    if budget < least:
        raise UsageError(
            f"budget: {format_bytes(budget)} ({budget:,} B) is below {format_bytes(least)} ({least:,} B), the "
            "least that four bits of every linear take"
        )
    at, total, ended = [0] * len(parts), least, set()
    for number, index in _steps(parts):
        more = parts[number].options[index].bytes - parts[number].options[index - 1].bytes
        if number in ended or total + more > budget:
            ended.add(number)
            continue
        at[number], total = index, total + more
    taken = [part.options[index] for part, index in zip(parts, at, strict=True)]
    blocks = {
        linear.name: option.block
        for part, option in zip(parts, taken, strict=True)
        for linear in part.linears
    }
    return Choice(blocks, total, sum(option.harm for option in taken))


def curve(parts: Sequence[Group], fixed_bytes: int) -> list[Point]:
    """Return what every budget buys, from the least bytes to 16 bits everywhere."""
    total = fixed_bytes + sum(part.options[0].bytes for part in parts)
    harm = sum(part.options[0].harm for part in parts)
    points = [Point(total, harm)]
    for number, index in _steps(parts):
        before, after = parts[number].options[index - 1 : index + 1]
        total, harm = total + after.bytes - before.bytes, harm + after.harm - before.harm
        points.append(Point(total, max(0.0, harm)))
    return points


def _steps(parts: Sequence[Group]) -> list[tuple[int, int]]:
    """Return (group, option after the step) of every hull, the step with most harm a byte first."""
    steps = [
        (-_gain(*part.options[index - 1 : index + 1]), number, index)
        for number, part in enumerate(parts)
        for index in range(1, len(part.options))
    ]
    return [(number, index) for _, number, index in sorted(steps)]


def _gain(before: Option, after: Option) -> float:
    """Return the nats a token that each byte more spares."""
    more = after.bytes - before.bytes
    return (before.harm - after.harm) / more if more else float("inf")
