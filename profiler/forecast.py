"""What a run's own steps say about the rest of it: how long it takes, and when and why memory will run out.

Pure: the trainer, the callback for other trainers and `profile run` feed it a Step each. Three shapes are told
apart as the doctor tells them apart in a log (planner/doctor/series.py): a leak lifts the least that is held from
block to block; long samples lift what is held by so much a token; fragmentation lifts the reserve alone.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf, log, log1p, sqrt
from typing import Any, NamedTuple

from planner.doctor.fits import Thinned, line_fit, without
from planner.doctor.series import RISE, STEADY, Growth
from planner.report.time import span
from planner.units import format_bytes

MAX_POINTS = 512
WARM_STEPS = 1
"""The first step makes optimizer states and compiles: its time says nothing about the others'."""
BLOCKS = 16
MIN_POINTS = 3
MIN_LENGTHS = 8
"""Steps before what is held counts as following the length."""
SURE = 5.0
"""Standard deviations a slope must be away from none: it is looked at hundreds of times in a run."""
REACH = 10
"""A trend is carried on for so many times the steps that show it; of few steps once."""
FEW = 8
MIN_RESERVED = 16
RESERVE_KEPT = 0.75
"""A pool grows at first in any run, ever less: the later half of its growth must be so much of the earlier."""
RESERVE_UNEVEN = 0.6
"""A sum of chance additions lies near a line, too: what each block adds must be alike."""
EVERY_STEP = 32
"""So many steps are looked at one by one, later ones at every sixteenth of those that were."""
DEVIATIONS_90 = 1.645
"""Of a normal distribution: 90% lie between this much below and above its mean."""


class Step(NamedTuple):
    """What one optimizer step took."""

    seconds: float
    allocated: int | None = None
    """The most that tensors held, in bytes; None = not measured."""
    reserved: int | None = None
    """The most that torch's pool had."""
    tokens: float = 0
    """All that the step ran; 0 = not known."""
    longest: float = 0
    """What memory follows: tokens of the longest sample, or of the largest pass; 0 = not known."""


class Ahead(NamedTuple):
    """What is known of the steps to come."""

    tokens: float = 0
    """Of a step on average; 0 = like those that were."""
    longest: tuple[float, ...] = ()
    """In the unit of Step.longest, a step each: in their order, or as the data has them."""
    in_order: bool = False
    """`longest` are the very next steps."""


NOTHING = Ahead()


class TimeLeft(NamedTuple):
    """Seconds to the end of a run; 90% of runs like it end between low and high."""

    seconds: float
    low: float
    high: float

    def sentence(self) -> str:
        """Return it in words."""
        low, high = span(self.low), span(self.high)
        likely = "" if low == high else f" ({low} to {high})"
        return f"{span(self.seconds)} left{likely}"


class RunsOut(NamedTuple):
    """Memory will run out."""

    step: int
    """About when, counted from 1 as the run's own steps are."""
    growth: Growth
    capacity_bytes: int

    @property
    def because(self) -> str:
        """Return the reason: long samples, growth or fragmentation, with its figure."""
        each = format_bytes(self.growth.per_step_bytes)
        if self.growth.kind == "length":
            return f"long samples: {format_bytes(self.growth.last_bytes)} are needed for the longest to come"
        if self.growth.kind == "reserve":
            return f"fragmentation: the reserve grows by {each} a step, what tensors hold does not"
        return f"growth of {each} a step"

    def sentence(self) -> str:
        """Return it in words."""
        return (
            f"will run out of {format_bytes(self.capacity_bytes)} at about step {self.step:,} "
            f"because of {self.because}"
        )


