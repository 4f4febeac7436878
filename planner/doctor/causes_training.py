"""Rules for training: budget arithmetic first, then the tensor, then what the stack says."""

import re
from collections.abc import Callable

from planner.doctor.budget import foreign_bytes, ordinary
from planner.doctor.candidates import implied_tokens
from planner.doctor.cause import Cause, Certainty, Signals
from planner.doctor.causes_state import (
    does_not_fit,
    gathered,
    optimizer_states,
    optimizer_temp,
    saving,
    upcast,
    whole_model,
)
from planner.doctor.state import static_state
from planner.units import GiB, format_bytes

Rule = Callable[[Signals], Cause | None]
_VERSIONS = re.compile(
    r"(?<![\d.])(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)\s{0,4}(?:is |was )?(?:ok\b|works?\b|worked|fine)[^.\n]{0,40}?(\d+\.\d+(?:\.\d+)?)\s*(?:\w+ ){0,2}(?:OOM|fails?|out of memory)",
    re.IGNORECASE,
)
LARGEST_CONTEXTS = 3
"""Times the most that public messages show beside the allocator."""
_TWO_POINTS = re.compile(r"\b(\d{1,4})\s*[:=]\s*(\d+(?:\.\d+)?) ?(?:GB|GiB)\b")


def outside_allocator(signals: Signals) -> Cause | None:
    """The driver refused memory to something else than PyTorch's allocator."""
    event = signals.event
    if event is None or event.cuda is None or event.cuda.backend != "driver" or signals.phases:
        return None
    return Cause(
        category="unknown",
        certainty=Certainty.UNKNOWN,
        explanation="no sizes are printed: the driver refused memory to a context, a cuBLAS or NCCL workspace or a kernel. The card was full "
        "(nvidia-smi says with what), or, before the first step, held by another process.",
    )


def shape_bug(signals: Signals) -> Cause | None:
    """A request of several times the card is a wrong dimension, not a tuning problem."""
    tried, card = signals.tried_bytes, signals.card_bytes
    if not tried or not card or tried < 3 * card:
        return None
    lead = signals.candidates[0] if signals.candidates else None
    if lead is not None and lead.kind == "attention":
        return Cause(
            category="attention_quadratic",
            certainty=Certainty.CONSISTENT,
            explanation="attention scores of length x length for every head and row have this size: eager attention at the full length.",
            formula=lead.formula,
        )
    return Cause(
        category="unknown",
        certainty=Certainty.UNKNOWN,
        explanation=f"one tensor of {tried / card:.1f} times the card is most likely a shape bug (a length taken from the config, a missing mask) or attention scores at a full length: look at the dimensions in the innermost frame before tuning anything.",
        formula=f"{format_bytes(tried)} / {format_bytes(card)} = {tried / card:.1f}",
    )


