"""A decoder layer of Megatron-Core on a tape: parallel linears, fused dropouts, sequence parallel norms.

Read in megatron-core 0.20 (core/transformer/transformer_layer.py, attention.py, mlp.py, moe/;
core/tensor_parallel/layers.py and mappings.py; core/fusions/fused_bias_dropout.py) and Transformer Engine
(pytorch/module/layernorm_linear.py, attention). The layer's widths are one rank's already
(planner/models/rank_part.py); `OpSettings.sequence` ranks share the tokens of the hidden stream.
"""

from planner.layer.attention import ring_blocks
from planner.layer.channel import activation, gated, mlp_linears
from planner.layer.program import Program
from planner.layer.tape import Op, Value
from planner.mixers.registry import mixer_of
from planner.models.spec import LayerSpec, MlpKind, ModuleKind, ModuleSpec

SCORE_DROPOUT_MASK = 1
"""Bytes an element."""


def megatron_layer(p: Program, x: Value, layer: LayerSpec, hidden: int) -> Value:
    """Record x + dropout(attention(norm(x))), then the same of the MLP; the caller drops `x`."""
    middle = _added(p, x, _attention(p, x, layer, hidden), hidden)
    fed = _experts if layer.mlp.kind is MlpKind.MOE else _mlp
    out = _added(p, middle, fed(p, middle, layer, hidden), hidden)
    p.tape.drop(middle)
    return out


def _added(p: Program, x: Value, part: Value, hidden: int) -> Value:
    """Record bias, dropout and residual in one kernel (bias_dropout_add); `part` is dropped."""
    tape = p.tape
    if p.s.hidden_dropout:
        mask = tape.value(hidden / p.s.sequence, needs_grad=False)  # a byte an element
        dropped = tape.op((part,), part.size, saves=(mask,))
        tape.drop(mask, part)
        part = dropped
    out = tape.add(x, part, p.s.stream(hidden))
    tape.drop(part)
    return out


