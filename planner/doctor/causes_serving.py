"""Rules for a vLLM process that runs out while it serves or places its weights: no trainer's advice helps it."""

import re

from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.phases import TRACEBACK
from planner.doctor.state import served_bytes
from planner.units import format_bytes

_VLLM = re.compile(r"\bvllm/|\bvllm\.v1\b|gpu_model_runner|^VllmWorker|^EngineCore|^Worker_")
_TRAINER = re.compile(
    r"/trl/|transformers/trainer|/verl/|unsloth|swift/trainers|deepspeed/|torch/optim|cumem|wake_up|loss\.backward"
)
_SAMPLER = re.compile(r"vllm/\S*sampl|topk_topp_sampler|compute_logprobs|gather_logprobs")
_LOADS = re.compile(
    r"load_model|create_weights|weight_loader|model_loader|load_weights|process_weights_after"
)


def serves_vllm(signals: Signals) -> bool:
    """Return whether the failure is in a vLLM engine and not in a trainer beside it."""
    near = _frames(signals)
    rank = signals.event.rank if near and signals.event else ""
    return any(_VLLM.search(line) for line in (rank, *near)) and not any(
        _TRAINER.search(line) for line in near
    )


def _frames(signals: Signals) -> list[str]:
    """Return the lines of the last traceback before the message."""
    event = signals.event
    if event is None or event.kind != "cuda_oom":
        return []
    lines = list(event.stack[-80:])
    starts = [index for index, line in enumerate(lines) if TRACEBACK.search(line)]
    return lines[starts[-1] :] if starts else lines[-20:]


def serving(signals: Signals) -> Cause | None:
    """The sampler, the weights or a running batch of an engine."""
    if not serves_vllm(signals):
        return None
    near = _frames(signals)
    util = signals.context.utilization
    outside = f"outside the budget: 1 - {util:g} of the card" if util else ""
    if any(_SAMPLER.search(line) for line in near):
        found = signals.candidate("sampler", "logits")
        return Cause(
            category="vllm_sampler",
            certainty=Certainty.CONSISTENT,
            explanation="the sampler makes fp32 copies, sorts and log-probabilities of sequences x vocabulary for a running batch; that comes beside weights and KV cache.",
            formula=found.formula if found else outside,
        )
    if any(_LOADS.search(line) for line in near):
        share, card = served_bytes(signals.context), signals.card_bytes
        exceeds = bool(share and card and share > card and signals.context.model)
        return Cause(
            category="weights",
            certainty=Certainty.PROVEN if exceeds else Certainty.CONSISTENT,
            explanation="the weights of one rank do not fit while the engine places them; its budget is counted only after that.",
            formula=f"one rank {format_bytes(share)}, card {format_bytes(card)}"
            if share and card
            else "",
        )
    return Cause(
        category="vllm_runtime",
        certainty=Certainty.CONSISTENT,
        explanation="a running batch needed more than the start's profile run had found: longer prompts at once, adapters, images, a fuller sampler, or another process that took the rest of the card since.",
        formula=outside,
    )
