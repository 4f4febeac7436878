"""Rules for vLLM's start-up, warm-up and sleep mode."""

from collections.abc import Callable

from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.causes_sglang import mentions_sglang
from planner.doctor.serving import planned_engine
from planner.doctor.state import sampler_bytes, served_bytes
from planner.units import GiB, format_bytes

Rule = Callable[[Signals], Cause | None]


def kv_too_small(signals: Signals) -> Cause | None:
    """One request of max_model_len needs more KV cache than the budget leaves."""
    event = signals.event
    if event is None or event.kind != "vllm_kv_len":
        return None
    facts = event.facts
    length = int(facts["max_seq_len"])
    if "needed_bytes" in facts:
        need, have = int(facts["needed_bytes"]), int(facts["available_bytes"])
        per_token = need / length
        formula = (
            f"{format_bytes(need)} / {length:,} tokens = {per_token:,.0f} B a token;"
            f" {format_bytes(have)} holds {max(0, int(have / per_token)):,} tokens"
        )
        proven = need > have
    else:
        tokens = int(facts["kv_tokens"])
        formula = f"{length:,} tokens wanted, {tokens:,} fit"
        proven = length > tokens
    return Cause(
        category="vllm_kv_too_small",
        certainty=Certainty.PROVEN if proven else Certainty.CONSISTENT,
        explanation=f"vLLM must be able to hold one request of max_model_len ({length:,} tokens); "
        "what weights, activation peak and the rest leave of the budget is too small for it.",
        formula=formula,
    )


def no_cache_blocks(signals: Signals) -> Cause | None:
    """Weights and the profile run use up the whole budget."""
    event = signals.event
    if event is None or event.kind != "vllm_no_blocks":
        return None
    share, card = served_bytes(signals.context), signals.card_bytes
    made = planned_engine(signals.vllm, signals.context)
    util = signals.context.utilization or (made.resolved.utilization if made else None)
    formula, certainty = "", Certainty.CONSISTENT
    logged = signals.vllm.weights_bytes
    if logged and card:
        used = util or 0.9
        formula = f"budget {used:g} * {format_bytes(card)} = {format_bytes(int(used * card))}; weights {format_bytes(logged)} by the log"
    elif share and card:
        budget = int((util or 0.9) * card)
        formula = f"budget {util or 0.9:g} * {format_bytes(card)} = {format_bytes(budget)}; weights {format_bytes(share)}"
        if share > budget and signals.context.model:
            certainty = Certainty.PROVEN
    return Cause(
        category="vllm_no_cache_blocks",
        certainty=certainty,
        explanation="utilisation * total - weights - activation peak - non-torch is zero or less: nothing is left for the KV cache."
        + (
            f" At utilisation {util:g} the activation peak of the profile run is what can shrink."
            if util and util >= 0.93
            else ""
        ),
        formula=formula,
    )


def startup_free_check(signals: Signals) -> Cause | None:
    """Less memory is free at start than the budget asks for."""
    event = signals.event
    if event is None or event.kind not in ("vllm_free_memory", "vllm_profile_race"):
        return None
    if event.kind == "vllm_profile_race":
        return Cause(
            category="other_process",
            certainty=Certainty.PROVEN
            if int(event.facts["free_bytes"]) > int(event.facts["initial_free_bytes"])
            else Certainty.CONSISTENT,
            explanation="another process freed or took memory on this card while vLLM was profiling",
            formula=f"free before {format_bytes(int(event.facts['initial_free_bytes']))}, after {format_bytes(int(event.facts['free_bytes']))}",
        )
    free, total, wanted = (
        int(event.facts[key]) for key in ("free_bytes", "total_bytes", "wanted_bytes")
    )
    util = float(event.facts["gpu_memory_utilization"])
    closes = abs(util * total - wanted) <= 0.011 * GiB and free < wanted
    return Cause(
        category="vllm_startup_free_check",
        certainty=Certainty.PROVEN if closes else Certainty.CONSISTENT,
        explanation=f"{format_bytes(total - free)} of the card are in use before vLLM starts: another process, "
        "a leftover of an earlier run, a desktop, or the trainer beside it.",
        formula=f"{util:g} * {format_bytes(total)} = {format_bytes(int(util * total))} wanted > {format_bytes(free)} free",
    )


