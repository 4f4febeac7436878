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
    "communication",
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


def merged(*terms: Term) -> tuple[Term, ...]:
    """Return the terms with those of one name made one: a phase has each name once."""
    found: dict[str, Term] = {}
    for term in terms:
        if not term.bytes:
            continue
        before = found.get(term.name)
        found[term.name] = term if before is None else plus(before, term)
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class _Both:
    """Two formulas, put into words only when printed."""

    first: Term
    second: Term

    def __format__(self, spec: str) -> str:
        return f"{self.first.formula} + {self.second.formula}"


def plus(first: Term, second: Term) -> Term:
    """Return two terms of one name as one, with both formulas."""
    source = first.source if first.source == second.source else f"{first.source}; {second.source}"
    return Term(first.name, first.bytes + second.bytes, "{0}", (_Both(first, second),), source)
