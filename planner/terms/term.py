"""Term: a number of bytes, the formula with the numbers in it, and where the formula comes from."""

from dataclasses import dataclass
from typing import Any

TERM_NAMES = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "vision",
    "logits",
    "kv_cache",
    "engine",
    "overhead",
)


@dataclass(frozen=True, slots=True)
class Term:
    """One row. The formula is a template: it is filled in only when somebody asks."""

    name: str
    bytes: int
    template: str = ""
    args: tuple[Any, ...] = ()
    source: str = ""

    @property
    def formula(self) -> str:
        """Return the formula with the numbers in it."""
        return self.template.format(*self.args) if self.args else self.template

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "bytes": self.bytes,
            "formula": self.formula,
            "source": self.source,
        }


def total(terms: tuple[Term, ...]) -> int:
    """Return the sum of terms."""
    return sum(term.bytes for term in terms)
