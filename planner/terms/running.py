"""activations as a term: what layers keep, and what runs beside it."""

from typing import NamedTuple

from planner.terms.activations import Activations
from planner.terms.term import Term


class _Parts(NamedTuple):
    """What activations consist of, put into words only when printed."""

    acts: Activations
    size: int
    rest: str

    def __format__(self, spec: str) -> str:
        more = self.size - self.acts.kept
        if more < 0:  # scoring, or near the first layer where little of what was kept is left
            return f"{self.rest} {self.size:,} B"
        known = [
            f"{name} {count:,} x {each:,.10g} B"
            for name, count, each in self.acts.parts
            if count * each
        ]
        return " + ".join([*known, f"{self.rest} {more:,} B"])


RUNNING = {
    "score": "one layer without a graph",
    "forward": "the running layer",
    "loss": "the final norm and its output",
    "backward": "one layer recomputed and run backward",
    "step": "the embeddings' output and its gradient, in the graph of the held outputs",
}


def running_term(phase: str, size: int, acts: Activations) -> Term:
    """Return the activations of a phase, what the layers keep apart from what runs."""
    parts = _Parts(acts, size, RUNNING[phase])
    source = "operation by operation: planner/layer/blocks.py"
    return Term("activations", size, "{0}", (parts,), source)
