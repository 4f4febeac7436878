"""engine: what generation holds beside the KV cache, and the KV pool that vLLM takes.

vLLM's budget: utilisation x total = weights + outside torch + largest step + CUDA graphs + KV pool
(within 0.02 GiB in 33 of 34 logs). A trainer that states KV bytes bypasses it.
"""

from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.models.spec import MixerKind, ModelSpec, ModuleKind
from planner.run.recipe import EngineKind, Method, Task
from planner.run.resolve import Resolved
from planner.terms.counts import base_weights
from planner.terms.kv_cache import rollout_sequences, sequence_bytes
from planner.terms.term import Term
from planner.terms.vllm_blocks import vllm_kv
from planner.units import MiB, format_bytes

VLLM = (EngineKind.VLLM_SHARED, EngineKind.VLLM_PUSH, EngineKind.VLLM_SERVER)
SAMPLER_BYTES = 8.6
"""Per running sequence and vocabulary entry: fp32 logits, probabilities and sort buffers of the
sampler (vLLM 0.13 and later)."""
NON_TORCH_BYTES = 82 * MiB
"""Growth of the context and workspaces outside torch on one GPU: 0.03-0.35 GiB in the logs."""
GRAPH_BYTES_PER_LAYER = 8 * MiB
"""Captured CUDA graphs: 0.04-1.1 GiB in the logs of 16- to 64-layer models."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks vLLM allocates for."""
IN_FLIGHT_BATCHES = 2
"""Batches scheduled at once (asynchronous scheduling): a sliding window keeps that much more."""


class EngineCosts(NamedTuple):
    """What an engine takes on one GPU."""

    kv: Term
    work: Term
    """Everything but the KV cache while it generates."""
    resident: Term
    """What stays while the trainer works."""
    host: Term
    problem: str
    """Why vLLM would refuse to start; "" = it starts."""


NOTHING = Term("engine", 0)
NO_KV = Term("kv_cache", 0)


def colocated(r: Resolved) -> bool:
    """Return whether a vLLM engine lives on the training GPU."""
    return r.engine in (EngineKind.VLLM_SHARED, EngineKind.VLLM_PUSH) and r.task is Task.GRPO


def copy_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return the engine's own weights on this GPU; 0 when they are shared or elsewhere."""
    if r.engine is not EngineKind.VLLM_PUSH or r.task is not Task.GRPO:
        return 0
    if r.quantization:
        return base_weights(model, r).total // r.tensor_parallel
    width = min(element_bytes(r.dtype), 2)  # vLLM loads fp32 checkpoints in 16 bit
    return model.parameters * width // r.tensor_parallel


