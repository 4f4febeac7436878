"""What a card cannot do of a run, or does not gain from: said beside the plan, and never advised."""

from planner.machines.machine import GpuSpec
from planner.run.recipe import VLLM, Checkpointing, EngineKind, Optimizer, Task
from planner.run.resolved import Resolved

EIGHT_BIT = frozenset({
    Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT, Optimizer.LION_8BIT
})  # fmt: skip
"""bitsandbytes' optimizers."""


def has_bitsandbytes_optimizers(gpu: GpuSpec | None) -> bool:
    """Say whether bitsandbytes has its optimizers on a card: backends/mps/ops.py of 0.50 has 4-bit codes alone."""
    return gpu is None or gpu.vendor != "apple"


def has_vllm(gpu: GpuSpec | None) -> bool:
    """Say whether vLLM itself runs on a card; for Apple's there is no build of it (vllm-metal is another project)."""
    return gpu is None or gpu.vendor != "apple"


def card_notes(r: Resolved, gpu: GpuSpec | None) -> list[str]:
    """Return what to say of this run on this card."""
    if gpu is None:
        return []
    notes = []
    if not gpu.bf16_native and "bf16" in (r.dtype, r.autocast, r.adapter_dtype if r.trains else ""):
        notes.append(_without_bf16(r, gpu))
    if not has_bitsandbytes_optimizers(gpu) and r.trains and r.optimizer in EIGHT_BIT:
        notes.append(
            f"{r.optimizer.value}: bitsandbytes has no optimizers on MPS; --optimizer adamw, or adafactor for less memory"
        )
    uses_vllm = r.engine in VLLM and (
        r.task is Task.SERVE or r.engine is not EngineKind.VLLM_SERVER
    )
    if uses_vllm and not has_vllm(gpu):
        notes.append("vLLM has no build for Apple's GPUs: planned as if it had one")
    if gpu.unified and _offloads(r):
        notes.append(
            "host and GPU share one memory here: what is offloaded stays in it, and nothing is saved"
        )
    if gpu.vendor == "amd" and r.trains:
        notes.append("ROCm: planned by CUDA's allocator, which torch's HIP build shares")
    return notes


def _without_bf16(r: Resolved, gpu: GpuSpec) -> str:
    refuses = {"vramwise": "this trainer refuses it", "vllm": "vLLM refuses it"}
    family = "vllm" if r.task is Task.SERVE and r.engine in VLLM else r.framework.family
    what = refuses.get(family, "torch computes it many times slower than fp16")
    return f"{gpu.name} has no bf16 units ({what}): --dtype fp16 takes the same bytes"


def _offloads(r: Resolved) -> bool:
    activations = r.trains and r.checkpointing is Checkpointing.OFFLOAD
    return r.optimizer_offload or r.offload.parameters or activations or r.reference == "offloaded"