class Forecast:
    """Follows a run step by step."""

    def __init__(
        self, *, total_steps: int | None, capacity_bytes: int | None = None, done: int = 0
    ) -> None:
        self.total_steps = total_steps
        self.capacity_bytes = capacity_bytes
        self.done = done
        self.ahead = NOTHING
        self._kept: Thinned[tuple[int, Step]] = Thinned(most=MAX_POINTS)
        self._out: RunsOut | None = None
        self._looked = 0

    def add(self, step: Step) -> None:
        """Take one more step."""
        self.done += 1
        kept, seen = self._kept.add((self.done, step)), self._kept.seen
        if kept and (seen <= EVERY_STEP or seen >= self._looked * (1 + 1 / BLOCKS)):
            self._looked = seen
            self._out = self._runs_out()

    @property
    def points(self) -> list[tuple[int, Step]]:
        """(number of a step from 1, what it took): those kept, the first always."""
        return self._kept.points

    @property
    def seen(self) -> int:
        """Steps that were taken here, a resumed run's earlier ones left out."""
        return self._kept.seen

    @property
    def runs_out(self) -> RunsOut | None:
        """When and why memory will run out before the run is over; None where nothing says so."""
        return self._out

    def step_seconds(self) -> TimeLeft | None:
        """Return the seconds of one step to come on average; None before there is one to go by."""
        return self._seconds(1, one=False)

    def time_left(self) -> TimeLeft | None:
        """Return the seconds to the end; None before there is a step to go by, or where no end is known."""
        if self.total_steps is None:
            return None
        return self._seconds(max(0, self.total_steps - self.done), one=True)

    def _seconds(self, count: int, *, one: bool) -> TimeLeft | None:
        """Return the seconds of `count` steps; `one`: with what the steps themselves vary by."""
        steps = [step for _, step in self.points]
        if not steps:
            return None
        steps = steps[WARM_STEPS:] or steps
        taken = [step.seconds for step in steps]
        mean = sum(taken) / len(taken)
        tokens = [step.tokens for step in steps]
        if len(steps) >= MIN_LENGTHS and self.ahead.tokens and all(tokens):
            slope, share = line_fit(tokens, taken)
            if slope > 0 and share >= STEADY / 2:
                mean += slope * (self.ahead.tokens - sum(tokens) / len(tokens))
                taken = without(taken, tokens, slope)
        variance = _variance(taken)
        # neighbours are alike: means of blocks say how well the mean is known
        means = [sum(block) / len(block) for block in _blocks(taken, max(2, len(taken) // 4))]
        known = _variance(means) / max(1, len(means))
        few = 1 + 2 / max(1, len(means) - 1)
        spread = sqrt(count**2 * known + (count * variance if one else 0))
        half = DEVIATIONS_90 * few * spread
        middle = count * max(0.0, mean)
        return TimeLeft(middle, max(0.0, middle - half), middle + half)

    def _runs_out(self) -> RunsOut | None:
        if self.capacity_bytes is None:
            return None
        points = [(number, step) for number, step in self.points if step.allocated is not None]
        if len(points) < MIN_POINTS:
            return None
        numbers = [float(number) for number, _ in points]
        held = [float(step.allocated or 0) for _, step in points]
        lengths = [step.longest for _, step in points]
        each, share = 0.0, 0.0
        if all(lengths) and len(points) >= MIN_LENGTHS:
            # both together: what the length adds beside the trend, and the trend beside the length
            each, share = line_fit(without(lengths, numbers), without(held, numbers))
            each = max(0.0, each)
        level = without(held, lengths, each) if each else held
        grown = trend(numbers, level)
        if grown is not None:
            # at its fullest, where the trend has brought it
            top = max(
                size + grown.each * (numbers[-1] - number)
                for number, size in zip(numbers, held, strict=True)
            )
            return self._when("leak", grown, top, held)
        grown = self._fragments(points)
        if grown is not None:
            pool = [float(step.reserved or 0) for _, step in points]
            return self._when("reserve", grown, pool[-1], pool)
        if each and share >= STEADY:
            return self._by_length(numbers, held, lengths, each)
        return None

    def _fragments(self, points: Sequence[tuple[int, Step]]) -> "Trend | None":
        """Return how the part of the reserve grows that no tensor has ever needed."""
        first, last = points[0][1].reserved, points[-1][1].reserved
        if len(points) < MIN_RESERVED or not first or not last or last - first < RISE * first:
            return None
        needed = accumulate((step.allocated or 0 for _, step in points), max)
        unused = [
            float((step.reserved or 0) - most)
            for (_, step), most in zip(points, needed, strict=True)
        ]
        grown = trend([float(number) for number, _ in points], unused)
        if grown is None or grown.kept < RESERVE_KEPT or grown.uneven > RESERVE_UNEVEN:
            return None
        return grown

    def _when(self, kind: str, grown: "Trend", now: float, row: Sequence[float]) -> RunsOut | None:
        assert self.capacity_bytes is not None
        missing = max(0.0, self.capacity_bytes - now)
        steps = missing / grown.each
        reach = self.done * (REACH if len(row) >= FEW else 1)
        if self.total_steps is not None:
            reach = min(reach, self.total_steps - self.done)
        if steps > reach or missing > grown.still:
            return None
        return RunsOut(
            self.done + max(1, round(steps)),
            Growth(
                kind=kind,
                first_bytes=int(row[0]),
                last_bytes=int(row[-1]),
                points=len(row),
                per_step_bytes=int(grown.each),
            ),
            self.capacity_bytes,
        )

    def _by_length(
        self,
        numbers: Sequence[float],
        held: Sequence[float],
        lengths: Sequence[float],
        each: float,
    ) -> RunsOut | None:
        assert self.capacity_bytes is not None
        coming = self.ahead.longest
        if self.total_steps is not None and self.ahead.in_order:
            coming = coming[: self.total_steps - self.done]
        rest = without(held, lengths, each)
        middle, at = sum(held) / len(held), sum(lengths) / len(lengths)
        unsure = 2 * sqrt(_variance(rest))
        limit = at + (self.capacity_bytes + unsure - middle) / each
        over = [number for number, length in enumerate(coming, 1) if length > limit]
        if not over:
            return None
        after = over[0] if self.ahead.in_order else max(1, round(len(coming) / len(over)))
        if self.total_steps is not None and self.done + after > self.total_steps:
            return None
        longest = max(coming)
        return RunsOut(
            self.done + after,
            Growth(
                kind="length",
                first_bytes=int(min(held)),
                last_bytes=int(middle + each * (longest - at)),
                points=len(held),
                per_step_bytes=int(each),
            ),
            self.capacity_bytes,
        )


class Trend(NamedTuple):
    """How a row of figures grows."""

    each: float
    """Bytes a step."""
    still: float
    """Bytes that it will grow by at most: one that dies away by what it loses from half to half."""
    kept: float
    """The later half's growth over the earlier's."""
    uneven: float
    """Deviation of what blocks add, over what they add on average."""


def trend(numbers: Sequence[float], row: Sequence[float]) -> Trend | None:
    """Return how a row grows, if it does so steadily and beyond doubt; None otherwise.

    Blocks' smallest figures: what grows lifts the floor, long samples do not.
    """
    blocks = [min(block) for block in _blocks(row, BLOCKS)]
    width = (numbers[-1] - numbers[0]) / max(1, len(row) - 1) * len(row) / len(blocks)
    steps = [after - before for before, after in pairwise(blocks)]
    if sum(step > 0 for step in steps) < STEADY * len(steps):
        return None
    slope, share = line_fit(range(len(blocks)), blocks)
    if slope <= 0 or surprise(share, len(blocks)) < SURE:
        return None
    half = len(blocks) // 2
    if half < MIN_POINTS:
        return Trend(slope / width, inf, 1.0, 0.0)
    early, _ = line_fit(range(half), blocks[:half])
    late, _ = line_fit(range(half), blocks[-half:])
    if late <= 0:
        return None
    kept = late / early if early > 0 else 1.0
    still = late * half * kept / (1 - kept) if kept < 1 else inf
    each = sum(steps) / len(steps)
    return Trend(slope / width, still, kept, sqrt(_variance(steps)) / each)


def surprise(share: float, count: int) -> float:
    """Return how many standard deviations the slope of a line through `count` points is from none.

    `share` is the variance that it explains. Student's t as a normal deviate: Wallace 1959, Bounds on Normal
    Approximations to Student's and the Chi-Square Distributions, section 3.
    """
    free = count - 2
    if free < 1 or share <= 0:
        return 0.0
    if share >= 1:
        return inf
    return (1 - 2 / (8 * free + 3)) * sqrt(-free * log1p(-share))


def worth_saying(done: int) -> bool:
    """Return whether a run's time left is to be told after so many steps: 3, 10, 30, 100, 300 ..."""
    if done < 3:
        return False
    power = 10 ** int(log(done + 0.5, 10))
    return done in (power, 3 * power)


def figures(forecast: Forecast) -> dict[str, Any]:
    """Return what a step's line of metrics says of the future."""
    left, out = forecast.time_left(), forecast.runs_out
    found: dict[str, Any] = {}
    if left is not None:
        found["forecast/seconds_left"] = round(left.seconds, 3)
        found["forecast/seconds_left/low"] = round(left.low, 3)
        found["forecast/seconds_left/high"] = round(left.high, 3)
    if out is not None:
        found["forecast/out_of_memory_step"] = out.step
    return found


def _variance(row: Sequence[float]) -> float:
    if len(row) < 2:
        return 0.0
    mean = sum(row) / len(row)
    return sum((value - mean) ** 2 for value in row) / (len(row) - 1)


def _blocks(row: Sequence[float], most: int) -> list[Sequence[float]]:
    """Return the row in at most `most` runs of about the same size."""
    count = min(most, len(row))
    bounds = [round(number * len(row) / count) for number in range(count + 1)]
    return [row[low:high] for low, high in pairwise(bounds)]
