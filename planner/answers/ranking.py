"""The order of recommendations: task fit, size, recency and context in one number, and the rule in words."""

import json
from dataclasses import dataclass
from functools import cache
from math import log2, sqrt
from typing import TYPE_CHECKING

from planner.datafiles import data_dir
from planner.models.catalogue import load_catalogue
from planner.models.spec import ModelSpec

if TYPE_CHECKING:
    from planner.answers.spent import Spent

COMFORTABLE_TOKENS = 8192
"""A longest context from here on costs nothing."""
COMFORTABLE_USD = 2
"""A million tokens for no more than this cost nothing."""
UNKNOWN_YEARS = 3.0
"""Age of a model whose release nobody wrote down."""
NOT_FOR_TEXT = ("vision", "audio", "-vl-", "llava", "smolvlm", "internvl", "voxtral")
ONE_DOMAIN = ("coder", "codestral", "codellama", "starcoder", "-math-")
RULE = (
    "ranked by: log2(billions of parameters; of a mixture the root of all x active) - years since release "
    f"- half for each halving of the context below {COMFORTABLE_TOKENS:,} tokens - 1 for models made for one "
    "domain (code, mathematics) or for images and sounds - half for each doubling of a million tokens' price "
    f"above ${COMFORTABLE_USD:g} at the context asked for, where it is known; equal models by method, full first"
)


@dataclass(frozen=True, slots=True)
class Worth:
    """What a model is worth before anything is planned."""

    score: float
    """At a comfortable context."""
    released: str
    """Year and month, or empty."""

    def at(self, tokens: int) -> float:
        """Return the score of a row whose longest context is this."""
        return self.score - max(0.0, log2(COMFORTABLE_TOKENS / max(1, tokens))) / 2


def price_penalty(found: "Spent | None") -> float:
    """Return what the price of a million tokens takes off a score; 0 where none is known."""
    usd = found.usd_a_million if found is not None else None
    return max(0.0, log2(usd / COMFORTABLE_USD)) / 2 if usd else 0.0


@cache
def released() -> tuple[tuple[str, str], ...]:
    """Return (beginning of a name, year-month), the longest beginnings first."""
    text = (data_dir() / "models" / "released.json").read_text(encoding="utf-8")
    rows = [(name, row[0]) for name, row in json.loads(text)["released"].items()]
    return tuple(sorted(rows, key=lambda row: -len(row[0])))


def release_of(name: str) -> str:
    """Return the year and month in which a catalogue model came out; empty when unknown."""
    return next((month for start, month in released() if name.startswith(start)), "")


@cache
def _newest() -> float:
    return max(_years(release_of(name)) for name in load_catalogue())


def _years(month: str) -> float:
    return int(month[:4]) + (int(month[5:7]) - 1) / 12 if month else 0.0


def worth(name: str, model: ModelSpec) -> Worth:
    """Return what a model is worth, younger and larger ones more; ages are counted from the newest."""
    month = release_of(name)
    age = _newest() - _years(month) if month else UNKNOWN_YEARS
    size = sqrt(model.parameters * model.active_parameters) / 1e9
    dashed = f"-{name}-"
    narrow = any(word in dashed for word in (*ONE_DOMAIN, *NOT_FOR_TEXT))
    return Worth(log2(max(size, 1e-3)) - age - narrow, month)
