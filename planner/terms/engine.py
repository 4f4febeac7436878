"""engine: what generation holds beside the KV cache, and the KV pool that vLLM takes.

vLLM's budget: utilisation x total = weights + outside torch + largest step (+ CUDA graphs, from
0.21 on) + KV pool. What each release takes off is its EngineLaw (data/frameworks/vllm*.json).
A trainer that states KV bytes bypasses it.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.machines.vllm_overheads import NOTHING as FREE
from planner.machines.vllm_overheads import Measured, communicators, graphs, kernels, spread
from planner.mixers.registry import mixer_of
from planner.models.spec import LayerSpec, ModelSpec
from planner.run.recipe import VLLM, EngineKind, Task
from planner.run.resolved import Resolved
from planner.run.tasks import TASKS
from planner.terms.kv_cache import rollout_sequences, sequence_bytes
from planner.terms.overhead import workspace
from planner.terms.term import Term
from planner.terms.vllm_blocks import VllmKv, kv_ranks, vllm_kv
from planner.terms.vllm_profile import Profile, profile, widest_layer
from planner.terms.vllm_weights import SLOT_RANKS, adapter_slot_bytes, vllm_weights
from planner.units import format_bytes

__all__ = ["SLOT_RANKS", "EngineCosts", "Serving", "engine_costs"]
STATED = "the size stated"
"""What a pool's formula begins with where engine.kv_bytes says its size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """vLLM's own figures of one rank, as its start-up log prints them."""

    weights_bytes: int
    """Model weights, adapter slots among them from 0.8 on."""
    activation_peak_bytes: int
    """Peak of torch beside the weights in the profile run."""
    sampler_bytes: int
    """What the sampler alone would peak at."""
    non_torch: Measured
    graphs: Measured
    """CUDA graphs, inside the budget or not."""
    budget_bytes: int
    """Utilisation x total; 0 when KV bytes are stated."""
    kv: Measured
    """The KV pool."""
    max_model_len: int
    pool: VllmKv | None
    """How the pool is cut; None for a model without a cache."""
    cpu_blocks: int
    """Blocks in host memory (V0's swap space)."""

    @property
    def kv_tokens(self) -> int:
        """What `GPU KV cache size` prints."""
        return self.pool.tokens if self.pool else 0

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len that fit at once."""
        return self.pool.concurrency if self.pool else 0.0

    @property
    def refusal_risk(self) -> float:
        """How likely vLLM refuses to start: its pool holds less than one request.

        The pool's low is its 5%, its typical its median; between the two the share is read linearly.
        """
        each = self.pool.bytes_per_sequence if self.pool else 0
        low, middle = self.kv.low, self.kv.typical
        if each <= low or low == middle:
            return 0.0
        return min(1.0, 0.05 + 0.45 * (each - low) / (middle - low))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "kv_tokens": self.kv_tokens,
            "max_concurrency": round(self.max_concurrency, 4),
            "longest_request": min(self.max_model_len, self.kv_tokens),
            "kv_blocks": self.pool.num_blocks if self.pool else 0,
            "kv_bytes": self.kv.typical,
            "kv_low_bytes": self.kv.low,
            "kv_high_bytes": self.kv.high,
            "weights_bytes": self.weights_bytes,
            "activation_peak_bytes": self.activation_peak_bytes,
            "non_torch_bytes": self.non_torch.typical,
            "graph_bytes": self.graphs.typical,
            "budget_bytes": self.budget_bytes,
        }


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
    serving: Serving | None = None
    """vLLM's figures; None without vLLM on this GPU."""
    woken: Term = Term("engine", 0)
    """What it has when its weights are awake and its pool is not."""


NOTHING = Term("engine", 0)
NO_KV = Term("kv_cache", 0)


def colocated(r: Resolved) -> bool:
    """Return whether a vLLM engine lives on the training GPU."""
    return r.engine in (EngineKind.VLLM_SHARED, EngineKind.VLLM_PUSH) and TASKS[r.task].generates


def copy_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return the engine's own weights on this GPU; 0 when they are shared or elsewhere."""
    if r.engine is not EngineKind.VLLM_PUSH or not TASKS[r.task].generates:
        return 0
    # vLLM loads fp32 checkpoints in 16 bit
    served = replace(r, dtype="bf16") if r.dtype == "fp32" else r
    return vllm_weights(model, served).modules


def lora_slot_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return the engine's adapter slots; merged adapters (DoRA) and full fine-tuning need none."""
    return adapter_slot_bytes(model, r)


def capture_sizes(r: Resolved) -> tuple[int, ...]:
    """Return the batch sizes whose CUDA graphs are captured."""
    law = r.framework.engine
    if not r.cuda_graphs:
        return ()
    most = r.max_num_seqs * (2 if law.graph_sizes == "twice" else 1)
    if law.graph_sizes == "fixed":
        most = law.graph_limit
    most = min(most, law.graph_limit or most, r.max_num_batched_tokens)
    if law.graph_sizes == "sequences":
        most = next((size for size in (1, 2, 4) if size >= most), -(-most // 8) * 8)
    above = law.graph_step_above or most + 1
    by_eight = range(8, min(most + 1, above), 8)
    by_sixteen = range(above, most + 1, 16)
    return (*(size for size in (1, 2, 4) if size <= most), *by_eight, *by_sixteen)


def captured(model: ModelSpec, r: Resolved, *, estimated: bool = False) -> Measured:
    """Return what captured CUDA graphs hold: one pool of the largest, and every graph's own nodes.

    `estimated`: what a release that counts them in its budget takes them for.
    """
    sizes = capture_sizes(r)
    if not sizes:
        return FREE
    law, layers = r.framework.engine, -(-model.num_layers // r.pipeline_parallel)
    pieces = (layers + 1) * len(sizes) if law.piecewise else layers * len(sizes)
    quantized = r.quantization in ("nf4", "fp4")
    piece = (law.graph_estimate if estimated else law.graph_piece) if law.piecewise else ""
    nodes = graphs(piece=piece, quantized=quantized, pieces=pieces)
    shared = int(2 * sizes[-1] * widest_layer(model, r))
    return Measured(*(size + shared for size in nodes))


def kv_pool(model: ModelSpec, r: Resolved, kv_bytes: int) -> VllmKv | None:
    """Return how vLLM cuts a pool of `kv_bytes` on one rank; None for a model without a cache."""
    law = r.framework.engine
    try:
        return vllm_kv(
            model,
            kv_bytes=max(0, kv_bytes),
            max_model_len=r.seq_tokens,
            kv_dtype=r.kv_dtype,
            block_size=r.block_size,
            in_flight_tokens=law.in_flight_batches * r.max_num_batched_tokens,
            prefix_caching=r.prefix_caching,
            law=law,
            ranks=r.tensor_parallel,
            stages=r.pipeline_parallel,
        )
    except UsageError:
        return None


def _paged_plainly(layer: LayerSpec) -> bool:
    """Return whether the layer has a page for every token and no group of its own."""
    mixer = mixer_of(layer.mixer)
    return mixer.cache.token(layer.mixer, 1) > 0 and not mixer.pages.own_group


def kv_sequence_bytes(model: ModelSpec, r: Resolved) -> int:
    """Return what vLLM reserves for one sequence of the full length on one GPU."""
    if all(_paged_plainly(layer) for layer in model.layers):
        each = sequence_bytes(model, r.seq_tokens, r.kv_dtype, block=r.block_size)
        return each // (kv_ranks(model, r.tensor_parallel) * r.pipeline_parallel)
    pool = kv_pool(model, r, 0)
    return pool.bytes_per_sequence if pool else 0


def outside_torch(r: Resolved, machine: Machine) -> Measured:
    """Return what the release takes off the budget as memory outside torch."""
    law, loaded = r.framework.engine, kernels(machine)
    parts = [loaded]
    if law.context_in_budget:
        # the measured context has its kernels loaded
        context = machine.context_bytes
        parts = [Measured(context - loaded.high, context, context + loaded.high)]
    if law.communicators_in_budget:
        degrees = (r.tensor_parallel, r.pipeline_parallel, r.data_parallel)
        parts += [communicators(machine, ranks) for ranks in degrees if ranks > 1]
    return Measured(*(sum(sizes) for sizes in zip(*parts, strict=True)))


def engine_costs(model: ModelSpec, r: Resolved, machine: Machine, weights: int) -> EngineCosts:
    """Return an engine's terms; `weights` are the bytes it serves (its own or shared)."""
    if r.engine is EngineKind.TRANSFORMERS:
        return EngineCosts(_dense_cache(model, r), NOTHING, NOTHING, NOTHING, "")
    serves = r.task is Task.SERVE and r.engine in VLLM
    if not serves and not colocated(r):
        return EngineCosts(NO_KV, NOTHING, NOTHING, NOTHING, "")
    r = _with_sequences(model, r, machine)
    copy, step = copy_bytes(model, r), profile(model, r)
    slots = 0 if serves else lora_slot_bytes(model, r)
    outside, drawn = outside_torch(r, machine), captured(model, r)
    each = kv_sequence_bytes(model, r)
    law = r.framework.engine
    counted = captured(model, r, estimated=True) if law.graphs_in_budget else FREE
    fixed = slots + outside.typical + counted.typical
    pool, how = _pool(r, machine, (copy or weights) + fixed + step.peak, each)
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
    held = slots + outside.typical + drawn.typical
    busy = Term(
        "engine",
        copy + held + step.peak,
        "own weights {0:,} B + adapter slot {1:,} B, outside torch {2:,} B, graphs {3:,} B + largest "
        "step {4:,} B: {5}",
        (copy, slots, outside.typical, drawn.typical, step.peak, _words(step)),
        f"vLLM start-up profile, {r.framework.title}: planner/terms/vllm_profile.py",
    )
    figures = _figures(model, r, machine, step, outside, drawn, counted, pool, how)
    resident = _resident(r, copy, held, pool)
    woken = resident
    if r.sleep_level:
        text = "its weights awake {0:,} B; adapter slot, graphs, outside torch {1:,} B"
        woken = Term("engine", copy + held, text, (copy, held), "vLLM wake_up(tags=weights)")
    return EngineCosts(kv, busy, resident, _slept(r, copy), problem, figures, woken)


def _with_sequences(model: ModelSpec, r: Resolved, machine: Machine) -> Resolved:
    """Return the choices with max_num_seqs filled in where it follows from the room for KV pages."""
    law = r.framework.engine
    if not law.sequences_by_room or r.max_num_seqs:
        return r
    room = int(machine.vram_bytes * r.utilization) - vllm_weights(model, r).total
    return replace(r, max_num_seqs=law.sequences_in(room, multimodal=bool(model.towers)))


def _words(step: Profile) -> str:
    if step.layers >= step.sampler:
        return f"{step.step_tokens:,} tokens x {step.step_width:,.10g} B of one layer"
    return f"the sampler's {step.logits:,} logits x {step.logit_width:g} B and hidden states"


def _figures(
    model: ModelSpec,
    r: Resolved,
    machine: Machine,
    step: Profile,
    outside: Measured,
    drawn: Measured,
    inside: Measured,
    pool: int,
    how: str,
) -> Serving:
    law, space = r.framework.engine, workspace(machine, trains=False).bytes
    loaded = vllm_weights(model, r)
    # what the parts may take more or less moves the pool by as much
    either = int(spread("weights") * loaded.total + spread("activation_peak") * step.peak)
    more = outside.high - outside.typical + inside.high - inside.typical + either
    less = outside.typical - outside.low + inside.typical - inside.low + either
    stated = how == STATED
    budget = 0 if stated or not r.utilization else int(machine.vram_bytes * r.utilization)
    kv = Measured(pool, pool, pool) if stated else Measured(pool - more, pool, pool + less)
    swapped = kv_pool(model, r, law.swap_bytes) if law.swap_bytes else None
    return Serving(
        weights_bytes=loaded.total if law.adapters_in_weights else loaded.total - loaded.adapters,
        activation_peak_bytes=step.peak + space,
        sampler_bytes=step.sampler,
        non_torch=outside,
        graphs=drawn,
        budget_bytes=budget,
        kv=kv,
        max_model_len=r.seq_tokens,
        pool=kv_pool(model, r, pool),
        cpu_blocks=swapped.num_blocks if swapped else 0,
    )


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
        return r.kv_bytes, STATED
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
