"""What ranks do each by itself and leave together: an error of one is an error of all."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from planner.errors import VramwiseError
from trainer.parallel.ranks import Ranks

R = TypeVar("R")


class RankFailed(VramwiseError):
    """What ended the work of one rank in the midst of what others do with it: they cannot be asked any more.

    Nobody gathers or saves for it; the watch ends the other ranks.
    """


def together(ranks: Ranks, work: Callable[[], R]) -> R:
    """Return `work()`; a VramwiseError of one rank is raised on all, once each has ended its work."""
    if not ranks.several:
        return work()
    done: list[R] = []
    error: VramwiseError | None = None
    try:
        done.append(work())
    except RankFailed:
        raise
    except VramwiseError as raised:
        error = raised
    every = ranks.gather_objects(None if error is None else (error.message, error.hint))
    if error is not None:
        raise error
    for rank, told in enumerate(every):
        if told is not None:
            raise VramwiseError(f"rank {rank}: {told[0]}", hint=told[1])
    return done[0]


def largest(ranks: Ranks, figures: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return each figure's largest value on any rank."""
    if not ranks.several:
        return dict(figures)
    every = ranks.gather_objects(dict(figures))
    names = dict.fromkeys(name for own in every for name in own)
    return {name: _largest([own.get(name) for own in every]) for name in names}


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
