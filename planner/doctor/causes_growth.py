"""Rules for failures that come later: at a resume, or after steps that each left something behind."""

from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.state import static_state
from planner.units import GiB, format_bytes

CONTEXT = 2 * GiB
"""Less than this of one's own tensors means that the card was full of somebody else's."""


def resume(signals: Signals) -> Cause | None:
    """The checkpoint is read onto the GPU beside the model and optimizer that are there."""
    if not signals.first("resume"):
        return None
    budget = signals.budget
    if (
        budget
        and budget.allocated_bytes is not None
        and budget.total_bytes
        and budget.allocated_bytes < min(CONTEXT, budget.total_bytes // 10)
    ):
        return None  # this process holds next to nothing: others do
    state = static_state(signals.context)
    return Cause(
        category="resume_copy",
        certainty=Certainty.CONSISTENT,
        explanation="the states of the checkpoint are read onto the GPU (torch.load with a map_location of the GPU, or the device they were saved from) while model and optimizer are there already: two copies for a moment. On several ranks without a map_location all of them load onto GPU 0.",
        formula=f"held already: {state.formula}; the checkpoint's copy comes on top"
        if state
        else "",
    )


def grows(signals: Signals) -> Cause | None:
    """The log's own figures rise with every step, or with the length."""
    growth, event = signals.growth, signals.event
    if growth is None or (event is not None and event.cuda is None and event.kind != "host_killed"):
        return None
    host_event = event is not None and event.kind == "host_killed"
    if growth.host is not host_event and event is not None:
        return None
    if growth.kind == "length":
        return Cause(
            category="longest_sample",
            certainty=Certainty.CONSISTENT,
            explanation="the log's memory follows the length it prints beside it, not the step: a batch longer than any before ran out.",
            formula=growth.sentence(),
        )
    if growth.kind == "reserve":
        return Cause(
            category="fragmentation",
            certainty=Certainty.CONSISTENT,
            explanation="what tensors hold stays the same while PyTorch's reserve grows from step to step: the reserve is in pieces that later requests do not fit.",
            formula=growth.sentence(),
        )
    left = ""
    if signals.card_bytes and growth.per_step_bytes > 0 and not growth.host:
        steps = max(0, (signals.card_bytes - growth.first_bytes) // growth.per_step_bytes)
        left = f"; {format_bytes(signals.card_bytes)} are reached about {steps:,} steps after the first"
    return Cause(
        category="memory_leak",
        certainty=Certainty.CONSISTENT,
        explanation="what is held grows by about the same at every step: tensors of earlier steps are kept (a loss or metric that was never detached, a growing list, a cache, an engine that does not give its memory back). A longer sample or fragmentation does not rise so evenly.",
        formula=growth.sentence() + left,
    )


GROWTH_RULES = (resume, grows)
