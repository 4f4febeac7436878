"""What each optimizer keeps between steps: one row a word of `Optimizer`, and no word without a row."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from planner.run.recipe import Optimizer


class Kind(NamedTuple):
    """One optimizer's memory."""

    states: int
    """Tensors as large as each trained parameter, kept from step to step."""
    eight_bit: bool = False
    """They are codes of one byte with an fp32 scale for 256; those of small tensors stay in fp32."""
    paged: bool = False
    """They lie in managed memory, outside torch's pool."""
    factored: bool = False
    """A row and a column of statistics in fp32 for every matrix instead."""
    square_roots: bool = False
    """foreach: the square roots of all second moments are there at once during the step."""


KINDS: dict[Optimizer, Kind] = {
    Optimizer.ADAMW: Kind(2, square_roots=True),
    Optimizer.ADAMW_FUSED: Kind(2),
    Optimizer.ADAMW_8BIT: Kind(2, eight_bit=True),
    Optimizer.PAGED_ADAMW: Kind(2, paged=True),
    Optimizer.PAGED_ADAMW_8BIT: Kind(2, eight_bit=True, paged=True),
    Optimizer.LION: Kind(1),
    Optimizer.LION_8BIT: Kind(1, eight_bit=True),
    Optimizer.SGD: Kind(0),
    Optimizer.SGD_MOMENTUM: Kind(1),
    Optimizer.MUON: Kind(1),
    Optimizer.ADAFACTOR: Kind(0, factored=True),
}


def complete(kinds: Mapping[Optimizer, Kind], words: Iterable[Optimizer]) -> None:
    """Raise ImportError when a word has no row: it would be planned as something else."""
    missing = [str(word) for word in words if word not in kinds]
    if missing:
        raise ImportError(f"optimizer {', '.join(missing)}: no row in KINDS of {__name__}")


complete(KINDS, Optimizer)
