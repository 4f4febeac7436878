"""activations: what autograd keeps of the layers, and what one layer needs while it runs backward."""

from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.layer_program import LayerCosts, OpSettings, Program, layer_costs
from planner.model import ModelSpec
from planner.recipe import Checkpointing, Method, Sharding
from planner.resolve import Resolved
from planner.tape import Tape, envelope, peak
from planner.terms.counts import adapters, base_weights
from planner.terms.gradients import gradient_width
from planner.terms.weights import SHARDED, trained_width

STAGED_INPUTS = 2
"""Checkpoint inputs on their way back from the host: double buffering."""


class Activations(NamedTuple):
    """Bytes of one micro-batch at the moments that can be the largest."""

    kept: int
    """Held by the graph when the last layer is done (checkpoint inputs or everything)."""
    tail: int
    """Final norm and head input held on top of `kept` during the loss."""
    forward: int
    """Largest inside the forward, `kept` included."""
    no_grad: int
    backward_first: int
    """Largest while the last layer runs backward; everything before it still kept."""
    backward_last: int
    """Largest while the first layer runs backward."""
    layer_grads: int
    """Weight gradients counted inside the two figures above (one layer's)."""
    autocast_cache: int
    host: int
    per_token: float
    """Kept bytes per token of one layer (mean), for the formula."""
    layer_per_token: float
    """Bytes per token of one layer's backward."""


def op_settings(model: ModelSpec, r: Resolved) -> OpSettings:
    """Return the sizes that decide what a layer's operations allocate."""
    full = r.method is Method.FULL and r.trains
    upcast = bool(r.switch("kbit_upcast")) and bool(r.quantization)
    width = trained_width(r) if full else element_bytes(r.dtype)
    sharded = r.sharding in SHARDED and r.gpus > 1
    if sharded and r.autocast:
        width = element_bytes(r.autocast)  # units are gathered in the compute dtype
    eager = r.attention.value == "eager"
    return OpSettings(
        full=full,
        adapted=adapters(model, r).leaves if r.trains and not full else frozenset(),
        rank=r.lora_rank if r.trains and not full else 0,
        act=element_bytes(r.compute_dtype),
        residual=4 if upcast else width,
        weight=width,
        autocast=bool(r.autocast),
        adapter=element_bytes(r.adapter_dtype),
        grad=(width if sharded else gradient_width(r)) if full else 0,
        quantized=bool(r.quantization),
        dropout=r.lora_dropout > 0,
        dora=r.dora,
        attention=r.attention.value,
        seq=r.seq_tokens if eager else 0,
        masked=r.padded,
        repeat_kv=model.model_type in r.switch("repeat_kv", ()),
        norm=model.norm,
        fused=frozenset(r.switch("fused", ())),
        accumulate=r.grad_accum > 1,
    )


def _tail(model: ModelSpec, settings: OpSettings) -> tuple[float, float]:
    """Return bytes per token of the final norm: kept during the loss, and at its largest."""
    tape = Tape()
    x = tape.value(model.hidden * settings.residual)
    out = Program(tape, settings).norm(x, settings.residual, model.hidden)
    tape.drop(x)
    points = envelope(tape.points)
    del out  # the model's output object holds it through the loss
    return tape.live, float(peak(points, 1))


_TAILS: dict[tuple[int, OpSettings], tuple[float, float]] = {}


def activations(model: ModelSpec, r: Resolved, tokens: int) -> Activations:
    """Return the activations of `tokens` tokens through the whole model."""
    settings = op_settings(model, r)
    costs = [layer_costs(layer, model.hidden, settings) for layer in model.layers]
    key = (model.hidden, settings)
    if key not in _TAILS:
        _TAILS[key] = _tail(model, settings)
    tail = int(_TAILS[key][0] * tokens)
    forward = max(peak(cost.forward, tokens) for cost in costs)
    no_grad = max(peak(cost.no_grad, tokens) for cost in costs)
    first, last = costs[model.layer_order[0]], costs[model.layer_order[-1]]
    cache = 0
    if settings.full and settings.autocast and settings.weight != settings.act:
        cache = sum(
            layer.count * cost.kept_constant
            for layer, cost in zip(model.layers, costs, strict=True)
        )
    if r.checkpointing is Checkpointing.NONE:
        return _everything(model, costs, first, last, tokens, tail, forward, no_grad)
    return _checkpointed(model, r, costs, tokens, tail, forward, no_grad, cache)


def _everything(
    model: ModelSpec,
    costs: list[LayerCosts],
    first: LayerCosts,
    last: LayerCosts,
    tokens: int,
    tail: int,
    forward: int,
    no_grad: int,
) -> Activations:
    kept = 0
    per_token = 0.0
    for layer, cost in zip(model.layers, costs, strict=True):
        kept += layer.count * (int(cost.kept_per_token * tokens) + cost.kept_constant)
        per_token += layer.count * cost.kept_per_token
    without_last = kept - int(last.kept_per_token * tokens) - last.kept_constant
    inputs = int(first.input_per_token * tokens)
    return Activations(
        kept,
        tail,
        without_last + forward,
        no_grad,
        without_last + peak(last.backward, tokens),
        inputs + peak(first.backward, tokens),
        max(first.weight_grads, last.weight_grads),
        0,
        0,
        per_token / model.num_layers,
        max(a for a, _ in last.backward),
    )


def _checkpointed(
    model: ModelSpec,
    r: Resolved,
    costs: list[LayerCosts],
    tokens: int,
    tail: int,
    forward: int,
    no_grad: int,
    cache: int,
) -> Activations:
    layers = model.num_layers
    one_input = int(costs[0].input_per_token * tokens)
    every = r.checkpoint_every if r.checkpointing is Checkpointing.EVERY_K else 1
    segments = -(-layers // every)
    resident, host = segments, 0
    if r.checkpointing is Checkpointing.OFFLOAD:
        resident = min(layers, r.keep_layers + STAGED_INPUTS)
        host = (layers - min(layers, r.keep_layers)) * pinned(one_input, r)
    kept = resident * one_input
    widest = max(costs, key=lambda cost: peak(cost.recompute, tokens))
    segment = (every - 1) * (int(widest.kept_per_token * tokens) + widest.kept_constant)
    work = segment + peak(widest.recompute, tokens)
    staged = min(kept, STAGED_INPUTS * one_input)
    if r.switch("reentrant"):
        # the recomputed output is a Python variable until the layer's backward is done
        work += one_input
    frozen = r.method is not Method.FULL and r.sharding is Sharding.FSDP and r.gpus > 1
    if frozen and r.checkpointing is Checkpointing.FULL:
        # FSDP1 watches a frozen unit's inputs with register_multi_grad_hook, which holds every
        # layer's input and the input's gradient until the backward ends
        staged = 2 * kept
    return Activations(
        kept,
        tail,
        kept + no_grad,
        no_grad,
        kept + work,
        staged + work,
        widest.weight_grads,
        cache,
        host,
        kept / max(tokens, 1) / layers,
        max(a for a, _ in widest.recompute),
    )


def pinned(size: int, r: Resolved) -> int:
    """Return host bytes of one offloaded block: torch's pinned allocator rounds up to a power of two."""
    if r.switch("exact_host_slab"):
        return size
    return 1 << (size - 1).bit_length() if size > 1 else size


def dequantized(model: ModelSpec, r: Resolved) -> int:
    """Return bytes of the largest weight while it is dequantised for a matmul."""
    return base_weights(model, r).largest_quantized * element_bytes(r.compute_dtype)
