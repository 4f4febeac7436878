"""A length distribution against a plan: at which length it runs out, how likely that is, and when.

Rows of a micro-batch are padded to its longest sample, so a micro-batch runs out exactly when
one of its samples is longer than the longest length that fits.
"""

from bisect import bisect_right
from dataclasses import asdict, dataclass
from math import exp, lgamma
from typing import Any

from planner.answers.length_files import Lengths, read_lengths
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.recipe import MAX_TOKENS, Recipe, Task
from planner.units import format_bytes

__all__ = ["LengthReport", "Lengths", "Point", "assess", "read_lengths"]

ORDERS = ("shuffled", "bucketed", "file")


@dataclass(frozen=True, kw_only=True)
class Point:
    """The peak when the micro-batch is as long as one sample of the distribution."""

    name: str
    tokens: int
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """Where a data set runs out."""

    samples: int
    estimated: bool
    """Lengths were estimated from characters."""
    points: tuple[Point, ...]
    capacity_bytes: int
    longest_that_fits: int | None
    """Tokens; None when even one token does not fit."""
    cap_tokens: int | None
    """The recipe truncates here; None = it does not."""
    too_long: int
    """Samples that do not fit (after truncation)."""
    micro_batch_size: int
    steps: int
    """Optimizer steps of the run."""
    probability_per_step: float
    probability_of_run: float
    first_step: int | None
    """Step that runs out when it is certain where; None otherwise."""
    order: str
    filter_at: int | None
    """Longest length to keep so that it never runs out; None = nothing to filter."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)

    def text(self) -> str:
        """Return the report for a person."""
        lines = [
            f"{self.samples:,} samples"
            + (", lengths estimated from characters" if self.estimated else "")
        ]
        lines += [
            f"  {point.name:<10}{point.tokens:>9,} tokens  peak {format_bytes(point.peak_bytes):>12}  {'fits' if point.fits else 'does not fit'}"
            for point in self.points
        ]
        if self.longest_that_fits is None:
            return "\n".join([*lines, "not even one token fits: see the plan"])
        lines.append(
            f"longest that fits with {self.micro_batch_size} rows: {self.longest_that_fits:,} tokens"
        )
        if self.cap_tokens:
            lines.append(f"the recipe truncates at {self.cap_tokens:,} tokens")
        if not self.too_long:
            return "\n".join([*lines, "no sample is longer: it never runs out because of length"])
        lines.append(
            f"{self.too_long:,} samples ({self.too_long / self.samples:.2%}) are longer: probability of running out {self.probability_per_step:.2%} a step, {self.probability_of_run:.2%} over {self.steps:,} steps ({self.order})"
        )
        if self.first_step is not None:
            lines.append(f"in this order it runs out at step {self.first_step:,}")
        lines.append(f"filter or truncate at {self.filter_at:,} tokens and it never does")
        return "\n".join(lines)


def assess(
    lengths: Lengths,
    model: ModelSpec,
    recipe: Recipe,
    machine: Machine,
    *,
    order: str = "shuffled",
    epochs: float = 1,
    truncates: bool = True,
) -> LengthReport:
    """Return where `lengths` runs out under `recipe`.

    `order`: shuffled, bucketed (groups of equal length, longest first) or file. `truncates`:
    the recipe's context cuts longer samples off (GRPO prompts are never cut).
    """
    shown = sorted(lengths.counts)
    cap = _cap(recipe) if truncates else None
    ordered = [min(length, cap) for length in shown] if cap else shown
    if recipe.packing and cap:  # packed rows are full whatever the samples are
        ordered = [cap] * len(shown)
    base = plan(model, recipe, machine)
    rows = base.resolved.batch
    limit = _longest(model, recipe, machine, ordered[-1], base)
    too_long = len(ordered) - bisect_right(ordered, limit) if limit else len(ordered)
    draws = max(1, rows) * recipe.gradient_accumulation * machine.num_gpus
    steps = max(1, int(epochs * len(ordered)) // draws)
    per_step = _chance(len(ordered), too_long, draws)
    certain = too_long > 0 and epochs >= 1
    return LengthReport(
        samples=len(ordered),
        estimated=lengths.estimated,
        points=_points(model, recipe, machine, ordered),
        capacity_bytes=base.capacity_bytes,
        longest_that_fits=limit,
        cap_tokens=cap,
        too_long=too_long,
        micro_batch_size=rows,
        steps=steps,
        probability_per_step=1.0 / steps * -(-too_long // draws)
        if order == "bucketed" and too_long
        else per_step,
        probability_of_run=1.0
        if certain
        else _chance(len(ordered), too_long, min(len(ordered), steps * draws)),
        first_step=_first_step(lengths, limit, cap, draws, order) if too_long else None,
        order=order,
        filter_at=limit if too_long else None,
    )


def _cap(recipe: Recipe) -> int | None:
    return recipe.context if recipe.task is not Task.GRPO else None


def at_length(recipe: Recipe, tokens: int) -> Recipe:
    """Return the recipe with rows of `tokens` (GRPO: prompts of that length)."""
    tokens = max(1, min(tokens, MAX_TOKENS))
    if recipe.task is Task.GRPO:
        return recipe.model_copy(update={"prompt_length": tokens, "context": None})
    return recipe.model_copy(
        update={"context": tokens, "prompt_length": None, "completion_length": None}
    )


def _points(
    model: ModelSpec, recipe: Recipe, machine: Machine, ordered: list[int]
) -> tuple[Point, ...]:
    last = len(ordered) - 1
    found = []
    for name, index in (
        ("median", last // 2),
        ("p90", int(0.9 * last)),
        ("p99", int(0.99 * last)),
        ("longest", last),
    ):
        made = plan(model, at_length(recipe, ordered[index]), machine)
        found.append(
            Point(name=name, tokens=ordered[index], peak_bytes=made.peak_bytes, fits=made.may_run)
        )
    return tuple(found)


def _longest(
    model: ModelSpec, recipe: Recipe, machine: Machine, longest: int, base: Plan
) -> int | None:
    """Return the longest length that fits, at least as far as the longest sample."""

    def fits(tokens: int) -> bool:
        return plan(model, at_length(recipe, tokens), machine).may_run

    if not fits(1):
        return None
    low, high = 1, max(2, longest)
    while fits(high) and high < MAX_TOKENS // max(1, base.resolved.sequences):
        low, high = high, high * 2
    while high - low > max(1, low // 4096):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _chance(total: int, bad: int, drawn: int) -> float:
    """Return the probability that a draw without replacement holds at least one bad sample."""
    if bad == 0 or drawn == 0:
        return 0.0
    if drawn > total - bad:
        return 1.0

    def log_choose(n: int, k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    return 1.0 - exp(log_choose(total - bad, drawn) - log_choose(total, drawn))


def _first_step(
    lengths: Lengths, limit: int | None, cap: int | None, draws: int, order: str
) -> int | None:
    """Return the step that is certain to run out: the first with a longer sample in this order."""
    if limit is None or order == "bucketed":
        return 1  # the longest batch comes first
    if order != "file":
        return None
    for index, length in enumerate(lengths.counts):
        if (min(length, cap) if cap else length) > limit:
            return index // draws + 1
    return None
