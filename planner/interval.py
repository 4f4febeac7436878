"""The span a run's need in torch's pool lies in: still from constants, until data/calibration has them.

planner/reserved.py replays the typical figure; how far a run can be from it is empirical.
"""

from collections.abc import Iterable
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.phases import Phase
from planner.run.recipe import Method
from planner.run.resolve import Resolved
from planner.terms.engine import VLLM
from planner.terms.logits import scored_rows

LAYER_SPREAD = 1.25
"""Recomputed and backward buffers of one layer come in sizes (tokens x H, x I, x kv heads, fp32 and
16-bit) that seldom fit each other's freed blocks: liger runs, where the loss is small, hold
22-25% more than is alive in a layer."""
PEAK_LOW = 0.93
"""The predicted live peak is more than 7% too high in one published run of a hundred."""
LAST_RESORT = 0.98
"""Share of the capacity up to which the allocator caches before it frees."""


class Interval(NamedTuple):
    """Low and high end."""

    low: int
    high: int


def interval(phases: Iterable[Phase], r: Resolved, vocab: int, capacity_bytes: int) -> Interval:
    """Return between which figures the allocator's need lies."""
    by_name = {phase.name: phase for phase in phases}
    peak = max(phase.total_bytes for phase in by_name.values())
    if "loss" not in by_name and r.engine in VLLM:
        return Interval(peak, int(1.02 * peak))  # vLLM stays inside its utilisation
    if "loss" not in by_name:
        return Interval(int(PEAK_LOW * peak), int(1.1 * peak))
    loss, backward, step = (_sizes(by_name[name]) for name in ("loss", "backward", "step"))
    load, forward = _sizes(by_name["load"]), _sizes(by_name["forward"])
    static = load["weights"] + load["adapters"] + forward["optimizer"] + loss["overhead"]
    kept = min(loss["activations"], backward["activations"])
    layer = LAYER_SPREAD * max(0, backward["activations"] - kept)
    head = loss["logits"] + _narrow_copy(r, vocab)
    late = step["gradients"] + max(0, step["optimizer"] - forward["optimizer"])
    gathered = 2 * max(0, backward["weights"] - load["weights"])
    # many small gradients and temporaries are carved out of the head's freed blocks
    shared = min(head, late) // 2 if r.method is Method.FULL else 0
    if r.placement.holds_frozen_inputs:
        # gradients that frozen units hold (terms/activations.py) fit into the head's freed blocks
        shared = min(head, kept, max(0, backward["activations"] - kept))
    total = static + kept + layer + head + late + gathered - shared
    others = max(
        (p.total_bytes for n, p in by_name.items() if n in ("rollout", "score")), default=0
    )
    typical = max(total, peak, others)
    limit = max(peak, int(LAST_RESORT * capacity_bytes))
    high = 1.12 * typical + 0.5 * head
    low = int(PEAK_LOW * peak)
    return Interval(low, int(min(high, max(1.1 * peak, limit))))


def _sizes(phase: Phase) -> dict[str, int]:
    sizes = dict.fromkeys(
        ("weights", "adapters", "optimizer", "gradients", "activations", "logits", "overhead"), 0
    )
    for term in phase.terms:
        sizes[term.name] = sizes.get(term.name, 0) + term.bytes
    return sizes


def _narrow_copy(r: Resolved, vocab: int) -> int:
    """Return the 16-bit logits that the head's matmul makes and an fp32 copy replaces."""
    law = r.law
    first = {dtype for _, dtype in law.forward}
    if law.kind != "full" or "act" in {dtype for _, dtype in law.backward}:
        return 0
    if not first & {"fp32", "upcast"}:
        return 0
    return scored_rows(r, law) * vocab * element_bytes(r.compute_dtype)
