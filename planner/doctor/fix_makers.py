"""One maker a cause: the changes that help, in order, with the bytes each saves."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.doctor.cause import Signals
from planner.doctor.state import sampler_bytes, saved_bytes, weights_bytes
from planner.run.recipe import Method, Optimizer, Sharding
from planner.units import format_bytes

EXPANDABLE = (
    "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9)"
)


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change and the bytes it takes off the peak; None = cannot be said from what is known."""

    change: str
    saved_bytes: int | None = None
    formula: str = ""


Maker = Callable[[Signals], list[Fix]]


def plain(*changes: str) -> Maker:
    """Return a maker of fixes whose bytes cannot be said from a message."""
    return lambda _signals: [Fix(change=change) for change in changes]


def logits(signals: Signals) -> list[Fix]:
    """A tensor of tokens x vocabulary: fuse the loss, then fewer or shorter rows."""
    tried = signals.tried_bytes
    batch, tokens = signals.context.number("batch"), ""
    if tried and signals.context.vocab:
        tokens = f"{format_bytes(tried)} is only one of several copies (16 B per logit live in forward and backward)"
    fixes = [
        Fix(
            change="a fused or chunked loss (Liger, cut cross-entropy, TRL >= 1.0's fused head, vramwise): logits are never whole",
            saved_bytes=tried,
            formula=tokens,
        )
    ]
    if batch and batch > 1:
        saved = tried * (batch - batch // 2) // batch if tried else None
        fixes.append(
            Fix(
                change=f"micro-batch {batch} -> {batch // 2} with twice the accumulation",
                saved_bytes=saved,
            )
        )
    length = signals.context.number("length")
    saved = tried // 2 if tried else None
    fixes.append(
        Fix(
            change=f"cap the length at {length // 2:,} tokens"
            if length
            else "a shorter maximum length, or a token budget for dynamic batches",
            saved_bytes=saved,
        )
    )
    if signals.context.task == "grpo":
        fixes.append(
            Fix(
                change="compute log-probs in chunks (logprob_chunk_size, entropy_from_logits_with_chunking), without an fp32 copy of all logits"
            )
        )
    return fixes


def kv(signals: Signals) -> list[Fix]:
    """Exactly what max_model_len or utilisation would start."""
    event = signals.event
    if event is None:
        return [Fix(change="lower max_model_len")]
    facts = event.facts
    length = int(facts["max_seq_len"])
    fixes: list[Fix] = []
    if "needed_bytes" in facts:
        need, have = int(facts["needed_bytes"]), int(facts["available_bytes"])
        fits = int(facts.get("estimated_len", have * length // need // 16 * 16))
        fixes.append(
            Fix(
                change=f"--max-model-len {fits} (what the available KV cache holds for one request)",
                saved_bytes=need - have,
                formula=f"{format_bytes(have)} / ({format_bytes(need)} / {length:,})",
            )
        )
        card = signals.card_bytes or signals.vllm.total_bytes
        util = signals.context.utilization or signals.vllm.gpu_memory_utilization
        if card and util and util + (need - have) / card <= 0.98:
            wanted = util + (need - have) / card
            fixes.append(
                Fix(
                    change=f"--gpu-memory-utilization {int(wanted * 1000 + 1) / 1000:g} (now {util:g}) keeps the length",
                    formula=f"{util:g} + {format_bytes(need - have)} / {format_bytes(card)}",
                )
            )
        fixes.append(
            Fix(change="--kv-cache-dtype fp8 if the cache is 16 bit", saved_bytes=need // 2)
        )
    else:
        fixes.append(Fix(change=f"--max-model-len {int(facts['kv_tokens'])} or less"))
        fixes.append(Fix(change="a higher --gpu-memory-utilization if it is below 0.95"))
    fixes.append(
        Fix(
            change="a lower --max-num-batched-tokens: a smaller profile peak leaves more for the KV cache"
        )
    )
    return fixes


def free_check(signals: Signals) -> list[Fix]:
    """Free the card, or the share that starts."""
    event = signals.event
    if event is None or "wanted_bytes" not in event.facts:
        return [Fix(change="free the card of other processes")]
    free, total, want = (
        int(event.facts[key]) for key in ("free_bytes", "total_bytes", "wanted_bytes")
    )
    util = int(100 * free / total) / 100
    fixes = [
        Fix(
            change="end what else uses the card (nvidia-smi lists it; leftovers of a crashed run too)",
            saved_bytes=want - free,
        )
    ]
    if util > 0.1:
        fixes.append(
            Fix(
                change=f"--gpu-memory-utilization {util:g} or less",
                saved_bytes=want - int(util * total),
                formula=f"{format_bytes(free)} / {format_bytes(total)} = {free / total:.3f}",
            )
        )
    return fixes


def sampler(signals: Signals) -> list[Fix]:
    """Fewer sequences, or room outside the budget."""
    rows, vocab = signals.context.number("max_num_seqs") or 1024, signals.context.vocab
    saved = sampler_bytes(signals.context, rows - rows // 4, vocab) if vocab else None
    return [
        Fix(
            change=f"--max-num-seqs {max(1, rows // 4)} (now {rows})",
            saved_bytes=saved,
            formula="the sampler's sort buffers of sequences x vocabulary",
        ),
        Fix(change="a LOWER --gpu-memory-utilization: the warm-up needs room outside the budget"),
    ]


def graphs(signals: Signals) -> list[Fix]:
    """Room outside the budget, or no graphs."""
    util, card = signals.context.utilization, signals.card_bytes
    step = Fix(
        change="a LOWER --gpu-memory-utilization leaves more outside the budget",
        saved_bytes=int(0.05 * card) if card else None,
        formula="0.05 * total" if card else "",
    )
    if util:
        step = Fix(
            change=f"--gpu-memory-utilization {max(0.05, util - 0.05):.2f} (now {util:g})",
            saved_bytes=step.saved_bytes,
            formula=step.formula,
        )
    return [
        step,
        Fix(change="a lower --max-num-seqs: fewer graph sizes"),
        Fix(change="--enforce-eager: no graphs, slower decoding"),
    ]


def static(signals: Signals) -> list[Fix]:
    """Smaller or sharded states."""
    context = signals.context
    fixes: list[Fix] = []
    if context.method == "full":
        fixes.append(
            _planned("8-bit AdamW", saved_bytes(context, optimizer=Optimizer.ADAMW_8BIT), "states")
        )
        fixes.append(
            _planned("LoRA instead of full fine-tuning", saved_bytes(context, method=Method.LORA))
        )
    if context.method in ("lora", "full", ""):
        fixes.append(_planned("a 4-bit base (QLoRA)", saved_bytes(context, method=Method.QLORA)))
    if context.sharding in ("", "none", "ddp", "zero1", "zero2"):
        change = "shard weights, gradients and optimizer over the GPUs: ZeRO-3 or FSDP full shard"
        shared = saved_bytes(context, sharding=Sharding.ZERO3) if context.gpus > 1 else None
        fixes.append(_planned(change, shared))
    fixes.append(Fix(change="offload the optimizer to host memory"))
    return fixes


def _planned(change: str, saved: int | None, what: str = "static state") -> Fix:
    """Return a fix with the planner's saving of it."""
    if not saved or saved < 0:
        return Fix(change=change)
    return Fix(change=change, saved_bytes=saved, formula=f"the plan's {what} without and with it")


def optimizer(signals: Signals) -> list[Fix]:
    """Smaller optimizer states or none of its temporaries."""
    context = signals.context
    method = {} if context.method else {"method": Method.FULL}
    return [
        _planned(
            "8-bit or paged AdamW",
            saved_bytes(context, **method, optimizer=Optimizer.ADAMW_8BIT),
            "states",
        ),
        Fix(
            change="a fused optimizer (adamw_torch_fused) or foreach=False: no parameter-sized temporaries",
        ),
        Fix(change="offload the optimizer, or shard it over more ranks"),
    ]


def copies(signals: Signals) -> list[Fix]:
    """Shard before loading."""
    weights, ranks = weights_bytes(signals.context), signals.context.gpus
    saved = weights - weights // ranks if weights and ranks > 1 else None
    return [
        Fix(
            change="make sharding active before the model loads: create TrainingArguments with the ZeRO-3 config (zero.Init) or the FSDP plugin BEFORE from_pretrained",
            saved_bytes=saved,
        ),
        Fix(change="do not call .to(device) or .cuda() on a sharded model"),
        Fix(change="for predict or evaluate: one process with device_map, a 4-bit copy, or vLLM"),
    ]


def foreign(signals: Signals) -> list[Fix]:
    """Free the card of others."""
    budget = signals.budget
    held = (budget.other_bytes or budget.unaccounted_bytes) if budget else None
    return [
        Fix(
            change="free the card: nvidia-smi lists the processes; containers hide them",
            saved_bytes=held,
        ),
        Fix(change="fewer workers or engines on this card, or another card (CUDA_VISIBLE_DEVICES)"),
    ]


def fragmentation(signals: Signals) -> list[Fix]:
    """Segments that grow, or fewer sizes."""
    held = signals.budget.unallocated_bytes if signals.budget else None
    return [
        Fix(
            change=EXPANDABLE,
            saved_bytes=held,
            formula="all that is reserved but unallocated" if held else "",
        ),
        Fix(change="fewer different lengths: bucket or pad to multiples"),
    ]


def gather(signals: Signals) -> list[Fix]:
    """Generate without gathering."""
    weights, ranks = weights_bytes(signals.context), signals.context.gpus
    saved = weights - weights // ranks if weights and ranks > 1 else None
    return [
        Fix(change="generate with vLLM instead of gathering the sharded model", saved_bytes=saved),
        Fix(change="ds3_gather_for_generation=False (slow)", saved_bytes=saved),
        Fix(change=EXPANDABLE),
    ]


def saving(signals: Signals) -> list[Fix]:
    """Save from host memory."""
    weights = weights_bytes(signals.context)
    return [
        Fix(
            change="FullStateDictConfig(offload_to_cpu=True, rank0_only=True), or SHARDED_STATE_DICT",
            saved_bytes=2 * weights if weights else None,
        ),
        Fix(change="save only the adapter"),
    ]
