"""Rules for failures that come later: at a resume, or after steps that each left something behind."""

import re

from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.event import MAX_DESCRIPTION
from planner.doctor.state import static_state
from planner.units import GiB, format_bytes

_GROWS = re.compile(
    r"(?:memory|VRAM|\bRAM|RSS)\b[^.\n]{0,60}?(?:keeps? (?:on )?(?:increas|grow|ris)|(?:steadil|continuousl|graduall|linearl|constantl)y (?:increas|grow|ris)"
    r"|(?:increas|grow|ris)\w*[^.\n]{0,40}?(?:steadily|continuously|gradually|linearly|(?:over|throughout|with|at|after) (?:the |each |every )?(?:steps?|iterations?|epochs?)))|memory leak",
    re.IGNORECASE,
)
"""A person's words for memory that grows as the run goes on."""
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


def told(signals: Signals) -> Cause | None:
    """Somebody says that memory grows, and shows no figures to fit."""
    if signals.event is not None or signals.growth is not None:
        return None
    if len(signals.context.text) >= MAX_DESCRIPTION or not _GROWS.search(signals.context.text):
        return None
    return Cause(
        category="memory_leak",
        certainty=Certainty.UNKNOWN,
        explanation="memory is said to grow as the run goes on. Without its figures it cannot be told apart: even steps of what tensors hold are a leak, steps where the batch is longer are long samples, a reserve that grows over even tensors is fragmentation.",
    )


def grows(signals: Signals) -> Cause | None:
    """The log's own figures rise with every step, or with the length."""
    growth, event = signals.growth, signals.event
    if growth is None or (event is not None and event.cuda is None and event.kind != "host_killed"):
        return None
    host_event = event is not None and event.kind == "host_killed"
    if growth.host is not host_event and event is not None:
        return None
    if growth.kind == "unclear":
        return None  # `diagnose` says that it cannot be told
    if growth.kind == "records":
        return Cause(
            category="longest_sample",
            certainty=Certainty.CONSISTENT,
            explanation="the log's peak rises in a few jumps, ever rarer, and stays between them: what a batch longer than any before does. A leak adds at every step.",
            formula=growth.sentence(),
        )
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


GROWTH_RULES = (resume, grows, told)
