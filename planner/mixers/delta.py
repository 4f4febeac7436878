"""Delta nets on a tape: Qwen3-Next's and Qwen3.5's gated one, and Kimi's with a decay a channel (KDA).

Follows transformers 5.19 (modeling_qwen3_next.py, modeling_qwen3_5.py, modeling_kimi_linear.py) with the
kernels they call: causal-conv1d's causal_conv1d_fn, and flash-linear-attention's
ops/gated_delta_rule/chunk.py and ops/kda/{chunk,chunk_fwd,chunk_bwd}.py (August 2026).
"""

from collections.abc import Sequence

from planner.layer.program import Program
from planner.layer.tape import Op, Value
from planner.mixers.mixer import Linears
from planner.models.spec import LayerSpec, MixerSpec, ModuleSpec

CHUNK = 64
"""Tokens of a chunk of both kernels."""
FP32 = 4


def is_delta(layer: LayerSpec) -> bool:
    """Say whether a linear mixer is a delta net: a convolution over queries, keys and values."""
    return layer.mixer.conv_kernel > 0


def delta(p: Program, x: Value, layer: LayerSpec, linears: Linears, width: int) -> Value:
    """Record a delta net."""
    by_leaf = {module.leaf: module for module in linears.ins}
    record = _kimi if "f_a_proj" in by_leaf else _gated
    return record(p, x, layer.mixer, by_leaf, linears, width)


def _gated(
    p: Program,
    x: Value,
    mixer: MixerSpec,
    by_leaf: dict[str, ModuleSpec],
    linears: Linears,
    width: int,
) -> Value:
    tape, inner = p.tape, width if p.s.quantized else p.s.act
    keys, values = mixer.key_dim * inner, mixer.inner_dim * inner
    heads = mixer.num_heads
    if "in_proj_qkvz" in by_leaf:
        mixed, z, b, a, held = _taken_apart(p, x, by_leaf, mixer, width, inner)
    else:
        held = [p.linear(x, by_leaf[f"in_proj_{name}"], width) for name in ("qkv", "z", "b", "a")]
        mixed, z, b, a = held
        held = held[1:]
    convolved = tape.op((mixed,), mixed.size, saves=(mixed,), kind=Op.KERNEL)
    tape.drop(mixed)
    q, k, v = tape.split(convolved, (keys, keys, values))
    held += [convolved, q, k, v]
    beta = tape.op((b,), heads * inner, saves_out=True)
    # -exp(A_log) * softplus(a + dt_bias), in fp32
    wide = tape.op((a,), heads * FP32)
    shifted = tape.op((wide,), heads * FP32)
    tape.drop(wide)
    soft = tape.op((shifted,), heads * FP32, saves=(shifted,))
    tape.drop(shifted)
    decay = tape.op((soft,), heads * FP32, saves=(soft,) if p.s.full else ())
    tape.drop(soft)
    copies: tuple[float, ...] = (keys, keys)  # of strided views, while the kernel runs
    repeats = heads // mixer.num_kv_heads
    if repeats > 1:
        q, k = tape.op((q,), keys * repeats), tape.op((k,), keys * repeats)
        held += [q, k]
        copies = ()
    one = keys * repeats
    state = mixer.head_dim * values / CHUNK  # of every chunk
    saved = [
        *(
            tape.value(size, needs_grad=False) for size in (one, one, values)
        ),  # normalised; v copied
        tape.value(3 * heads * FP32, needs_grad=False),  # both norms, the decay summed up
        tape.value(heads * CHUNK * inner, needs_grad=False),
    ]
    out = tape.op(
        (q, k, v, decay, beta),
        values,
        saves=(*saved, beta),
        forward_scratch=(*copies, one, values, state, values),
        scratch=(one, one, one, values, values, values, state, state),
        kind=Op.KERNEL,
    )
    tape.drop(*saved)
    held += [beta, decay]
    normed = _gated_norm(p, out, z, inner, mixer, strict=False)
    tape.drop(out)
    return _projected(p, normed, linears, inner, held)


def _taken_apart(
    p: Program,
    x: Value,
    by_leaf: dict[str, ModuleSpec],
    mixer: MixerSpec,
    width: int,
    inner: int,
) -> tuple[Value, Value, Value, Value, list[Value]]:
    """Record Qwen3-Next's two projections, whose parts lie head by head: each is copied out of its view."""
    tape = p.tape
    keys, values, head = mixer.key_dim * inner, mixer.inner_dim * inner, mixer.num_heads * inner
    qkvz = p.linear(x, by_leaf["in_proj_qkvz"], width)
    ba = p.linear(x, by_leaf["in_proj_ba"], width)
    views = tape.split(qkvz, (keys, keys, values, values))
    small = tape.split(ba, (head, head))
    v, z, b, a, q, k = (tape.view_copy(part) for part in (*views[2:], *small, *views[:2]))
    mixed = tape.join((q, k, v), 2 * keys + values)
    tape.drop(*views, *small, q, k, v)
    return mixed, z, b, a, [qkvz, ba, z, b, a]


