"""Rules for SGLang and for torch_memory_saver, which pauses its memory in RL runs.

SGLang takes mem_fraction_static of the card for weights and KV cache together; what is left is for
activations, graphs and everything else. Too small a share cannot hold the weights (raise it), too
large a share starves the batches (lower it).
"""

import re

from planner.doctor.cause import Cause, Certainty, Signals
from planner.units import format_bytes

KINDS = frozenset({"sglang_pool", "sglang_pool_full", "sglang_unbalanced", "tms_oom"})
_SGLANG = re.compile(r"\bsglang\b|mem[-_]fraction[-_]static|SGLang")
_RUNNING = re.compile(r"sglang/srt/|sglang\.srt|Scheduler hit an exception|TpModelWorkerClient")
_GRAPHS = re.compile(r"Capture cuda graph|cuda_graph_runner|capture_one_batch|init_device_graphs")
_LOADING = re.compile(r"load_model|initialize\(|model_loader|create_weights|Load weight begin")
_POOL = re.compile(r"memory_pool|init_memory_pool|token_to_kv_pool|_create_buffers")


def serves_sglang(signals: Signals) -> bool:
    """Return whether the failure is in an SGLang process."""
    event = signals.event
    near = event.stack[-60:] if event else ()
    return any(_RUNNING.search(line) for line in near)


def mentions_sglang(signals: Signals) -> bool:
    """Return whether the text is about SGLang at all."""
    return bool(_SGLANG.search(signals.context.text))


def pool_too_small(signals: Signals) -> Cause | None:
    """The weights leave nothing of the static share for a KV cache."""
    event = signals.event
    if event is None or event.kind != "sglang_pool":
        return None
    share = event.facts.get("mem_fraction_static")
    weights, avail = figure(signals, "weights_bytes"), figure(signals, "avail_bytes")
    formula = f"mem_fraction_static {share}" if share else ""
    if weights is not None and avail is not None:
        formula += f"{'; ' if formula else ''}weights {format_bytes(weights)}, {format_bytes(avail)} free after them"
    return Cause(
        category="sglang_pool_too_small",
        certainty=Certainty.CONSISTENT,
        explanation="mem_fraction_static is the share of the card for weights AND KV cache: after the weights nothing of it is left.",
        formula=formula,
    )


def pool_full(signals: Signals) -> Cause | None:
    """A batch found no free tokens in the KV pool: the pool ran out, not the card."""
    event = signals.event
    if event is None or event.kind != "sglang_pool_full":
        return None
    return Cause(
        category="sglang_pool_full",
        certainty=Certainty.CONSISTENT,
        explanation="the scheduler admitted more than the KV pool has free tokens for. The pool was sized at the start and is counted in tokens: the card itself did not refuse anything.",
    )


def figure(signals: Signals, name: str) -> int | None:
    """Return the last figure of that name which SGLang's start printed."""
    found = [
        notice.facts[name]
        for notice in signals.notices
        if notice.kind == "sglang_line" and name in notice.facts
    ]
    return int(found[-1]) if found else None


def unbalanced(signals: Signals) -> Cause | None:
    """One GPU has less free than the others before the model loads."""
    event = signals.event
    if event is None or event.kind != "sglang_unbalanced":
        return None
    return Cause(
        category="other_process",
        certainty=Certainty.CONSISTENT,
        explanation="before the model loads, one GPU of the group has less free memory than the others: another process, or a run that has not ended.",
        formula=f"least free {format_bytes(int(event.facts['free_bytes']))}, here {format_bytes(int(event.facts['initial_free_bytes']))}",
    )


def memory_saver(signals: Signals) -> Cause | None:
    """The paused engine cannot map its memory again: the trainer still holds it."""
    event = signals.event
    if event is None or event.kind != "tms_oom":
        return None
    return Cause(
        category="wake_up_order",
        certainty=Certainty.CONSISTENT,
        explanation="torch_memory_saver could not map the engine's weights or KV cache back: on resume it asks the driver, and what the trainer holds, and what its PyTorch has reserved and not given back, is in the way.",
        formula="card >= trainer (with its unused reserve) + the engine's static pool",
    )


def graphs(signals: Signals) -> Cause | None:
    """Graph capture comes after the static pool."""
    event = signals.event
    if (
        event is None
        or event.cuda is None
        or not (serves_sglang(signals) or mentions_sglang(signals))
    ):
        return None
    if not _GRAPHS.search(event.text) and not any(
        _GRAPHS.search(line) for line in event.stack[-25:]
    ):
        return None
    left = figure(signals, "after_pool_bytes")
    return Cause(
        category="sglang_cuda_graphs",
        certainty=Certainty.CONSISTENT,
        explanation="CUDA graphs are captured after the static pool was taken, in what it left.",
        formula=f"{format_bytes(left)} were free after the pool" if left is not None else "",
    )


def running(signals: Signals) -> Cause | None:
    """A prefill or decode batch needs more than the static share leaves."""
    event = signals.event
    if (
        event is None
        or event.cuda is None
        or event.kind != "cuda_oom"
        or not serves_sglang(signals)
    ):
        return None
    near = event.stack[-25:]
    if any(_GRAPHS.search(line) for line in near):
        return None
    if any(_LOADING.search(line) for line in near) or any(_POOL.search(line) for line in near):
        loading = not any(_POOL.search(line) for line in near)
        return Cause(
            category="weights" if loading else "sglang_runtime",
            certainty=Certainty.CONSISTENT,
            explanation="the weights of one rank did not fit while SGLang placed them."
            if loading
            else "the static pool was larger than what was free: another process, or a share that is too high.",
        )
    return Cause(
        category="sglang_runtime",
        certainty=Certainty.CONSISTENT,
        explanation="weights and KV cache took mem_fraction_static of the card; a prefill or decode batch found too little of the rest for its activations and logits.",
    )


SGLANG_RULES = (pool_too_small, pool_full, unbalanced, memory_saver, graphs, running)
