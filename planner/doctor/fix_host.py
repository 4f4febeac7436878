"""Next steps for host memory, for what is outside PyTorch's allocator, and for ranks that differ."""

from planner.doctor.cause import Signals
from planner.doctor.fix_makers import Fix, Maker, plain
from planner.doctor.state import weights_bytes

_FIRST: dict[str, tuple[str, ...]] = {
    "ray": (
        "more host memory on the node, or fewer workers on it: `ray logs raylet.out` and the list of memory users name the largest",
        "fewer CPU copies: smaller data and rollout buffers, offload of fewer states to host memory",
        "RAY_memory_usage_threshold only moves the limit; without it the kernel kills instead",
    ),
    "slurm": (
        "ask for more: #SBATCH --mem=0 (all of the node) or a larger --mem / --mem-per-cpu; `sacct -j JOB --format=MaxRSS,ReqMem` says what was used",
    ),
    "kubernetes": (
        "raise the container's resources.limits.memory (host RAM, not nvidia.com/gpu), or use less: `kubectl describe pod` shows the limit",
        "an emptyDir of medium Memory (/dev/shm) counts against the same limit",
    ),
    "systemd-oomd": (
        "run outside the killed slice (systemd-run --scope -p ManagedOOMMemoryPressure=auto), add swap, or use less host memory; `oomctl` shows the limits",
    ),
    "cgroup": (
        "raise the memory limit of the container or job (docker --memory, limits.memory, --mem)",
    ),
    "windows": (
        "a larger page file: System > Advanced > Performance > Virtual memory, on a disk with room (a reboot makes it count)",
        "num_workers=0 or 1: each worker commits the CUDA libraries once more",
    ),
}
_LOOK = (
    "read what was killed and how large it was: `dmesg -T | grep -i -E 'oom|killed process'`, and watch host memory with `free -h` while it starts",
)
_ANY = (
    "load the weights once and mapped (safetensors, low_cpu_mem_usage), not one copy a rank",
    "fewer DataLoader workers (num_workers) and no whole dataset in memory: streaming or memory-mapped files",
    "offload less to the host (optimizer, parameters, swap_space, sleep level 1), or add RAM or swap",
)


def host(signals: Signals) -> list[Fix]:
    """Return steps for the one who killed first, then those for any host."""
    killer = str(signals.event.facts.get("killer", "")) if signals.event else ""
    looks = () if killer == "windows" else _LOOK
    fixes = [Fix(change=change) for change in (*_FIRST.get(killer, ()), *looks, *_ANY)]
    weights = weights_bytes(signals.context)
    ranks = signals.context.gpus
    if weights and ranks > 1:
        at = next(index for index, fix in enumerate(fixes) if fix.change == _ANY[0])
        fixes[at] = Fix(change=_ANY[0], saved_bytes=(ranks - 1) * weights)
    return fixes