def working_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return activations of the engine's largest step: a prefill batch, or the sampler."""
    hidden = model.hidden
    widest = max((layer.mlp.intermediate for layer in model.layers), default=0) or 4 * hidden
    prefill = r.max_num_batched_tokens * 2 * (2 * hidden + 3 * widest // r.tensor_parallel)
    return max(prefill, int(r.max_num_seqs * model.vocab * SAMPLER_BYTES))


def graph_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return what captured CUDA graphs hold."""
    return GRAPH_BYTES_PER_LAYER * model.num_layers if r.cuda_graphs else 0


def lora_slot_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return vLLM's preallocated adapter slot: rank x (in + out) x 2 B for every linear of the model.

    It is made for all linears, adapted or not, at the next rank vLLM offers. Merged adapters (DoRA)
    and full fine-tuning need none.
    """
    if r.method is Method.FULL or r.dora or not r.trains:
        return 0
    rank = next((size for size in SLOT_RANKS if size >= r.lora_rank), r.lora_rank)
    width = sum(
        layer.count * module.count * (module.in_features + module.out_features)
        for layer in model.layers
        for module in layer.modules
        if module.kind is ModuleKind.LINEAR
    )
    return rank * width * 2 // r.tensor_parallel


def kv_sequence_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return what vLLM reserves for one sequence of the full length on one GPU."""
    kinds = {layer.mixer.kind for layer in model.layers}
    if kinds <= {MixerKind.FULL, MixerKind.MLA}:
        each = sequence_bytes(model, r.seq_tokens, r.kv_dtype, block=r.block_size)
    else:
        try:
            each = vllm_kv(
                model,
                kv_bytes=0,
                max_model_len=r.seq_tokens,
                kv_dtype=r.kv_dtype,
                block_size=r.block_size,
                in_flight_tokens=IN_FLIGHT_BATCHES * r.max_num_batched_tokens,
            ).bytes_per_sequence
        except UsageError:
            each = 0  # keeps no cache at all
    return each // kv_ranks(model, r)


def kv_ranks(model: ModelSpec, r: Resolved) -> int:
    """Return over how many tensor-parallel ranks the cache is split; MLA and spare ranks copy it."""
    if any(layer.mixer.kind is MixerKind.MLA for layer in model.layers):
        return 1
    heads = max((layer.mixer.num_kv_heads for layer in model.layers), default=1)
    return min(r.tensor_parallel, max(1, heads))


def engine_costs(model: ModelSpec, r: Resolved, machine: Machine, weights: int) -> EngineCosts:
    """Return an engine's terms; `weights` are the bytes it serves (its own or shared)."""
    if r.engine is EngineKind.TRANSFORMERS:
        return EngineCosts(_dense_cache(model, r), NOTHING, NOTHING, NOTHING, "")
    serves = r.task is Task.SERVE and r.engine in VLLM
    if not serves and not colocated(r):
        return EngineCosts(NO_KV, NOTHING, NOTHING, NOTHING, "")
    copy, work = copy_bytes(model, r), working_bytes(model, r)
    fixed = lora_slot_bytes(model, r) + graph_bytes(model, r) + NON_TORCH_BYTES
    each = kv_sequence_bytes(model, r)
    pool, how = _pool(r, machine, weights + fixed + work, each)
    problem = ""
    if pool < each:
        problem = (
            f"vLLM's KV pool of {format_bytes(max(0, pool))} ({how}) does not hold one sequence of "
            f"{r.seq_tokens:,} tokens ({format_bytes(each)})"
        )
    kv = Term(
        "kv_cache",
        max(pool, 0),
        "{0}: {1:.1f} sequences of {2:,} tokens x {3:,} B",
        (how, pool / each if each else 0.0, r.seq_tokens, each),
        "vLLM start-up profile and KV pages, vLLM 0.32 v1/worker and v1/core/kv_cache_utils",
    )
    busy = Term(
        "engine",
        copy + fixed + work,
        "own weights {0:,} B + adapter slot, graphs, outside torch {1:,} B + largest step {2:,} B",
        (copy, fixed, work),
        "vLLM 0.32 v1/worker: start-up profile",
    )
    return EngineCosts(kv, busy, _resident(r, copy, fixed, pool), _slept(r, copy), problem)


def _dense_cache(model: ModelSpec, r: Resolved) -> Term:
    """Return the cache of `model.generate` on the training model itself."""
    count = rollout_sequences(r)
    each = sequence_bytes(model, r.seq_tokens, r.kv_dtype)
    return Term(
        "kv_cache",
        count * each,
        "{0:,} sequences x {1:,} B ({2:,} tokens, {3})",
        (count, each, r.seq_tokens, r.kv_dtype),
        "the shapes that transformers caches, per architecture",
    )


def _pool(r: Resolved, machine: Machine, rest: int, each: int) -> tuple[int, str]:
    """Return the KV pool and how it was decided."""
    if r.kv_bytes:
        return r.kv_bytes, "kv_bytes"
    if r.utilization:
        budget = int(machine.vram_bytes * r.utilization)
        return budget - rest, f"utilisation {r.utilization:g} of {format_bytes(machine.vram_bytes)}"
    return each * min(rollout_sequences(r), r.max_num_seqs), "as many as are generated at once"


def _resident(r: Resolved, copy: int, fixed: int, pool: int) -> Term:
    """Return what an engine keeps while the trainer works: all but the largest step, or less asleep."""
    if r.task is Task.SERVE:
        return NOTHING
    if r.sleep_level:
        template = "asleep: adapter slot, graphs, outside torch {0:,} B"
        return Term("engine", fixed, template, (fixed,), "vLLM sleep mode")
    size = copy + fixed + max(0, pool)
    return Term(
        "engine",
        size,
        "awake while training: weights {0:,} B, KV pool {1:,} B, rest {2:,} B",
        (copy, max(0, pool), fixed),
        "vLLM without sleep mode",
    )


def _slept(r: Resolved, copy: int) -> Term:
    """Return host memory of slept weights: level 1 keeps them there."""
    size = copy if r.sleep_level == 1 else 0
    return Term("engine", size, "slept weights {0:,} B, pinned", (size,), "vLLM sleep level 1")