def other_process(signals: Signals) -> Cause | None:
    """Somebody else's memory is what is missing."""
    budget = signals.budget
    if (
        budget is None
        or budget.total_bytes is None
        or signals.event is None
        or signals.event.kind != "cuda_oom"
        or signals.event.text.startswith("MPS")  # one memory for all programs: `mps_full` says it
    ):
        return None
    foreign = foreign_bytes(budget)
    needed = budget.shortfall_bytes or 0
    if foreign < max(GiB + GiB // 2, budget.total_bytes // 12) or foreign < needed:
        return None
    listed = signals.event.cuda is not None and bool(signals.event.cuda.others_bytes)
    formula = f"total - free - allocated - unused = {format_bytes(budget.unaccounted_bytes or foreign)}; {format_bytes(foreign)} are not this process's"
    graphs = "private_bytes" in signals.event.facts and signals.has("backward", "forward")
    shared = signals.context.colocated or (
        not listed and (signals.context.task == "grpo" or graphs)
    )
    if shared:
        return Cause(
            category="sleep_leftover",
            certainty=Certainty.CONSISTENT,
            explanation=f"{format_bytes(foreign)} on the card belong to another allocator: the colocated engine (asleep or not), or another process.",
            formula=formula,
        )
    return Cause(
        category="other_process",
        # by subtraction alone it may be this process's own context (HIP's kernels, NCCL)
        certainty=Certainty.PROVEN
        if listed or _beyond_any_context(signals, foreign)
        else Certainty.CONSISTENT,
        explanation=f"{format_bytes(foreign)} on the card are held by other processes; without them the request would have fit.",
        formula=formula,
    )


def _beyond_any_context(signals: Signals, foreign: int) -> bool:
    """Return whether no process's own context, graphs and communicators are that large."""
    text = signals.event.text if signals.event else ""
    return "CUDA" in text and foreign > LARGEST_CONTEXTS * int(ordinary("context_bytes"))


def default_changed(signals: Signals) -> Cause | None:
    """The same file worked in another version: a default flipped."""
    match = _VERSIONS.search(signals.context.text)
    if match is None:
        return None
    return Cause(
        category="default_changed",
        certainty=Certainty.CONSISTENT,
        explanation=f"{match.group(1)} worked and {match.group(2)} does not: a memory default changed between them (checkpointing, dtype, fused loss, engine share).",
    )


def vocabulary(signals: Signals) -> Cause | None:
    """A tensor of tokens x vocabulary."""
    found = signals.candidate("logits")
    if not signals.first("vocab") and not (
        found
        and found is signals.candidates[0]
        and not found.free_parameter
        and not signals.first("load", "save", "gather")
    ):
        return None
    tried, vocab = signals.tried_bytes, signals.context.vocab
    formula = found.formula if found else ""
    explanation = "a tensor of tokens x vocabulary (logits, log-probs or their gradient) is what did not fit; several copies of it live at once in forward and backward."
    proven = signals.first("vocab") and bool(
        found and not found.free_parameter and found is signals.candidates[0]
    )
    if tried and vocab and tried > 20 * 2**20:
        tokens = implied_tokens(tried, vocab)
        implied = f"{tokens['fp32']:,} tokens in fp32 or {tokens['bf16']:,} in 16 bit at a vocabulary of {vocab:,}"
        formula = f"{formula}; {implied}" if formula else implied
        explanation += _token_mismatch(signals, tokens)
    return Cause(
        category="logits_vocab",
        certainty=Certainty.PROVEN if proven else Certainty.CONSISTENT,
        explanation=explanation,
        formula=formula,
    )


def _token_mismatch(signals: Signals, tokens: dict[str, int]) -> str:
    """Say so when the request holds far more tokens than the stated batch."""
    batch, length = signals.context.number("batch"), signals.context.number("length")
    if not length:
        return ""
    stated = (batch or 1) * length
    ratio = tokens["fp32"] / stated
    return (
        f" It holds {ratio:.1f} times the stated {stated:,} tokens: the configured length does not bound this batch."
        if ratio > 1.5
        else ""
    )


def evaluation(signals: Signals) -> Cause | None:
    """The evaluation loop keeps all logits on the GPU."""
    if not signals.first("eval_accumulate"):
        return None
    return Cause(
        category="eval_accumulation",
        certainty=Certainty.CONSISTENT,
        explanation="the evaluation loop concatenates the logits of the whole set on the GPU: the buffer grows with the samples, not with the batch.",
        formula="samples * sequence * vocabulary (or classes) * 4 B",
    )


def attention(signals: Signals) -> Cause | None:
    """Scores or masks of length x length."""
    found = signals.candidate("attention")
    if not signals.first("attention"):
        return None
    return Cause(
        category="attention_quadratic",
        certainty=Certainty.PROVEN
        if found and not found.free_parameter and found is signals.candidates[0]
        else Certainty.CONSISTENT,
        explanation="attention scores or a mask of length x length are held: eager attention, or sdpa that fell back to its math kernel (head_dim over 256, a dense mask).",
        formula=found.formula if found else "batch * heads * length^2 * bytes",
    )


def kv_concat(signals: Signals) -> Cause | None:
    """The dense KV cache grows by concatenation."""
    if not signals.first("kv_concat"):
        return None
    tiny = signals.budget is not None and signals.budget.tiny_request
    return Cause(
        category="kv_cache",
        certainty=Certainty.CONSISTENT,
        explanation="the dense KV cache is copied to grow by one token; the card was full.",
        formula="1 MiB < request < 10 MiB prints 20.00 MiB" if tiny else "",
    )


def churn(signals: Signals) -> Cause | None:
    """Blocks that do not fit the holes left by offloading and reloading, or plain fragmentation."""
    budget = signals.budget
    decides = budget is not None and budget.fragmentation_decides
    holes = (
        budget is not None
        and not budget.had_room
        and budget.unallocated_bytes
        and budget.requested_bytes
        and budget.unallocated_bytes > 0.8 * budget.requested_bytes
        and budget.unallocated_bytes > 2 * GiB
    )
    if not (decides or holes or signals.first("reload")):
        return None
    return Cause(
        category="fragmentation",
        certainty=Certainty.CONSISTENT,  # what filled the card besides is another question
        explanation="memory that PyTorch has reserved is free but in pieces too small for the request.",
        formula=budget.fragmentation_sentence() if budget else "",
    )


def generation(signals: Signals) -> Cause | None:
    """All completions of a step are generated at once."""
    if not signals.first("generation"):
        return None
    return Cause(
        category="generation_batch",
        certainty=Certainty.CONSISTENT,
        explanation="completions of the whole effective batch are generated at once: halving the micro-batch and doubling accumulation leaves this peak as it is.",
        formula="rows = per-device batch * steps per generation",
    )


def two_points(signals: Signals) -> Cause | None:
    """Two batch sizes with their memory give the static part and the part of a sample."""
    points = sorted(
        {
            int(batch): float(used) for batch, used in _TWO_POINTS.findall(signals.context.text)
        }.items()
    )
    if signals.event is not None or len(points) < 2:
        return None
    (first, low), (second, high) = points[0], points[-1]
    if second <= first or high <= low:
        return None
    sample = (high - low) / (second - first)
    return Cause(
        category="activations",
        certainty=Certainty.CONSISTENT,  # a line goes through any two points
        explanation=f"{sample:.1f} GB a sample over {low - first * sample:.1f} GB that do not depend on the batch.",
        formula=f"({high:g} - {low:g}) / ({second} - {first}) = {sample:.1f} GB a sample; {low:g} - {first} * {sample:.1f} = {low - first * sample:.1f} GB static",
    )


def longest_sample(signals: Signals) -> Cause | None:
    """It ran for a while, so the batch was the unlucky one."""
    if not signals.first("late_step"):
        return None
    return Cause(
        category="longest_sample",
        certainty=Certainty.CONSISTENT,
        explanation="steps before it ran: a longer sample came along than any before (dynamic padding follows the longest).",
    )


def activations(signals: Signals) -> Cause | None:
    """Static state fits, so what grows with the batch does not."""
    state, card = static_state(signals.context), signals.card_bytes
    if not signals.has("backward", "forward", "mlp") and signals.candidate("activation") is None:
        return None
    fits = bool(state and card and state.high_bytes < card and signals.context.method)
    found = signals.candidates[0] if signals.candidates else None
    return Cause(
        category="activations",
        certainty=Certainty.CONSISTENT if fits else Certainty.UNKNOWN,
        explanation="the static state fits; activations of the micro-batch fill the rest of the card."
        if fits
        else "activations are the usual growth here, but the text does not say enough to prove it.",
        formula="; ".join(
            filter(None, (state.formula if state and fits else "", found.formula if found else ""))
        ),
    )


def large_tensor(signals: Signals) -> Cause | None:
    """A single tensor of GiBs while training: hardly anything but the vocabulary makes one."""
    tried, vocab = signals.tried_bytes, signals.context.vocab
    if not tried or not vocab or tried < GiB:
        return None
    if signals.candidate("weight", "layer", "attention", "partition", "model"):
        return None
    tokens = implied_tokens(tried, vocab)
    return Cause(
        category="logits_vocab",
        certainty=Certainty.CONSISTENT,
        explanation="no weight or layer of the model has this size; a tensor of tokens x vocabulary does.",
        formula=f"{tokens['fp32']:,} tokens in fp32 or {tokens['bf16']:,} in 16 bit at a vocabulary of {vocab:,}",
    )


def larger_than_card(signals: Signals) -> Cause | None:
    """One tensor that no empty card of this size holds."""
    tried, card = signals.tried_bytes, signals.card_bytes
    if not tried or not card or tried <= card:
        return None
    return Cause(
        category="unknown",
        certainty=Certainty.UNKNOWN,
        explanation="this one tensor is larger than the whole card: nothing but making it smaller helps (length, rows, another attention or loss kernel).",
        formula=f"{format_bytes(tried)} > {format_bytes(card)}",
    )


def own_tensors(signals: Signals) -> Cause | None:
    """This process's own tensors are the largest part of the card, and nothing says which they are."""
    budget = signals.budget
    if (
        budget is None
        or not budget.allocated_bytes
        or not budget.total_bytes
        or budget.allocated_bytes > budget.total_bytes
    ):
        return None
    share = budget.allocated_bytes / budget.total_bytes
    if budget.allocated_bytes < max(size for name, size in budget.rows() if name != "total"):
        return None
    return Cause(
        category="unknown",
        certainty=Certainty.UNKNOWN,
        explanation=f"this process's own tensors hold {share:.0%} of the card; which they are needs the stack trace, the model and the method (--config, --model).",
    )


TRAINING_RULES: tuple[Rule, ...] = (
    outside_allocator,
    shape_bug,
    other_process,
    default_changed,
    upcast,
    vocabulary,
    optimizer_temp,
    optimizer_states,
    saving,
    evaluation,
    whole_model,
    gathered,
    attention,
    kv_concat,
    does_not_fit,
    two_points,
    large_tensor,
    churn,
    generation,
    longest_sample,
    activations,
    larger_than_card,
    own_tensors,
)
