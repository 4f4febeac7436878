"""Models beside the trained one: their weights, and what their passes without a graph hold."""

from dataclasses import replace
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.run.companions import Companion
from planner.run.framework_files import common_laws
from planner.run.recipe import Method, Reference, TeacherPlacement
from planner.run.resolved import Resolved
from planner.terms.counts import base_weights
from planner.terms.term import Term

FORMULA = {
    "reference": "reference copy",
    "teacher": "teacher",
    "value": "value model",
    "reward": "reward model",
}


class CompanionBytes(NamedTuple):
    """One companion's weights on one GPU."""

    companion: Companion
    bytes: int


def as_companion(r: Resolved, companion: Companion) -> Resolved:
    """Return the choices under which a companion runs: nothing of it is trained."""
    reference = companion.role == "reference"
    law = common_laws()["score"] if companion.role in ("value", "reward") else r.law
    return replace(
        r,
        trains=False,
        method=Method.FULL,
        quantization=r.quantization if reference else "",
        reference=Reference.NONE,
        companions=(),
        law=law,
    )


def as_trained(r: Resolved, companion: Companion) -> Resolved:
    """Return the choices under which the value model is trained: the policy's, without companions."""
    return replace(r, reference=Reference.NONE, companions=(), law=common_laws()["score"])


def companion_bytes(companion: Companion, r: Resolved) -> int:
    """Return a companion's weights on one GPU while they are there."""
    own = as_trained(r, companion) if companion.trained else as_companion(r, companion)
    base = base_weights(companion.spec, own)
    width = element_bytes(r.dtype)
    whole = base.total if base.quantized else companion.spec.parameters * width
    return -(-whole // r.placement.weight_shards)


def resident(r: Resolved) -> tuple[CompanionBytes, ...]:
    """Return the companions whose weights stay on the GPU."""
    if not r.trains:
        return ()
    return tuple(
        CompanionBytes(each, companion_bytes(each, r)) for each in r.companions if each.resident
    )


def offloaded(r: Resolved) -> Term:
    """Return host memory of the companions that wait there."""
    waiting = (
        [each for each in r.companions if each.placement is TeacherPlacement.OFFLOADED]
        if r.trains
        else []
    )
    size = sum(companion_bytes(each, r) for each in waiting)
    return Term(
        "weights",
        size,
        "{0} in host memory between passes: {1:,} B",
        (", ".join(FORMULA[each.role] for each in waiting), size),
        "copied to the GPU for its own pass",
    )


def with_companions(base: Term, r: Resolved) -> Term:
    """Return the weights' term with the companions that stay on the GPU."""
    found = resident(r)
    if not found:
        return base
    template, args = base.template, list(base.args)
    for companion, size in found:
        template += f" + {FORMULA[companion.role]} {{{len(args)}:,}} B"
        args.append(size)
    more = sum(size for _, size in found)
    return Term("weights", base.bytes + more, template, tuple(args), base.source)


def visiting(companion: Companion | None, r: Resolved) -> Term:
    """Return an offloaded companion's weights during its own pass."""
    if companion is None or companion.placement is not TeacherPlacement.OFFLOADED:
        return Term("weights", 0)
    size = companion_bytes(companion, r)
    text = f"{FORMULA[companion.role]} back from the host {{0:,}} B"
    return Term("weights", size, text, (size,), "the whole copy, for one pass")
