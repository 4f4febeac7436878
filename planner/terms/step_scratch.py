"""What an optimizer that steps slice by slice holds beside its states: trainer/elementwise_optimizer.py.

A slice is a part of one tensor, never of two: the largest tensor decides, or the longest slice.
"""

from collections.abc import Iterator
from math import prod

from planner.models.spec import ModelSpec
from planner.run.recipe import Method, Optimizer
from planner.run.resolved import Resolved
from planner.terms.adapters import Group, trained_groups
from planner.terms.counts import SMALL_TENSOR, adapters
from planner.terms.optimizer_kinds import KINDS
from planner.terms.term import Term

MOST = 24
"""Bytes of an element at most: six fp32 numbers, which is what `step_scratch_bytes` is a slice's."""
SINGLE = (Optimizer.SGD, Optimizer.SGD_MOMENTUM)
"""They add the gradient as it is; the others make a root of the second moment, or a sign."""


def states_away(r: Resolved) -> bool:
    """Return whether states lie in host memory, or in managed memory: no part of torch's pool."""
    # on a CPU there is no other place
    return r.placement.offload.states or (KINDS[r.optimizer].paged and not r.cpu)


def slice_width(r: Resolved, width: int, elements: int = SMALL_TENSOR) -> int:
    """Return the bytes of an element of a slice of a parameter of `width` bytes.

    Its gradient times a factor, in fp32; the weights, where they are not in fp32 on the device; moments
    that are codes, or come from the host; what the rule makes of them, or the noise that rounds.
    """
    kind, away = KINDS[r.optimizer], states_away(r)
    master = r.master_weights and width < 4
    exact = 4 if width < 4 and (not master or away) else 0
    coded = kind.eight_bit and elements >= SMALL_TENSOR
    moments = 4 * kind.states if away or coded else 0
    made = 0 if r.optimizer in SINGLE else 4
    cast = 4 if width < 4 else 0  # the gradient before it is multiplied; later noise
    return exact + 4 + max(cast, moments + made)


def slices(model: ModelSpec, r: Resolved) -> Term:
    """Return the largest slice's temporaries on one rank."""
    longest = r.switches.step_scratch_bytes // MOST
    found = [
        (slice_width(r, width, size) * min(size, longest), min(size, longest))
        for size, width in dict.fromkeys(_tensors(model, r))
    ]
    size, elements = max(found, default=(0, 0))
    return Term(
        "optimizer",
        size,
        "{0:,} elements x {1} B: a slice of the largest tensor in fp32",
        (elements, size // max(1, elements)),
        "trainer/elementwise_optimizer.py",
    )


def _tensors(model: ModelSpec, r: Resolved) -> Iterator[tuple[int, int]]:
    """Yield the elements that one rank steps of each kind of trained tensor, and their width."""
    ranks = r.placement.state_shards

    def part(rows: int, rest: int) -> int:
        return -(-rows // ranks) * rest

    groups = trained_groups(model, r)
    if r.method is Method.FULL:
        (group,) = groups
        modules = [*model.embeddings, *model.final, *model.towers]
        modules += [module for layer in model.layers for module in layer.modules]
        if model.head is not None and not model.tied:
            modules.append(model.head)
        for module in modules:
            for shape in module.shapes:
                if shape:
                    yield part(shape[0], prod(shape[1:])), group.width
        return
    counts = adapters(model, r)
    adapted: Group = groups[0]
    for rows, columns, _ in counts.matrices:
        yield part(rows, columns), adapted.width
    for size in counts.rest.sizes:
        yield -(-size // ranks), groups[-1].width
