"""Fits the speed model's parameters to rows, and leaves each source out in turn.

    python -m planner.accuracy.speed_fit

writes data/calibration/speed.json and speed_ratios.csv. Errors are logarithms of predicted over
measured, large ones count linearly, and a source counts as the root of its rows.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Protocol

from planner.speed.parameters import Parameters

STEP = 1e-3
"""Of a derivative, in the parameters' own scale."""
OUTLIER = 0.1
"""An error from which on it counts linearly: 10%."""
PULL = 0.05
"""How strongly a parameter without evidence stays where it starts."""
ROUNDS, TRIES = 10, 6

BOUNDS = {
    "attention_tflops": 1000,
    "unpack": 0.1,
    "unpack_integer": 0.1,
    "launch_s": 2e-4,
    "unit_s": 2e-2,
    "engine_step_s": 2e-2,
    "sequence_s": 5e-4,
    "kernel_s": 1e-4,
    "generate_launch_s": 1e-4,
    "reduce_s": 5e-4,
}
"""Upper ends of times; shares end at 1."""


BEFORE = Parameters(
    product=0.8,
    attention=0.5,
    attention_tflops=200.0,
    bandwidth=0.8,
    unpack=0.01,
    unpack_integer=0.01,
    launch_s=2e-5,
    unit_s=1e-3,
    decode_bandwidth=0.8,
    engine_step_s=2e-3,
    sequence_s=2e-5,
    kernel_s=3e-6,
    generate_launch_s=2e-5,
    reduce_s=2e-5,
    engine_product=0.5,
)
"""What one would say before any row: where a search starts, and where a parameter stays that no row of a fit
says anything about. Not the shipped ones, in which the source that is left out had its part."""


class Sample(Protocol):
    """A measured time with what predicts it."""

    @property
    def source(self) -> str:
        """Who measured it."""

    @property
    def measured(self) -> float:
        """Seconds."""

    def predicted(self, p: Parameters) -> float:
        """Return seconds."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The parameters that a kind of rows decides."""

    names: tuple[str, ...]
    start: Parameters

    def free(self, p: Parameters) -> list[float]:
        """Return parameters on a scale without bounds."""
        return [_open(getattr(p, name) / BOUNDS.get(name, 1.0)) for name in self.names]

    def parameters(self, free: Sequence[float]) -> Parameters:
        """Return the parameters of that scale."""
        values = {
            name: BOUNDS.get(name, 1.0) / (1 + exp(-value))
            for name, value in zip(self.names, free, strict=True)
        }
        return self.start._replace(**values)

    def run(self, samples: Sequence[Sample]) -> Parameters:
        """Return the parameters that fit `samples` best."""
        counts = Counter(sample.source for sample in samples)
        weights = [1 / sqrt(counts[sample.source]) for sample in samples]
        begin = self.free(self.start)

        def errors(free: Sequence[float]) -> list[float]:
            p = self.parameters(free)
            found = [
                weight * log(sample.predicted(p) / sample.measured)
                for sample, weight in zip(samples, weights, strict=True)
            ]
            return [*found, *(PULL * (a - b) for a, b in zip(free, begin, strict=True))]

        return self.parameters(least(errors, begin))


def _open(share: float) -> float:
    inside = min(max(share, 1e-6), 1 - 1e-6)
    return log(inside / (1 - inside))


def least(errors: Callable[[Sequence[float]], list[float]], begin: Sequence[float]) -> list[float]:
    """Return where the sum of softened squares is least: damped Gauss-Newton."""
    x, damping = list(begin), 1e-2
    found = errors(x)
    cost = _cost(found)
    size = len(x)
    for _ in range(ROUNDS):
        columns = []
        for index in range(size):
            moved = [*x[:index], x[index] + STEP, *x[index + 1 :]]
            columns.append([(a - b) / STEP for a, b in zip(errors(moved), found, strict=True)])
        weights = [1 / sqrt(1 + (each / OUTLIER) ** 2) for each in found]
        matrix = [
            [
                sum(w * a * b for w, a, b in zip(weights, left, right, strict=True))
                for right in columns
            ]
            for left in columns
        ]
        slope = [sum(w * a * e for w, a, e in zip(weights, c, found, strict=True)) for c in columns]
        for _ in range(TRIES):
            damped = [
                [value * (1 + damping * (i == j)) + 1e-12 * (i == j) for j, value in enumerate(row)]
                for i, row in enumerate(matrix)
            ]
            step = solve(damped, slope)
            tried = [a - max(-0.7, min(0.7, b)) for a, b in zip(x, step, strict=True)]
            after = errors(tried)
            if _cost(after) < cost:
                break
            damping *= 4
        else:
            return x
        gained = cost - _cost(after)
        x, found, cost = tried, after, _cost(after)
        damping = max(damping / 5, 1e-6)
        if gained < 1e-5 * cost:
            break
    return x


def _cost(errors: Sequence[float]) -> float:
    return sum(2 * (sqrt(1 + (each / OUTLIER) ** 2) - 1) for each in errors)


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return x with matrix x = right, by elimination with pivots."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][k] * found[k] for k in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found