def sampler_warmup(signals: Signals) -> Cause | None:
    """The sampler's warm-up with max_num_seqs rows runs after the KV cache took the budget."""
    event = signals.event
    said = event is not None and event.kind == "vllm_sampler"
    if not said and not signals.first("sampler_warmup"):
        return None
    rows = int(event.facts.get("max_num_seqs", 0)) if event else 0
    rows = rows or signals.context.number("max_num_seqs") or 0
    vocab = signals.context.vocab
    found = signals.candidate("sampler")
    formula = found.formula if found else ""
    if rows and vocab and not formula:
        size = sampler_bytes(signals.context, rows, vocab)
        formula = f"{rows:,} sequences * {vocab:,} logits, sorted: {format_bytes(size)} outside the budget"
    return Cause(
        category="vllm_sampler_warmup",
        certainty=Certainty.PROVEN
        if said or (found and not found.free_parameter)
        else Certainty.CONSISTENT,
        explanation="warming up the sampler sorts max_num_seqs x vocabulary logits; in this release that memory is outside gpu_memory_utilization.",
        formula=formula,
    )


def graph_capture(signals: Signals) -> Cause | None:
    """CUDA graphs come out of what the budget left free."""
    if not signals.first("graph_capture") or mentions_sglang(signals):
        return None
    formula = ""
    card, util = signals.card_bytes, signals.context.utilization
    if card and util:
        formula = f"outside the budget: (1 - {util:g}) * {format_bytes(card)} = {format_bytes(int((1 - util) * card))}"
    if signals.budget and signals.budget.tiny_request:
        formula = (
            "a request of at most 1 MiB prints 2.00 MiB (at most 10 MiB: 20.00 MiB): the card is full, the tensor says nothing"
            + (f"; {formula}" if formula else "")
        )
    return Cause(
        category="vllm_cuda_graphs",
        certainty=Certainty.CONSISTENT,
        explanation="the card filled up while CUDA graphs were captured; before vLLM 0.21 their pool is not inside gpu_memory_utilization.",
        formula=formula,
    )


def multimodal_profile(signals: Signals) -> Cause | None:
    """The profile run encodes the largest allowed images at once."""
    profiling = signals.first("vllm_profile") and signals.context.multimodal
    if not signals.first("mm_profile") and not profiling:
        return None
    return Cause(
        category="vllm_mm_profile",
        certainty=Certainty.CONSISTENT,
        explanation="vLLM's profile run encodes every image and video that one batch may hold, at the largest allowed resolution.",
        formula="images a prompt * sequences * tokens an image, through the vision tower at once",
    )


def prompt_logprobs(signals: Signals) -> Cause | None:
    """prompt_logprobs makes logits for every prompt token of a chunk."""
    if not signals.first("prompt_logprobs"):
        return None
    found = signals.candidate("logits", "sampler")
    return Cause(
        category="vllm_prompt_logprobs",
        certainty=Certainty.PROVEN if found and not found.free_parameter else Certainty.CONSISTENT,
        explanation="prompt_logprobs needs logits for every prompt token, not only the last: a whole chunk x vocabulary.",
        formula=found.formula if found else "",
    )


def sleeping_engine(signals: Signals) -> Cause | None:
    """Sleep mode leaves memory behind, or waking needs more than the trainer left."""
    event = signals.event
    lines = [notice for notice in signals.notices if notice.kind == "sleep_line"]
    waking = signals.first("wake_up") or (event is not None and event.kind == "cumem_oom")
    reports = event is not None and event.kind == "sleep_line"
    if not (waking or reports):
        return None
    if lines:
        used = int(lines[-1].facts["still_in_use_bytes"])
        return Cause(
            category="sleep_leftover",
            certainty=Certainty.CONSISTENT,
            explanation=f"after sleeping {format_bytes(used)} were still in use on the device (the line counts everything on the card, "
            "the trainer too): what the trainer adds until the wake-up must fit beside vLLM's whole pool.",
            formula=f"freed {format_bytes(int(lines[-1].facts['freed_bytes']))}, still in use {format_bytes(used)}",
        )
    if "resume" in signals.context.text and waking:
        return Cause(
            category="sleep_leftover",
            certainty=Certainty.CONSISTENT,
            explanation="resuming puts the optimizer state on the GPU before the engine wakes: its pool no longer fits beside it.",
        )
    return Cause(
        category="wake_up_order",
        certainty=Certainty.CONSISTENT,
        explanation="waking maps weights and KV cache back while the trainer (gathered new weights, gradients, optimizer) still holds its memory.",
        formula="peak = gathered new weights + engine weights + KV cache",
    )


ENGINE_RULES: tuple[Rule, ...] = (
    kv_too_small,
    no_cache_blocks,
    startup_free_check,
    sampler_warmup,
    graph_capture,
    multimodal_profile,
    prompt_logprobs,
    sleeping_engine,
)
