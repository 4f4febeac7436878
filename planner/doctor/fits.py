"""Straight lines through a run's figures, and figures kept in bounded memory: a log's and a live run's alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_POINTS = 4096
T = TypeVar("T")


@dataclass
class Thinned(Generic[T]):
    """Figures of a series, thinned out evenly once there are many."""

    points: list[T] = field(default_factory=list)
    seen: int = 0
    stride: int = 1
    most: int = MAX_POINTS

    def add(self, point: T) -> bool:
        """Keep every stride-th figure; return whether this one was kept."""
        kept = self.seen % self.stride == 0
        if kept:
            self.points.append(point)
        self.seen += 1
        if len(self.points) > self.most:
            del self.points[1::2]
            self.stride *= 2
        return kept


def line_fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the straight line and the share of the variance that it explains."""
    count = len(xs)
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    wide = sum((x - mean_x) ** 2 for x in xs)
    spread = sum((y - mean_y) ** 2 for y in ys)
    both = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    if not wide or not spread:
        return 0.0, 0.0
    return both / wide, both * both / (wide * spread)


def without(ys: Sequence[float], xs: Sequence[float], slope: float | None = None) -> list[float]:
    """Return `ys` without what a straight line over `xs` explains (its mean stays)."""
    if slope is None:
        slope, _ = line_fit(xs, ys)
    middle = sum(xs) / len(xs)
    return [y - slope * (x - middle) for x, y in zip(xs, ys, strict=True)]
