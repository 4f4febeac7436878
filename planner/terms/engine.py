"""engine: what generation holds beside the KV cache: a second copy of the weights, pools, graphs."""

from planner.dtypes import element_bytes
from planner.machine import Machine
from planner.model import ModelSpec, ModuleKind
from planner.recipe import EngineKind, Method, Task
from planner.resolve import Resolved
from planner.terms.counts import base_weights
from planner.terms.term import Term

VLLM = (EngineKind.VLLM_SHARED, EngineKind.VLLM_PUSH, EngineKind.VLLM_SERVER)
SAMPLER_BYTES = 4
"""The sampler upcasts the logits of every running sequence to fp32."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks vLLM allocates for."""


def colocated(r: Resolved) -> bool:
    """Return whether a vLLM engine lives on the training GPU."""
    return r.engine in (EngineKind.VLLM_SHARED, EngineKind.VLLM_PUSH) and r.task is Task.GRPO


def copy_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return the engine's own weights on this GPU; 0 when they are shared or elsewhere."""
    if r.engine is EngineKind.VLLM_PUSH and r.task is Task.GRPO:
        if r.quantization:
            return base_weights(model, r).total // r.tensor_parallel
        width = min(element_bytes(r.dtype), 2)
        return model.parameters * width // r.tensor_parallel
    return 0


def working_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return activations of the engine's largest step: a prefill batch, or the sampler."""
    hidden = model.hidden
    widest = max((layer.mlp.intermediate or hidden) for layer in model.layers)
    prefill = r.max_num_batched_tokens * 2 * (2 * hidden + 3 * widest)
    sampler = r.max_num_seqs * model.vocab * (2 + 2 * SAMPLER_BYTES)
    return max(prefill, sampler)


def lora_slot_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return vLLM's preallocated adapter slot: rank x (in + out) x 2 B for every linear of the model.

    It is made for all linears, adapted or not, at the next rank vLLM offers. Merged adapters (DoRA)
    and full fine-tuning need none.
    """
    if r.method is not Method.LORA or r.dora:
        return 0
    rank = next((size for size in SLOT_RANKS if size >= r.lora_rank), r.lora_rank)
    width = sum(
        layer.count * module.count * (module.in_features + module.out_features)
        for layer in model.layers
        for module in layer.modules
        if module.kind is ModuleKind.LINEAR
    )
    return rank * width * 2 // r.tensor_parallel


def engine(model: ModelSpec, r: Resolved, machine: Machine) -> Term:
    """Return the engine's bytes while it generates, KV cache apart."""
    if not colocated(r) and r.task is not Task.SERVE:
        return Term("engine", 0)
    copy, work = copy_bytes(model, r), working_bytes(model, r)
    slots = lora_slot_bytes(model, r) if colocated(r) else 0
    return Term(
        "engine",
        copy + work + slots,
        "own weights {0:,} B + largest step {1:,} B + adapter slot {2:,} B",
        (copy, work, slots),
        "vLLM start-up profile, trainer-facts 4.4",
    )


def pool_bytes(model: ModelSpec, r: Resolved, machine: Machine, weights: int) -> int:
    """Return the KV pool a vLLM engine takes from its utilisation, after everything else in it."""
    if r.kv_bytes:
        return r.kv_bytes
    budget = int(machine.vram_bytes * r.utilization)
    return max(0, budget - weights - working_bytes(model, r) - machine.context_bytes)