def _norm(p: Program, x: Value, hidden: int) -> Value:
    """Record a norm over one rank's tokens."""
    return p.norm(x, p.s.residual, hidden // p.s.sequence)


def _column(p: Program, x: Value, modules: list[ModuleSpec], hidden: int) -> Value:
    """Record one linear divided by its outputs, made of `modules`.

    Under sequence parallelism it keeps its own tokens' input and gathers the others' in each pass
    (LinearWithGradAccumulationAndAsyncCommunication); the input's gradient is whole before it is reduced.
    """
    s = p.s
    whole = hidden * s.act if s.sequence > 1 else 0
    rows = sum(module.out_features for module in modules)
    return p.tape.op(
        (x,),
        rows * s.act,
        saves=(x,),
        forward_scratch=whole,
        scratch=(whole, whole) if whole else 0,
        weight_grad=_weight_gradient(p, modules),
        view_grad=True,
        kind=Op.MATMUL,
    )


def _row(p: Program, x: Value, module: ModuleSpec, hidden: int) -> Value:
    """Record one linear divided by its inputs; `x` is dropped.

    All ranks' sums are reduced in place, or scattered over the tokens under sequence parallelism.
    """
    s, tape = p.s, p.tape
    out = tape.op(
        (x,),
        hidden * s.act,
        saves=(x,),
        weight_grad=_weight_gradient(p, [module]),
        view_grad=True,
        kind=Op.MATMUL,
    )
    tape.drop(x)
    if s.sequence > 1:
        out = p.cast(out, s.stream(hidden))
    return out


def _weight_gradient(p: Program, modules: list[ModuleSpec]) -> int:
    """Return bytes of weights' own gradients, which are added to the buffer and freed.

    Fused gradient accumulation (gradient_accumulation_fusion) writes into the buffer: there are none.
    """
    return p.s.grad * sum(module.parameters for module in modules)


def _attention(p: Program, x: Value, layer: LayerSpec, hidden: int) -> Value:
    s, tape, mixer = p.s, p.tape, layer.mixer
    normed = _norm(p, x, hidden)
    kind = mixer_of(mixer)
    linears = kind.linears(layer)
    if mixer.kv_lora_rank or not kind.divides or linears.out is None:
        # a latent has projections of its own; the others have no queries, keys and values of one linear
        assert kind.record is not None
        out = kind.record(p, normed, layer, linears, s.act)
        tape.drop(normed)
        return p.cast(out, s.stream(hidden)) if s.sequence > 1 else out
    heads, groups = mixer.num_heads, mixer.num_kv_heads or mixer.num_heads
    size, part = heads * mixer.head_dim * s.act, groups * mixer.head_dim * s.act
    mixed = _column(p, normed, linears.ins, hidden)
    tape.drop(normed)
    q, k, v = tape.split(mixed, (size, part, part))
    tape.drop(mixed)
    if 1 < groups < heads:  # query.reshape of a strided view copies
        q = _copied(p, q)
    if mixer.qk_norm:
        q = p.normed(q, s.act, mixer.head_dim * heads)
        k = p.normed(k, s.act, mixer.head_dim * groups)
    if s.rope:  # the fused kernel makes new queries and keys
        q, k = _copied(p, q), _copied(p, k)
    context = _unfused(p, q, k, v, layer) if s.attention == "eager" else _fused(p, q, k, v, layer)
    return _row(p, context, linears.out, hidden)


def _copied(p: Program, x: Value) -> Value:
    """Record a copy that saves nothing; `x` is dropped."""
    return p.cast(x, x.size)


def _fused(p: Program, q: Value, k: Value, v: Value, layer: LayerSpec) -> Value:
    """Record a fused kernel: it keeps its inputs, its output and the rows' statistics."""
    tape, heads = p.tape, layer.mixer.num_heads
    divided = p.s.context_kind == "ulysses"
    if divided:
        q, k, v = (_copied(p, part) for part in (q, k, v))
    ring = ring_blocks(p, q, k, v, p.s.act)
    lse = tape.statistics(heads * 4)
    out = tape.op(
        (q, k, v),
        q.size,
        saves=(q, k, v, lse),
        saves_out=True,
        forward_scratch=ring.forward,
        scratch=q.size * 4 / p.s.act + ring.backward,  # dq is summed in fp32
        kind=Op.ATTENTION,
    )
    tape.drop(q, k, v, lse)
    return _copied(p, out) if divided else out


def _unfused(p: Program, q: Value, k: Value, v: Value, layer: LayerSpec) -> Value:
    """Record scores in full: baddbmm, one softmax kernel, dropout, bmm (UnfusedDotProductAttention)."""
    s, tape = p.s, p.tape
    size = layer.mixer.num_heads * s.seq * s.act
    if k.size != q.size:  # repeat_interleave over the query heads
        k, v = p.cast(k, q.size), p.cast(v, q.size)
    scores = tape.op((q, k), size, saves=(q, k), kind=Op.MATMUL)
    probs = tape.op((scores,), size, saves_out=True)
    tape.drop(scores, q, k)
    if s.attention_dropout:
        mask = tape.value(size / s.act * SCORE_DROPOUT_MASK, needs_grad=False)
        dropped = tape.op((probs,), size, saves=(mask,))
        tape.drop(mask, probs)
        probs = dropped
    out = tape.op((probs, v), v.size, saves=(probs, v), kind=Op.MATMUL)
    tape.drop(probs, v)
    return p.cast(out, out.size)  # from [heads, tokens] to [tokens, heads], contiguous


def _mlp(p: Program, x: Value, layer: LayerSpec, hidden: int) -> Value:
    normed = _norm(p, x, hidden)
    ins, down = mlp_linears(layer)
    both = _column(p, normed, ins, hidden)
    p.tape.drop(normed)
    return _row(p, _inside(p, both, layer, layer.mlp.intermediate), down, hidden)


def _inside(p: Program, both: Value, layer: LayerSpec, width: float) -> Value:
    """Record the activation between two linears, one kernel that keeps its input; `both` is dropped."""
    mlp, size = layer.mlp, width * p.s.act
    if mlp.kind is MlpKind.GATED or (mlp.kind is MlpKind.MOE and mlp.expert_gated):
        return gated(p, both, size, mlp.activation)
    kind = "gelu" if mlp.activation.startswith("gelu") else mlp.activation
    return activation(p, both, size, kind)


def _experts(p: Program, x: Value, layer: LayerSpec, hidden: int) -> Value:
    """Record router, dispatch, grouped linears, combine, and the shared expert.

    One rank's tokens are copied once for each of their experts, sent, multiplied where those are, sent back
    and summed (moe/token_dispatcher.py); spread evenly a rank gets as many rows as it sends.
    """
    s, tape, mlp = p.s, p.tape, layer.mlp
    normed = _norm(p, x, hidden)
    logits = p.linear_like(normed, mlp.num_experts * s.act / s.sequence, mlp.num_experts * hidden)
    probs = tape.op((logits,), mlp.num_experts * 4 / s.sequence, saves_out=True)
    tape.drop(logits)
    rows = mlp.top_k / s.sequence
    wide = rows * hidden * s.act
    sent = tape.op((normed,), wide)
    got = tape.op((sent,), wide * s.expert_rows)
    tape.drop(sent)
    if s.expert_rows != 1 or s.expert_groups > 1:  # sorted by expert once more
        got = p.cast(got, got.size)
    stacks = [m for m in layer.modules if m.kind is ModuleKind.EXPERTS]
    count = sum(module.parameters for module in stacks)
    parts = 3 if mlp.expert_gated else 2
    inner = rows * s.expert_rows * mlp.intermediate
    both = tape.op(
        (got,),
        (parts - 1) * inner * s.act,
        saves=(got,),
        weight_grad=s.grad * count * (parts - 1) // parts,
        kind=Op.KERNEL,
    )
    tape.drop(got)
    weighted = tape.op((probs,), rows * s.expert_rows * 4)  # of every row, sent with it
    tape.drop(probs)
    product = _weighted(p, _inside(p, both, layer, inner), weighted, layer)
    down = tape.op(
        (product,),
        wide * s.expert_rows,
        saves=(product,),
        weight_grad=s.grad * count // parts,
        kind=Op.KERNEL,
    )
    tape.drop(product)
    back = p.cast(down, wide)
    out = p.cast(back, s.stream(hidden))
    if mlp.shared_intermediate:
        out = _with_shared(p, normed, out, layer, hidden)
    tape.drop(normed)
    return out


def _weighted(p: Program, product: Value, weights: Value, layer: LayerSpec) -> Value:
    """Record rows times their routing weights, which is part of SwiGLU's kernel; both are dropped.

    Without a gate: a product in fp32, as the weights are, then a cast (TEGroupedMLP.bias_act_func).
    """
    tape = p.tape
    if layer.mlp.expert_gated:
        tape.drop(weights)
        return product
    wide = tape.op((product, weights), product.size * 4 / p.s.act, saves=(product, weights))
    out = p.cast(wide, product.size)
    tape.drop(product, weights)
    return out


def _with_shared(p: Program, normed: Value, out: Value, layer: LayerSpec, hidden: int) -> Value:
    """Record the shared expert beside the routed ones; `out` is dropped."""
    ins, down = mlp_linears(layer)
    both = _column(p, normed, ins, hidden)
    fed = _row(p, _inside(p, both, layer, layer.mlp.shared_intermediate), down, hidden)
    total = p.tape.add(out, fed, out.size)
    p.tape.drop(out, fed)
    return total
