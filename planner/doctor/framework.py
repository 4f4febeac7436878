"""Which framework a pasted text runs under: the one whose version it states, else an assumption that is said."""

from typing import NamedTuple

from planner.doctor.context import Context
from planner.importers.versions import stated
from planner.run.framework import families, spell

USUAL = "hf-trainer"
"""Where a text states no framework: the loop that most others are built on."""
SERVES = "vllm"


class Framework(NamedTuple):
    """How a recipe names it."""

    name: str
    assumed: bool
    """The text does not say it."""


def framework_of(context: Context) -> Framework:
    """Return the framework and version that the text of a run states; transformers alone comes last."""
    for family, package in _packages():
        version = stated(context.text, package)
        if version is not None:
            return Framework(spell(family, version), assumed=False)
    return Framework("unsloth", False) if context.unsloth else Framework(USUAL, assumed=True)


def _packages() -> list[tuple[str, str]]:
    """Return families that train with the package whose version tells theirs."""
    found = [
        (family, laws[0].package or family)
        for family, laws in families().items()
        if family != SERVES
    ]
    usual = dict(found)[USUAL]
    return [*(pair for pair in found if pair[1] != usual), (USUAL, usual)]
