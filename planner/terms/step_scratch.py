"""What an optimizer that steps bundle by bundle holds beside its states: trainer/elementwise_optimizer.py.

A bundle is a run of elements over the borders of tensors of one kind: all of the kind, or the longest bundle.
"""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from planner.models.spec import ModelSpec
from planner.run.recipe import Method, Optimizer
from planner.run.resolved import Resolved
from planner.terms.adapters import Group, trained_groups
from planner.terms.counts import BLOCK_8BIT, SMALL_TENSOR, adapters
from planner.terms.optimizer_kinds import KINDS
from planner.terms.term import Term

MOST = 24
"""Bytes of an element at most: six fp32 numbers, which is what `step_scratch_bytes` is a bundle's."""
SINGLE = (Optimizer.SGD, Optimizer.SGD_MOMENTUM)
"""They add the gradient as it is; the others make a root of the second moment, or a sign."""
STREAMED_AT_ONCE = 3
"""Bundles whose states are on the device: the one that is stepped, the next, and the last, which is leaving."""


def states_away(r: Resolved) -> bool:
    """Return whether states lie in host memory, or in managed memory: no part of torch's pool."""
    # on a CPU there is no other place
    return r.placement.offload.states or (KINDS[r.optimizer].paged and not r.cpu)


class _Kind(NamedTuple):
    """Tensors that are stepped together."""

    width: int
    decayed: bool
    """Matrices are, vectors are not."""
    coded: bool
    """Their moments are codes, with a scale for 256 of them."""
    alone: int = 0
    """Elements of a tensor that is joined with no other: its codes do not end with a block."""


def _bundle_width(r: Resolved, kind: _Kind) -> int:
    """Return the bytes of an element of a bundle that is stepped, without states that are streamed.

    Its gradient times a factor, in fp32; the weights, where they are not in fp32 on the device; moments
    that are codes; what the rule makes of them, or the noise that rounds.
    """
    optimizer = KINDS[r.optimizer]
    low = kind.width < 4
    rounded = low and not r.master_weights
    exact = 4 if rounded else 0
    moments = 4 * optimizer.states if kind.coded else 0
    made = 0 if r.optimizer in SINGLE else 4
    noise = 4 if rounded else 0
    return exact + 4 + max(noise, moments + made)


def _streamed_width(r: Resolved, kind: _Kind) -> float:
    """Return the bytes of an element's states as they travel between host and device."""
    if not states_away(r):
        return 0
    master = 4 if r.master_weights and kind.width < 4 else 0
    moment = 1 + 4 / BLOCK_8BIT if kind.coded else 4
    return master + moment * KINDS[r.optimizer].states


def bundles(model: ModelSpec, r: Resolved) -> Term:
    """Return the largest bundle's temporaries on one rank; streamed, also the states that come and go beside it."""
    longest = r.switches.step_scratch_bytes // MOST
    if states_away(r):
        longest //= 2
    kinds: Counter[_Kind] = Counter()
    for size, times, width, decayed in _tensors(model, r):
        coded = KINDS[r.optimizer].eight_bit and size >= SMALL_TENSOR
        alone = size if coded and size % BLOCK_8BIT else 0
        kind = _Kind(width, decayed, coded, alone)
        kinds[kind] = size if alone else kinds[kind] + size * times
    found = [
        (
            _bundle_width(r, kind) * min(size, longest)
            + int(_streamed_width(r, kind) * min(size, STREAMED_AT_ONCE * longest)),
            min(size, longest),
        )
        for kind, size in kinds.items()
    ]
    size, elements = max(found, default=(0, 0))
    return Term(
        "optimizer",
        size,
        "{0:,} elements x {1:.6g} B: the weights that are stepped at once, in fp32",
        (elements, size / max(1, elements)),
        "trainer/elementwise_optimizer.py",
    )


def _tensors(model: ModelSpec, r: Resolved) -> Iterator[tuple[int, int, int, bool]]:
    """Yield trained tensors: elements that one rank steps, how many such, their width, whether a matrix."""
    ranks = r.placement.state_shards

    def part(shape: tuple[int, ...]) -> int:
        return -(-shape[0] // ranks) * prod(shape[1:])

    groups = trained_groups(model, r)
    if r.method is Method.FULL:
        (group,) = groups
        modules = [(module, 1) for module in (*model.embeddings, *model.final, *model.towers)]
        modules += [(module, layer.count) for layer in model.layers for module in layer.modules]
        if model.head is not None and not model.tied:
            modules.append((model.head, 1))
        for module, layers in modules:
            for shape in module.shapes:
                if shape:
                    yield part(shape), module.count * layers, group.width, len(shape) > 1
        return
    counts = adapters(model, r)
    adapted: Group = groups[0]
    for rows, columns, count in counts.matrices:
        yield part((rows, columns)), count, adapted.width, columns > 1
    for shape in counts.rest.tensors:
        yield part(shape), 1, groups[-1].width, len(shape) > 1
