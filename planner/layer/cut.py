"""A minimum cut of a small graph: which tensors of a forward are given to its backward.

torch's partitioner (torch/_functorch/partitioners.py, solve_min_cut) puts every forward tensor's bytes on
an edge of its own; what may not be computed again hangs on the source, what the backward reads on the sink.
The cut between them is what is saved.
"""

from collections import deque
from dataclasses import dataclass, field

NEVER = float("inf")
SOURCE, SINK = -1, -2
Point = tuple[int, bool] | int
"""A tensor's beginning or its end; the source or the sink."""


@dataclass(slots=True)
class Graph:
    """Tensors by number, and what each is computed from."""

    edges: dict[Point, dict[Point, float]] = field(default_factory=dict)

    def tensor(self, number: int, weight: float) -> None:
        """Add a tensor that costs `weight` to save."""
        self._edge((number, False), (number, True), weight)

    def computed(self, number: int, source: int) -> None:
        """Say that tensor `number` is computed from `source`."""
        self._edge((source, True), (number, False), NEVER)

    def fixed(self, number: int) -> None:
        """Say that a tensor is not computed a second time."""
        self._edge(SOURCE, (number, False), NEVER)

    def again(self, number: int) -> None:
        """Say that a tensor is computed a second time, whatever it costs."""
        self._edge((number, False), SINK, NEVER)

    def needed(self, number: int) -> None:
        """Say that the backward reads a tensor."""
        self._edge((number, True), SINK, NEVER)

    def _edge(self, start: Point, end: Point, capacity: float) -> None:
        self.edges.setdefault(start, {})[end] = capacity
        self.edges.setdefault(end, {}).setdefault(start, 0.0)


def minimum_cut(graph: Graph) -> set[int]:
    """Return the tensors on the cut; an impossible demand (again and fixed) is never made."""
    left = {start: dict(ends) for start, ends in graph.edges.items()}
    while True:
        before = _reached(left)
        if SINK not in before:
            break
        path: list[Point] = [SINK]
        while path[-1] != SOURCE:
            path.append(before[path[-1]])
        steps = list(zip(path[1:], path[:-1], strict=True))
        least = min(left[start][end] for start, end in steps)
        for start, end in steps:
            left[start][end] -= least
            left[end][start] += least
    return {
        point[0]
        for point in before
        if isinstance(point, tuple) and not point[1] and (point[0], True) not in before
    }


def _reached(left: dict[Point, dict[Point, float]]) -> dict[Point, Point]:
    """Return every point that something can still flow to, with the one before it."""
    before: dict[Point, Point] = {SOURCE: SOURCE}
    queue: deque[Point] = deque([SOURCE])
    while queue:
        start = queue.popleft()
        for end, capacity in left.get(start, {}).items():
            if capacity > 0 and end not in before:
                before[end] = start
                if end == SINK:
                    return before
                queue.append(end)
    return before
