"""Changes to a vLLM engine, with its adapter slots' bytes from the plan."""

from planner.doctor.cause import Signals
from planner.doctor.causes_serving import serves_vllm
from planner.doctor.causes_sglang import serves_sglang
from planner.doctor.fix_makers import Fix, sampler, static
from planner.doctor.slots import adapter_slots


def no_blocks(signals: Signals) -> list[Fix]:
    """More budget or less that comes before the KV cache."""
    return [
        *slots(signals)[:1],
        Fix(change="a HIGHER --gpu-memory-utilization if it is below 0.95"),
        Fix(
            change="a lower --max-model-len and --max-num-batched-tokens: the profile peak shrinks"
        ),
        Fix(change="a quantised checkpoint, or --tensor-parallel-size 2"),
        Fix(change="--limit-mm-per-prompt or --skip-mm-profiling for vision models"),
    ]


def slots(signals: Signals) -> list[Fix]:
    """Fewer or narrower adapter slots."""
    found = adapter_slots(signals)
    if found is None:
        return []
    least = found.size_bytes - found.size_bytes // max(1, found.count)
    return [
        Fix(
            change=f"fewer or narrower adapter slots: --max-loras 1 and the adapters' own rank as --max-lora-rank (now {found.count} of rank {found.rank})",
            saved_bytes=least if found.count > 1 else found.size_bytes // 2,
            formula=f"{found.count} slots are {found.size_bytes:,} B by the plan",
        ),
        Fix(change="merge the adapter into the weights and serve it without --enable-lora"),
        Fix(change="a LOWER --gpu-memory-utilization where adapters are loaded after the start"),
    ]


def waking(signals: Signals) -> list[Fix]:
    """Room for an engine that comes back: less of the card for it, or less of the trainer in the way."""
    event = signals.event
    steps = [
        Fix(
            change="wake in two steps: wake_up(tags=['weights']), load and free the new weights, then wake_up(tags=['kv_cache'])"
        ),
        Fix(change="a lower vllm_gpu_memory_utilization"),
    ]
    if event is None or event.kind != "tms_oom":
        return steps
    return [
        Fix(
            change="a lower --mem-fraction-static (verl: rollout.gpu_memory_utilization, slime: --sglang-mem-fraction-static): the engine's pool must fit beside the trainer, 0.5 is a usual start"
        ),
        Fix(
            change="before the engine resumes: offload the trainer (param_offload, optimizer_offload) and torch.cuda.empty_cache(), for the driver does not see what PyTorch keeps in reserve"
        ),
        Fix(
            change="resume in two steps: weights first, the KV cache after the new weights are loaded (tags)"
        ),
    ]


def placing(signals: Signals) -> list[Fix]:
    """Fewer weights on each GPU: of an engine by its flags, of a trainer by its states."""
    if serves_sglang(signals):
        return [
            Fix(
                change="fewer weights on each GPU: a higher --tp (--tp-size), or a quantised checkpoint (fp8, AWQ)"
            ),
            Fix(change="free the card of other processes"),
        ]
    if not serves_vllm(signals):
        return static(signals)
    return [
        Fix(change="a quantised checkpoint (fp8, AWQ, 4-bit), or --quantization fp8"),
        Fix(change="a higher --tensor-parallel-size (or --pipeline-parallel-size)"),
        Fix(change="--cpu-offload-gb N (slow), and no other process on the card"),
    ]


def running(signals: Signals) -> list[Fix]:
    """More room beside the budget, or smaller batches."""
    return [
        *slots(signals)[:1],
        Fix(
            change="a LOWER --gpu-memory-utilization: the KV cache shrinks, running batches get the room"
        ),
        Fix(change="a lower --max-num-batched-tokens and --max-num-seqs"),
        Fix(change="nvidia-smi: a process that came after the start takes from the same rest"),
    ]


def sampling(signals: Signals) -> list[Fix]:
    """Fewer rows at once, or room outside the budget; adapters take from the same rest."""
    return [
        *sampler(signals),
        *slots(signals)[:1],
        Fix(change="fewer log-probabilities (--max-logprobs), no prompt_logprobs"),
    ]