def _kimi(
    p: Program,
    x: Value,
    mixer: MixerSpec,
    by_leaf: dict[str, ModuleSpec],
    linears: Linears,
    width: int,
) -> Value:
    tape, inner = p.tape, width if p.s.quantized else p.s.act
    elements, heads = mixer.inner_dim, mixer.num_heads
    one, wide = elements * inner, elements * FP32
    parts = [p.linear(x, by_leaf[f"{name}_proj"], width) for name in "qkv"]
    mixed = tape.join(tuple(parts), 3 * one)
    tape.drop(*parts)
    convolved = tape.op((mixed,), 3 * one, saves=(mixed,), kind=Op.KERNEL)
    tape.drop(mixed)
    q, k, v = tape.split(convolved, (one, one, one))
    decay = _forget_gate(p, x, by_leaf, width, wide, inner)
    beta = p.linear(x, by_leaf["b_proj"], width)
    opened = tape.op((beta,), heads * inner, saves_out=True)
    tape.drop(beta)
    state = mixer.head_dim * one / CHUNK
    pairs = heads * CHUNK * inner
    saved = [
        *(tape.value(one, needs_grad=False) for _ in range(3)),
        tape.value(wide, needs_grad=False),  # the decay summed up
        *(tape.value(pairs, needs_grad=False) for _ in range(2)),
        tape.value(2 * heads * FP32, needs_grad=False),
    ]
    pairs_grad = heads * CHUNK * FP32
    out = tape.op(
        (q, k, v, decay, opened),
        one,
        saves=(*saved, decay, opened),
        forward_scratch=(one, one, one, one, one, state, one),
        scratch=(*(one,) * 3, *(wide,) * 5, state, state, pairs_grad, pairs_grad),
        kind=Op.KERNEL,
    )
    tape.drop(*saved)
    held = [convolved, q, k, v, decay, opened]
    gate = _low_rank(p, x, by_leaf, "g", width)
    normed = _gated_norm(p, out, gate, inner, mixer, strict=True)
    held.append(gate)
    tape.drop(out)
    return _projected(p, normed, linears, inner, held)


def _low_rank(p: Program, x: Value, by_leaf: dict[str, ModuleSpec], name: str, width: int) -> Value:
    """Record a gate's projection: through a low rank, or whole (Kimi K3)."""
    if f"{name}_a_proj" not in by_leaf:
        return p.linear(x, by_leaf[f"{name}_proj"], width)
    low = p.linear(x, by_leaf[f"{name}_a_proj"], width)
    out = p.linear(low, by_leaf[f"{name}_b_proj"], width if p.s.quantized else p.s.act)
    p.tape.drop(low)
    return out


def _forget_gate(
    p: Program, x: Value, by_leaf: dict[str, ModuleSpec], width: int, wide: float, inner: int
) -> Value:
    """Record -exp(A_log) * where(g > 20, g, log(1 + exp(g))) in fp32, g = f_b(f_a(x)) + dt_bias."""
    tape = p.tape
    raw = _low_rank(p, x, by_leaf, "f", width)
    copied = tape.op((raw,), wide)
    g = tape.op((copied,), wide)
    tape.drop(copied)
    large = tape.value(wide / FP32, needs_grad=False)
    exp = tape.op((g,), wide, saves_out=True)
    more = tape.op((exp,), wide)
    tape.drop(exp)
    log = tape.op((more,), wide, saves=(more,))
    tape.drop(more)
    soft = tape.op((g, log), wide, saves=(large,))
    tape.drop(log, large)
    out = tape.op((soft,), wide, saves=(soft,) if p.s.full else ())
    tape.drop(soft, g, raw)
    return out


def _gated_norm(
    p: Program, x: Value, gate: Value, inner: int, mixer: MixerSpec, *, strict: bool
) -> Value:
    """Record RMSNormGated in torch: norm and act(gate) in fp32; Kimi scales there too (`strict`)."""
    tape, elements, heads = p.tape, mixer.inner_dim, mixer.num_heads * FP32
    wide, size = elements * FP32, elements * inner
    as_fp32 = tape.op((x,), wide) if inner != FP32 else x
    squares = tape.op((as_fp32,), wide, saves=(as_fp32,), scratch=(wide, wide))
    mean = tape.op((squares,), heads)
    tape.drop(squares)
    rstd = tape.op((mean,), heads, saves_out=True)
    tape.drop(mean)
    normed = tape.op((as_fp32, rstd), wide, saves=(as_fp32, rstd), scratch=wide)
    tape.drop(rstd)
    if as_fp32 is not x:
        tape.drop(as_fp32)
    narrow = normed if strict or inner == FP32 else tape.op((normed,), size)
    scaled_size = wide if strict else size
    scaled = tape.op(
        (narrow,),
        scaled_size,
        saves=(narrow,) if p.s.full else (),
        scratch=scaled_size if p.s.full else 0,
    )
    tape.drop(*{id(one): one for one in (narrow, normed)}.values())
    open_wide = tape.op((gate,), wide) if inner != FP32 else gate
    # sigmoid keeps its result, silu its input
    opened = tape.op((open_wide,), wide, saves=() if strict else (open_wide,), saves_out=strict)
    if open_wide is not gate:
        tape.drop(open_wide)
    product = tape.op((scaled, opened), wide, saves=(scaled, opened))
    tape.drop(scaled, opened)
    return p.cast(product, size) if inner != FP32 else product


def _projected(p: Program, x: Value, linears: Linears, inner: int, held: Sequence[Value]) -> Value:
    """Record the projection out; the variables of the mixer's forward die with it."""
    assert linears.out is not None
    out = p.linear(x, linears.out, inner)
    p.tape.drop(x, *held)
    return out