HOST: dict[str, Maker] = {
    "host_killed": host,
    "host_alloc": host,
    "host_shared_memory": plain(
        "a larger shared memory: docker run --shm-size=16g (or --ipc=host), in Kubernetes an emptyDir of medium Memory on /dev/shm",
        "fewer DataLoader workers, or num_workers=0",
        "Ray: a larger --object-store-memory, or fewer objects held at once",
    ),
    "killed": plain(
        "look for the reason: `kubectl describe pod` (Last State, Events), `docker inspect` (OOMKilled), `dmesg -T` on the node",
        "if it was memory: raise the limit of host memory; if a probe or an eviction: give it more time or a priority",
    ),
    "worker_died": plain(
        "read the dead worker's own log: `ray logs worker-ID*out`, and raylet.out on its node",
        "`dmesg -T | grep -i oom` on that node says whether the kernel killed it for host memory",
    ),
}
OUTSIDE: dict[str, Maker] = {
    "not_memory": plain(
        "mend the exception that is shown, the first of any rank; what follows it only ends the other ranks",
        "a time limit or a timeout: more time for the job, or what one rank was doing (saving, loading, evaluating) while the others waited",
        "if memory was suspected: the log above the first Traceback of each rank, or --tee 3 / log_dir of torchrun, shows more",
    ),
    "driver_refused": lambda signals: _driver(signals),
    "pinned_memory": plain(
        "DataLoader(pin_memory=False), or dataloader_pin_memory: false",
        "fewer pinned buffers: swap_space=0, no pinned offload; ulimit -l unlimited",
        "WSL: more RAM for it in .wslconfig (memory=...), or Linux itself",
    ),
    "expandable_conflict": plain(
        "take expandable_segments:True out of PYTORCH_ALLOC_CONF / PYTORCH_CUDA_ALLOC_CONF for the process with the memory saver",
    ),
    "flashinfer_workspace": plain(
        "a larger workspace: SGLANG_FLASHINFER_WORKSPACE_SIZE or FLASHINFER_WORKSPACE_SIZE (bytes), e.g. 1 GiB",
        "a smaller --chunked-prefill-size, or fewer running requests",
    ),
    "mps_full": plain(
        "a smaller batch or a shorter length; a smaller or 4-bit model",
        "close other programs and other models: they share this memory",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 lifts the limit and lets macOS swap: slow, and the machine may hang",
    ),
    "free_but_refused": lambda signals: _refused(signals),
    "contexts_on_one_gpu": plain(
        "torch.cuda.set_device(local_rank) before anything touches CUDA, and init_process_group(device_id=...)",
        "torch.load(..., map_location='cpu') (or the rank's own device) instead of the device it was saved from",
        "CUDA_VISIBLE_DEVICES of one GPU a process",
    ),
    "resume_copy": plain(
        "torch.load(path, map_location='cpu'), then load_state_dict copies to the GPU one tensor at a time",
        "del the loaded checkpoint and torch.cuda.empty_cache() before the first step",
        "resume sharded (DeepSpeed or FSDP sharded checkpoints) instead of one whole file a rank; a smaller micro-batch for the first step does not shrink this copy",
    ),
    "memory_leak": plain(
        "print torch.cuda.memory_allocated(), memory_reserved() and the batch's longest length at each step: the three series tell a leak, fragmentation and long samples apart (`vramwise explain` fits them)",
        "find what is kept: torch.cuda.memory._record_memory_history() and a snapshot at two steps (or `vramwise trace`): the blocks that only grow name their line",
        "keep numbers, not tensors: loss.item(), .detach().cpu() in logs and metrics; no reference to outputs across steps",
        "a colocated engine: give its memory back each step (sleep, free_cache_engine), and a release that mends a known leak",
    ),
    "sglang_pool_too_small": lambda signals: _pool(signals),
    "sglang_pool_full": plain(
        "fewer requests at once: a lower --max-running-requests, and a smaller --chunked-prefill-size so that a prefill takes less of the pool in one piece",
        "a larger pool: a higher --mem-fraction-static where the card has room beside it, --kv-cache-dtype fp8_e5m2, a higher --tp-size",
        "a higher --schedule-conservativeness admits requests later; cap the lengths (--context-length, max_new_tokens)",
    ),
    "sglang_cuda_graphs": plain(
        "a smaller --cuda-graph-max-bs, or --disable-cuda-graph (slower decoding)",
        "a lower --mem-fraction-static leaves more for the graphs",
    ),
    "sglang_runtime": plain(
        "a lower --mem-fraction-static (steps of 0.05): more of the card for running batches",
        "a smaller --chunked-prefill-size (4096, 2048) for prefill, --max-running-requests for decode",
        "another process on the card counts too: nvidia-smi",
    ),
}
RANKS: dict[str, Maker] = {
    "unsharded_gradients": plain(
        "sync every micro-batch: GradientAccumulationPlugin(sync_each_batch=True), FSDP2's set_requires_gradient_sync left on",
        "fewer accumulated micro-batches with a larger one",
        "a fused optimizer in the backward, or ZeRO-2/3, which divides gradients at every micro-batch",
    ),
    "reduce_scatter_copy": plain(
        "smaller units: wrap every decoder layer, and embeddings and head apart from the root (the copy is as large as a unit)",
        "a narrower copy: reduce_dtype=torch.bfloat16 (MixedPrecisionPolicy) halves one of fp32",
        "room beside it: checkpointing, or a smaller micro-batch with more accumulation",
    ),
    "communicators": plain(
        "fewer process groups: one data-parallel group where the mesh allows; groups cost buffers when they are first used",
        "smaller buffers: NCCL_BUFFSIZE=2097152 and NCCL_MAX_NCHANNELS (or NCCL_NCHANNELS_PER_NET_PEER) lower",
    ),
    "one_rank_fuller": plain(
        "look at what only this rank does: nvidia-smi on its GPU, gathering for a save or metrics, the last stage's logits",
        "pipeline: fewer layers on the first and last stage; experts: a capacity factor or better balance",
        "data: balance tokens a rank, not samples",
    ),
}


def _driver(signals: Signals) -> list[Fix]:
    owner = str(signals.event.facts.get("owner", "")) if signals.event else ""
    changes: tuple[str, ...]
    if owner == "bitsandbytes":
        changes = (
            "see with nvidia-smi and `free -h` which is full, the card or the host, and who holds it",
            "an optimizer that is not paged (adamw_8bit instead of paged_adamw_8bit), above all under WSL and Windows",
            "a smaller micro-batch or length: leave the card room outside PyTorch",
        )
    else:
        changes = (
            "leave room outside PyTorch: a smaller micro-batch, or torch.cuda.set_per_process_memory_fraction(0.95), for NCCL cannot use what PyTorch has reserved",
            "make the communicators early (one small all_reduce before the model loads)",
            "smaller NCCL buffers: NCCL_BUFFSIZE=2097152, fewer channels (NCCL_MAX_NCHANNELS)",
            "nvidia-smi: another process on one of the GPUs is enough to end all ranks",
        )
    return [Fix(change=change) for change in changes]


def _refused(signals: Signals) -> list[Fix]:
    text = signals.event.text if signals.event else ""
    if "XPU" in text:
        return [
            Fix(
                change="UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1 (UR_L0_USE_RELAXED_ALLOCATION_LIMITS before): allocations of 4 GiB and more"
            ),
            Fix(change="make single tensors smaller than 4 GiB: chunked logits, a shorter length"),
        ]
    return [
        Fix(
            change="compare with nvidia-smi at that moment: is it this GPU, and does a memory fraction limit, a MIG slice or a driver limit (WSL, unified memory) apply?"
        ),
        Fix(
            change="an engine beside the trainer (sleep pool, cumem): take it off this GPU once to see, or update it"
        ),
        Fix(change="unset set_per_process_memory_fraction and PYTORCH_ALLOC_CONF once"),
    ]


def _pool(signals: Signals) -> list[Fix]:
    event = signals.event
    share = event.facts.get("mem_fraction_static") if event else None
    now = f" (now {share})" if share else ""
    top = share is not None and float(share) >= HIGHEST
    fixes = [
        Fix(
            change=f"raise --mem-fraction-static{now}: weights and KV cache come out of this share"
        ),
        Fix(
            change="fewer weights on each GPU: a higher --tp (--tp-size), or a quantised checkpoint (fp8, AWQ)"
        ),
        Fix(change="free the card of other processes: what they hold counts against the share"),
    ]
    return fixes[1:] if top else fixes


HIGHEST = 0.95
"""Above it there is nothing left to raise."""
