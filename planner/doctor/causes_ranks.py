"""Rules for what only several ranks have: gradients kept whole, communicators, one rank fuller than the rest."""

import re

from planner.doctor.budget import ordinary
from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.state import communicators_of, standing_of
from planner.units import GiB, format_bytes

_NO_SYNC = re.compile(
    r"no_sync|gradient_accumulation|GradientAccumulationPlugin|sync_each_batch", re.IGNORECASE
)
UNEVEN = 1.15
"""How much more than the middle rank one must hold to be called fuller."""


def unsharded_gradients(signals: Signals) -> Cause | None:
    """FSDP adds up whole gradients between syncs."""
    context = signals.context
    steps = context.number("accumulation") or 0
    if context.sharding not in ("fsdp", "fsdp2") or steps < 2 or context.gpus < 2:
        return None
    if not signals.has("backward") or not _NO_SYNC.search(context.text):
        return None
    if signals.first("vocab", "attention", "optimizer_temp", "optimizer_states", "save", "load"):
        return None
    whole = standing_of(context, ranks=1)
    share = standing_of(context)
    if whole is None or share is None or whole.gradients <= share.gradients:
        return None
    return Cause(
        category="unsharded_gradients",
        certainty=Certainty.CONSISTENT,
        explanation=f"over {steps} accumulated micro-batches FSDP's no_sync() adds up whole gradients on every rank and divides them at the last one only.",
        formula=f"gradients {format_bytes(whole.gradients)} whole instead of {format_bytes(share.gradients)} a rank",
    )


def reduce_copy(signals: Signals) -> Cause | None:
    """FSDP copies a unit's whole gradient into one buffer before the ranks divide it."""
    if not signals.first("reduce_copy"):
        return None
    largest = signals.candidate("layer", "weight")
    return Cause(
        category="reduce_scatter_copy",
        certainty=Certainty.CONSISTENT,
        explanation="the backward of one wrapped unit is done: its whole gradient is copied, in the dtype it is reduced in, beside the gradient itself before each rank gets its part.",
        formula=largest.formula if largest else "",
    )


def communicators(signals: Signals) -> Cause | None:
    """Much lies outside PyTorch's allocator in this process: process groups' buffers."""
    budget, context = signals.budget, signals.context
    if budget is None or budget.context_bytes is None or budget.shortfall_bytes is None:
        return None
    many = context.gpus > 1 or (signals.event is not None and len(signals.event.ranks) > 1)
    usual = int(ordinary("context_bytes"))
    beyond = budget.context_bytes - usual
    if (
        not many
        or beyond <= 0
        or beyond < budget.shortfall_bytes
        or signals.has("graph_capture", "wake_up")
    ):
        return None
    if context.colocated:
        return None
    made = communicators_of(context, budget.total_bytes or 0)
    told = ""
    if made is not None and made.groups:
        each = ", ".join(f"{group.name} ({group.size})" for group, _ in made.groups)
        told = f"; by the plan {format_bytes(made.held.typical)} of it are the communicators of {each}, up to {format_bytes(made.held.high)}"
    return Cause(
        category="communicators",
        certainty=Certainty.CONSISTENT,
        explanation=f"{format_bytes(budget.context_bytes)} of this process are outside PyTorch's allocator, more than any usual context: every process group keeps NCCL buffers of its own on every rank.",
        formula=f"{format_bytes(budget.context_bytes)} - {format_bytes(usual)} usual = {format_bytes(beyond)}, short by {format_bytes(budget.shortfall_bytes)}{told}",
    )


def fuller_rank(signals: Signals) -> Cause | None:
    """The log's figures by rank: one holds much more than the others."""
    event = signals.event
    if event is None or event.cuda is None:
        return None
    held = signals.held
    if len(held) < 3:
        return None
    middle = sorted(held.values())[len(held) // 2]
    rank, most = max(held.items(), key=lambda row: row[1])
    if not middle or most < UNEVEN * middle:
        return None
    return Cause(
        category="one_rank_fuller",
        certainty=Certainty.CONSISTENT,
        explanation=f"rank {rank} holds {most:g} GiB where the middle rank holds {middle:g}: what only this rank does (the first or last pipeline stage, an expert that draws most tokens, gathering for a save or a metric, another process) is what ran out, not what all share.",
        formula=f"{most:g} - {middle:g} = {most - middle:.1f} GiB more, {format_bytes(int((most - middle) * GiB))}",
    )


RANK_RULES = (unsharded_gradients, reduce_copy, communicators, fuller_rank)
