"""What to change, in order, with the bytes each saves, and the advice that would not help."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.doctor.cause import Cause, Signals, static_state, weights_bytes
from planner.units import GiB, format_bytes

EXPANDABLE = (
    "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9)"
)


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change and the bytes it takes off the peak; None = cannot be said from what is known."""

    change: str
    saved_bytes: int | None = None
    formula: str = ""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Fixes in order, and warnings against advice in circulation for this case."""

    fixes: tuple[Fix, ...]
    warnings: tuple[str, ...]


Maker = Callable[[Signals], list[Fix]]


def _plain(*changes: str) -> Maker:
    return lambda _signals: [Fix(change=change) for change in changes]


def _logits(signals: Signals) -> list[Fix]:
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


def _kv(signals: Signals) -> list[Fix]:
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


def _free_check(signals: Signals) -> list[Fix]:
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


def _sampler(signals: Signals) -> list[Fix]:
    rows, vocab = signals.context.number("max_num_seqs") or 1024, signals.context.vocab
    saved = 28 * (rows - rows // 4) * vocab if vocab else None
    return [
        Fix(
            change=f"--max-num-seqs {max(1, rows // 4)} (now {rows})",
            saved_bytes=saved,
            formula="about 28 B * sequences * vocabulary",
        ),
        Fix(change="a LOWER --gpu-memory-utilization: the warm-up needs room outside the budget"),
    ]


def _graphs(signals: Signals) -> list[Fix]:
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


def _static(signals: Signals) -> list[Fix]:
    context, state = signals.context, static_state(signals.context)
    fixes: list[Fix] = []
    params = context.parameters
    if context.method == "full" and params:
        share = max(1, context.gpus if context.sharding in ("zero3", "fsdp") else 1)
        fixes.append(
            Fix(
                change="8-bit AdamW",
                saved_bytes=6 * params // share,
                formula="8 -> 2 B a parameter",
            )
        )
        fixes.append(
            Fix(
                change="LoRA instead of full fine-tuning",
                saved_bytes=(state.high_bytes - 2 * params // share) if state else None,
            )
        )
    if context.method in ("lora", "full", "") and params:
        fixes.append(
            Fix(
                change="a 4-bit base (QLoRA)",
                saved_bytes=int(1.45 * params),
                formula="2 -> 0.55 B a parameter",
            )
        )
    if context.sharding in ("", "none", "ddp", "zero1", "zero2"):
        fixes.append(
            Fix(
                change="shard weights, gradients and optimizer over the GPUs: ZeRO-3 or FSDP full shard"
            )
        )
    fixes.append(Fix(change="offload the optimizer to host memory"))
    return fixes


def _optimizer(signals: Signals) -> list[Fix]:
    params = signals.context.parameters
    share = signals.context.gpus if signals.context.sharding.startswith(("zero", "fsdp")) else 1
    return [
        Fix(
            change="8-bit or paged AdamW",
            saved_bytes=6 * params // share if params else None,
            formula="8 -> 2 B a parameter" if params else "",
        ),
        Fix(
            change="a fused optimizer (adamw_torch_fused) or foreach=False: no parameter-sized temporaries",
            saved_bytes=2 * params // share if params else None,
        ),
        Fix(change="offload the optimizer, or shard it over more ranks"),
    ]


def _copies(signals: Signals) -> list[Fix]:
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


def _foreign(signals: Signals) -> list[Fix]:
    budget = signals.budget
    held = (budget.other_bytes or budget.unaccounted_bytes) if budget else None
    return [
        Fix(
            change="free the card: nvidia-smi lists the processes; containers hide them",
            saved_bytes=held,
        ),
        Fix(change="fewer workers or engines on this card, or another card (CUDA_VISIBLE_DEVICES)"),
    ]


def _fragmentation(signals: Signals) -> list[Fix]:
    held = signals.budget.unallocated_bytes if signals.budget else None
    return [
        Fix(
            change=EXPANDABLE,
            saved_bytes=held,
            formula="all that is reserved but unallocated" if held else "",
        ),
        Fix(change="fewer different lengths: bucket or pad to multiples"),
    ]


def _gather(signals: Signals) -> list[Fix]:
    weights, ranks = weights_bytes(signals.context), signals.context.gpus
    saved = weights - weights // ranks if weights and ranks > 1 else None
    return [
        Fix(change="generate with vLLM instead of gathering the sharded model", saved_bytes=saved),
        Fix(change="ds3_gather_for_generation=False (slow)", saved_bytes=saved),
        Fix(change=EXPANDABLE),
    ]


def _saving(signals: Signals) -> list[Fix]:
    weights = weights_bytes(signals.context)
    return [
        Fix(
            change="FullStateDictConfig(offload_to_cpu=True, rank0_only=True), or SHARDED_STATE_DICT",
            saved_bytes=2 * weights if weights else None,
        ),
        Fix(change="save only the adapter"),
    ]


MAKERS: dict[str, Maker] = {
    "logits_vocab": _logits,
    "vllm_kv_too_small": _kv,
    "vllm_no_cache_blocks": _plain(
        "a HIGHER --gpu-memory-utilization if it is below 0.95",
        "a lower --max-model-len and --max-num-batched-tokens: the profile peak shrinks",
        "a quantised checkpoint, or --tensor-parallel-size 2",
        "--limit-mm-per-prompt or --skip-mm-profiling for vision models",
    ),
    "vllm_startup_free_check": _free_check,
    "vllm_sampler_warmup": _sampler,
    "vllm_cuda_graphs": _graphs,
    "vllm_mm_profile": _plain(
        "fewer images and videos a prompt: --limit-mm-per-prompt",
        "fewer pixels: --mm-processor-kwargs max_pixels on the server",
        "a lower --max-num-seqs",
        "--language-model-only if no images are served",
    ),
    "vllm_prompt_logprobs": _plain(
        "a smaller chunk: --max-num-batched-tokens",
        "leave out prompt_logprobs where it is not needed",
    ),
    "static_state": _static,
    "weights": _static,
    "optimizer_states": _optimizer,
    "optimizer_temp": _optimizer,
    "full_copy_per_gpu": _copies,
    "other_process": _foreign,
    "fragmentation": _fragmentation,
    "gather_full_params": _gather,
    "save_full_state": _saving,
    "upcast_fp32": _plain(
        "skip prepare_model_for_kbit_training (or cast back to bf16 after it) and switch checkpointing on by hand",
        "take embed_tokens and lm_head out of the trained modules",
    ),
    "eval_accumulation": _plain(
        "eval_accumulation_steps=1: logits move to host memory",
        "preprocess_logits_for_metrics: keep predictions instead of logits",
        "a smaller per_device_eval_batch_size",
    ),
    "host_full_copy_per_rank": _plain(
        "load on rank 0 only: fsdp_cpu_ram_efficient_loading with sync_module_states, or zero.Init before from_pretrained",
        "low_cpu_mem_usage=True and safetensors (mapped, not read)",
        "fewer ranks a node while loading",
    ),
    "host_pinned_swap": _plain(
        "swap_space=0 (or 4)", "sleep level 2, or a release that frees the copy after waking"
    ),
    "sleep_leftover": _plain(
        "offload the trainer's weights and optimizer while the engine is awake (offload_model, offload_optimizer)",
        "a lower vllm_gpu_memory_utilization",
        "sleep level 1 or 2 where it is 0",
    ),
    "wake_up_order": _plain(
        "wake in two steps: wake_up(tags=['weights']), load and free the new weights, then wake_up(tags=['kv_cache'])",
        "a lower vllm_gpu_memory_utilization",
    ),
    "attention_quadratic": _plain(
        "flash attention (attn_implementation=flash_attention_2), or a head size that sdpa's fast kernels take",
        "a shorter length: the cost is quadratic",
    ),
    "kv_cache": _plain(
        "a shorter context, or fewer sequences at once", "a 4-bit model", "a paged engine (vLLM)"
    ),
    "generation_batch": _plain(
        "fewer steps_per_generation, or a smaller effective batch",
        "a vLLM engine instead of model.generate",
    ),
    "longest_sample": _plain(
        "cap or filter the length (vramwise plan --lengths FILE says where)",
        "run the longest sample first",
        "a token budget instead of a fixed batch",
    ),
    "activations": _plain(
        "gradient checkpointing",
        "a smaller micro-batch with more accumulation",
        "a shorter length",
        "flash attention",
    ),
    "default_changed": _plain(
        "set the changed key by hand: gradient_checkpointing, dtype, loss head and engine share first"
    ),
}

WRONG: dict[str, tuple[str, ...]] = {
    "vllm_kv_too_small": (
        "lowering gpu_memory_utilization makes it worse",
        "--max-tokens is not --max-model-len; editing max_position_embeddings changes nothing",
    ),
    "vllm_no_cache_blocks": ("lowering gpu_memory_utilization is the wrong direction",),
    "vllm_sampler_warmup": (
        "raising gpu_memory_utilization makes it worse: this memory is outside the budget",
    ),
    "vllm_cuda_graphs": ("raising gpu_memory_utilization makes it worse",),
    "static_state": ("a smaller batch, a shorter length or more GPUs under plain DDP cannot help",),
    "weights": ("a smaller batch cannot help",),
    "optimizer_states": ("a smaller batch cannot help: this is allocated before it",),
    "full_copy_per_gpu": (
        "more GPUs add copies instead of room while sharding is off",
        "LLaMA-Factory's predict ignores DeepSpeed",
    ),
    "host_full_copy_per_rank": ("more GPUs add copies: host memory gets shorter",),
    "logits_vocab": (
        "torch.cuda.empty_cache() cannot make room for one tensor of this size",
        "lowering a vLLM share on another GPU changes nothing here",
    ),
    "generation_batch": (
        "halving the batch and doubling accumulation leaves the generation peak as it is",
    ),
    "other_process": ("expandable_segments does not free what others hold",),
    "upcast_fp32": ("the layer norms are a MiB: it is embed_tokens and lm_head that grew",),
    "vllm_mm_profile": (
        "max_pixels in the client's processor does not change the server's profile run",
    ),
    "longest_sample": ("the mean length says nothing: look at the longest batch",),
}


def advise(cause: Cause, signals: Signals) -> Advice:
    """Return fixes and warnings for the leading cause."""
    maker = MAKERS.get(cause.category)
    fixes = maker(signals) if maker else []
    warnings = list(WRONG.get(cause.category, ()))
    util = signals.context.utilization
    if cause.category == "vllm_no_cache_blocks" and util and util >= 0.93:
        fixes = [fix for fix in fixes if "HIGHER" not in fix.change]
        warnings.append(f"raising gpu_memory_utilization is no way out at {util:g}")
    budget = signals.budget
    if (
        budget
        and budget.unallocated_bytes is not None
        and not budget.fragmentation_decides
        and cause.category != "fragmentation"
    ):
        warnings.append(
            "the hint about expandable_segments is printed always; here it would not have made room"
        )
        fixes = [fix for fix in fixes if fix.change != EXPANDABLE]
    elif budget and budget.fragmentation_decides and cause.category != "fragmentation":
        fixes.append(Fix(change=EXPANDABLE, saved_bytes=budget.unallocated_bytes))
    if signals.context.colocated and any(fix.change == EXPANDABLE for fix in fixes):
        warnings.append(
            "expandable_segments conflicts with CUDA-IPC weight sync and with vLLM's older sleep mode"
        )
    if cause.category == "logits_vocab" and (signals.tried_bytes or 0) < GiB // 8:
        warnings = [warning for warning in warnings if "empty_cache" not in warning]
    return Advice(fixes=tuple(fixes), warnings=tuple(warnings))
