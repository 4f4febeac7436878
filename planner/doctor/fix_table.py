"""Which changes belong to which cause, and the advice in circulation that does not help it."""

from planner.doctor import fix_engine as make_engine
from planner.doctor import fix_makers as make
from planner.doctor.cause import Signals
from planner.doctor.fix_host import HOST, OUTSIDE, RANKS
from planner.doctor.fix_makers import Fix, Maker


def unknown(signals: Signals) -> list[Fix]:
    """Return the next step where no cause is known: what to look at, or what to add."""
    event = signals.event
    if event is None:
        more = (
            [Fix(change="NCCL_DEBUG=INFO prints the CUDA failure behind 'unhandled cuda error'")]
            if "unhandled cuda error" in signals.context.text
            else []
        )
        return [
            *more,
            Fix(change="paste the error with its traceback, from 'Traceback' to the last line"),
            Fix(change="add --config FILE (of any tool) or --model NAME and --gpu NAME"),
        ]
    tried, card = signals.tried_bytes, signals.card_bytes
    if tried and card and tried > card:
        return [
            Fix(
                change="make this one tensor smaller: fewer rows, a shorter length, a 16-bit dtype, another attention or loss kernel"
            ),
            Fix(
                change="unified memory: give the GPU more of it (the firmware's carve-out, the GTT limit)"
            ),
        ]
    if event.cuda is not None and event.cuda.backend == "driver":
        return _driver_unknown(event.text)
    return [
        Fix(
            change="add --config FILE (of any tool) or --model and --gpu: then every tensor of the run is compared with the request"
        ),
        Fix(change="add the traceback above the message: the innermost frame names the tensor"),
        Fix(
            change="until then: a smaller micro-batch with more accumulation, gradient checkpointing, a shorter length"
        ),
    ]


def _driver_unknown(text: str) -> list[Fix]:
    """Return what to look at where the driver, or another framework's allocator, refused without a budget."""
    if text.startswith(("RESOURCE_EXHAUSTED", "Attempting to")):
        return [
            Fix(
                change="a smaller batch or length, rematerialisation (jax.checkpoint), or the model sharded over more devices"
            ),
            Fix(
                change="XLA_PYTHON_CLIENT_PREALLOCATE=false once, to see with nvidia-smi whether another process holds the card"
            ),
        ]
    return [
        Fix(
            change="nvidia-smi (rocm-smi, npu-smi, xpu-smi) at that moment: which process holds the card, and is it this GPU at all?"
        ),
        Fix(
            change="CUDA_LAUNCH_BLOCKING=1, or one batch on the CPU: an index out of range in an embedding can end as a cuBLAS refusal"
        ),
        Fix(
            change="if the card was full: a smaller batch or model; under WSL also pin_memory=False and more RAM in .wslconfig"
        ),
    ]


MAKERS: dict[str, Maker] = {
    "logits_vocab": make.logits,
    "vllm_kv_too_small": make.kv,
    "vllm_no_cache_blocks": make_engine.no_blocks,
    "vllm_lora_slots": make_engine.slots,
    "vllm_startup_free_check": make.free_check,
    "vllm_sampler_warmup": make.sampler,
    "vllm_cuda_graphs": make.graphs,
    "vllm_mm_profile": make.plain(
        "fewer images and videos a prompt: --limit-mm-per-prompt",
        "fewer pixels: --mm-processor-kwargs max_pixels on the server",
        "a lower --max-num-seqs",
        "--language-model-only if no images are served",
    ),
    "vllm_prompt_logprobs": make.plain(
        "a smaller chunk: --max-num-batched-tokens",
        "leave out prompt_logprobs where it is not needed",
    ),
    "static_state": make.static,
    "weights": make_engine.placing,
    "vllm_runtime": make_engine.running,
    "vllm_sampler": make_engine.sampling,
    "optimizer_states": make.optimizer,
    "optimizer_temp": make.optimizer,
    "full_copy_per_gpu": make.copies,
    "other_process": make.foreign,
    "fragmentation": make.fragmentation,
    "gather_full_params": make.gather,
    "save_full_state": make.saving,
    "upcast_fp32": make.plain(
        "skip prepare_model_for_kbit_training (or cast back to bf16 after it) and switch checkpointing on by hand",
        "take embed_tokens and lm_head out of the trained modules",
    ),
    "eval_accumulation": make.plain(
        "eval_accumulation_steps=1: logits move to host memory",
        "preprocess_logits_for_metrics: keep predictions instead of logits",
        "a smaller per_device_eval_batch_size",
    ),
    "host_full_copy_per_rank": make.plain(
        "load on rank 0 only: fsdp_cpu_ram_efficient_loading with sync_module_states, or zero.Init before from_pretrained",
        "low_cpu_mem_usage=True and safetensors (mapped, not read)",
        "fewer ranks a node while loading",
    ),
    "host_pinned_swap": make.plain(
        "swap_space=0 (or 4)", "sleep level 2, or a release that frees the copy after waking"
    ),
    "sleep_leftover": make.plain(
        "offload the trainer's weights and optimizer while the engine is awake (offload_model, offload_optimizer)",
        "a lower vllm_gpu_memory_utilization",
        "sleep level 1 or 2 where it is 0",
    ),
    "wake_up_order": make_engine.waking,
    "attention_quadratic": make.plain(
        "flash attention (attn_implementation=flash_attention_2), or a head size that sdpa's fast kernels take",
        "a shorter length: the cost is quadratic",
    ),
    "kv_cache": make.plain(
        "a shorter context, or fewer sequences at once", "a 4-bit model", "a paged engine (vLLM)"
    ),
    "generation_batch": make.plain(
        "fewer steps_per_generation, or a smaller effective batch",
        "a vLLM engine instead of model.generate",
    ),
    "longest_sample": make.plain(
        "cap or filter the length (vramwise plan --lengths FILE says where)",
        "run the longest sample first",
        "a token budget instead of a fixed batch",
    ),
    "activations": make.plain(
        "gradient checkpointing",
        "a smaller micro-batch with more accumulation",
        "a shorter length",
        "flash attention",
    ),
    **HOST,
    **OUTSIDE,
    **RANKS,
    "default_changed": make.plain(
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
