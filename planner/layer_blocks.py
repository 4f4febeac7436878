"""The blocks of a decoder layer on a tape: attention, latent attention, recurrent mixers, MLPs, experts.

Follows transformers 5.x modelling code, operation by operation.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.layer_program import Program
from planner.lora_targets import is_attention, is_mlp
from planner.model import LayerSpec, MixerKind, MixerSpec, MlpKind, ModuleKind, ModuleSpec
from planner.tape import Tape, Value, envelope, largest

LINEARS = (ModuleKind.LINEAR, ModuleKind.CONV1D)
OUT_LEAVES = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "output_proj"})
DOWN_LEAVES = frozenset(
    {"down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2", "fc_out", "output_linear"}
)
LATENT = "kv_a_proj_with_mqa"


def mixer_linears(layer: LayerSpec) -> tuple[list[ModuleSpec], ModuleSpec | None]:
    """Return the projections into the token mixer, and the one out of it."""
    found = [m for m in layer.modules if m.kind in LINEARS and is_attention(m, layer)]
    out = next((m for m in reversed(found) if m.leaf in OUT_LEAVES), None)
    return [m for m in found if m is not out], out


def mlp_linears(layer: LayerSpec) -> tuple[list[ModuleSpec], ModuleSpec]:
    """Return the projections into the channel mixer, and the one out of it."""
    found = [m for m in layer.modules if m.kind in LINEARS and is_mlp(m, layer)]
    down = next((m for m in reversed(found) if m.leaf in DOWN_LEAVES), found[-1])
    return [m for m in found if m is not down], down


def attention(p: Program, x: Value, layer: LayerSpec, width: int) -> Value:
    """Record an attention block: projections, rotation, attention, output projection."""
    s, tape, mixer = p.s, p.tape, layer.mixer
    inner = width if s.quantized else s.act
    ins, out_module = mixer_linears(layer)
    heads, kv = mixer.num_heads, mixer.num_kv_heads or mixer.num_heads
    v_dim = mixer.v_head_dim or mixer.head_dim
    sizes = (heads * mixer.head_dim * inner, kv * mixer.head_dim * inner, kv * v_dim * inner)
    gate = None
    if mixer.kind is MixerKind.MLA:
        q, k, v = latent_projections(p, x, ins, mixer, width, inner)
    else:
        projected = [p.linear(x, module, width) for module in ins]
        q, k, v, gate = _heads(p, projected, sizes, gated=mixer.gated_output)
        if mixer.qk_norm:
            q = p.normed(q, inner, mixer.head_dim * heads)
            k = p.normed(k, inner, mixer.head_dim * kv)
        q, k = p.rope(q, sizes[0]), p.rope(k, sizes[1])
    inside = inner
    if inner > s.act and (s.autocast or s.attention == "flash"):
        # autocast, or transformers for flash attention, brings fp32 queries to 16 bits
        inside = s.act
        q, k, v = (p.cast(part, part.size * inside / inner) for part in (q, k, v))
    context = p.sdpa(q, k, v, heads, v_dim, inside)
    if gate is not None:
        opened = tape.op((gate,), gate.size, saves_out=True)
        gated = tape.op((context, opened), context.size, saves=(context, opened))
        tape.drop(gate, opened, context)
        context = gated
    if out_module is None:
        return context
    out = p.linear(context, out_module, inside)
    tape.drop(context)
    return out


def _heads(
    p: Program, projected: list[Value], sizes: tuple[float, float, float], *, gated: bool
) -> tuple[Value, Value, Value, Value | None]:
    """Return queries, keys, values and the output gate that comes with the queries."""
    tape, gate = p.tape, None
    if len(projected) == 1:
        q, k, v = tape.split(projected[0], sizes)
        tape.drop(projected[0])
        return q, k, v, None
    q, k = projected[0], projected[1]
    if gated:
        both = q
        q, gate = tape.split(both, (sizes[0], both.size - sizes[0]))
        tape.drop(both)
    if len(projected) == 2:  # keys double as values
        k.storage.refs += 1
        return q, k, k, gate
    return q, k, projected[2], gate


def latent_projections(
    p: Program, x: Value, ins: list[ModuleSpec], mixer: MixerSpec, width: int, inner: int
) -> tuple[Value, Value, Value]:
    """Record DeepSeek's latent attention up to full queries, keys and values."""
    tape, named = p.tape, {module.leaf: module for module in ins}
    heads, rope = mixer.num_heads, mixer.qk_rope_head_dim
    if mixer.q_lora_rank and "q_a_proj" in named:
        low = p.normed(p.linear(x, named["q_a_proj"], width), inner, mixer.q_lora_rank)
        raw = p.linear(low, named["q_b_proj"], inner)
        tape.drop(low)
    else:
        raw = p.linear(x, named["q_proj"], width)
    straight, turned = tape.split(raw, (raw.size - heads * rope * inner, heads * rope * inner))
    tape.drop(raw)
    turned = p.rope(turned, turned.size)
    q = tape.op((straight, turned), raw.size)
    tape.drop(straight, turned)
    both = p.linear(x, named[LATENT], width)
    latent, shared = tape.split(both, (mixer.kv_lora_rank * inner, rope * inner))
    tape.drop(both)
    low = p.normed(latent, inner, mixer.kv_lora_rank)
    shared = p.rope(shared, rope * inner)
    wide = p.linear(low, named["kv_b_proj"], inner)
    tape.drop(low)
    v_size = heads * (mixer.v_head_dim or mixer.head_dim) * inner
    k_part, v = tape.split(wide, (wide.size - v_size, v_size))
    tape.drop(wide)
    k = tape.op((k_part, shared), heads * mixer.head_dim * inner)
    tape.drop(k_part, shared)
    return q, k, v


def _activation(p: Program, x: Value, size: float, kind: str) -> Value:
    """Record an activation function; `x` is dropped."""
    tape = p.tape
    if kind in ("gelu_new", "gelu_fast", "gelu_python"):
        # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x**3))) written out: four tensors are saved;
        # autocast takes the power, and with it all that follows, to fp32
        half = tape.op((x,), size)
        base = x
        if p.s.autocast and p.s.act != 4:
            size *= 4 / p.s.act
            base = tape.op((x,), size)
        cube = tape.op((base,), size, saves=(base,))
        if base is not x:
            tape.drop(base)
        scaled = p.cast(cube, size)
        inner = tape.op((x, scaled), size)
        tape.drop(scaled)
        inner = p.cast(inner, size)
        tanh = tape.op((inner,), size, saves_out=True)
        tape.drop(inner)
        one = p.cast(tanh, size)
        out = tape.op((half, one), size, saves=(half, one))
        tape.drop(half, one, x)
        return out
    if kind in ("relu", "relu2"):
        out = tape.op((x,), size, saves_out=True)
        tape.drop(x)
        if kind == "relu2":
            squared = tape.op((out,), size, saves=(out,))
            tape.drop(out)
            out = squared
        return out
    if kind == "quick_gelu":
        gate = tape.op((x,), size, saves_out=True)
        out = tape.op((x, gate), size, saves=(x, gate))
        tape.drop(gate, x)
        return out
    out = tape.op((x,), size, saves=(x,))
    tape.drop(x)
    return out


def mlp_block(p: Program, x: Value, layer: LayerSpec, width: int) -> Value:
    """Record a dense MLP."""
    s, tape, mlp = p.s, p.tape, layer.mlp
    inner = width if s.quantized else s.act
    ins, down = mlp_linears(layer)
    size = mlp.intermediate * inner
    first = p.linear(x, ins[0], width)
    if mlp.kind is MlpKind.PLAIN:
        product = _activation(p, first, size, mlp.activation)
    elif mlp.fused_gate_up:
        product = _gated(p, first, size, mlp.activation)
    elif "swiglu" in s.fused:
        up = p.linear(x, ins[1], width)
        product = tape.op((first, up), size, saves=(first, up))
        tape.drop(first, up)
    else:
        activated = _activation(p, first, size, mlp.activation)
        up = p.linear(x, ins[1], width)
        product = tape.op((activated, up), size, saves=(activated, up))
        tape.drop(activated, up)
    # gelu_new leaves fp32 behind under autocast
    out = p.linear(product, down, max(inner, round(product.size / mlp.intermediate)))
    tape.drop(product)
    return out


def _gated(p: Program, both: Value, size: float, kind: str) -> Value:
    """Record act(gate) * up where both come from one linear; `both` is dropped."""
    tape = p.tape
    gate, up = tape.split(both, (size, size))
    tape.drop(both)
    if "swiglu" in p.s.fused:
        product = tape.op((gate, up), size, saves=(gate, up))
        tape.drop(gate, up)
        return product
    activated = _activation(p, gate, size, kind)
    product = tape.op((up, activated), size, saves=(up, activated))
    tape.drop(up, activated)
    return product


def moe_block(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    """Record routed experts as transformers' grouped_mm_experts_forward runs them."""
    s, tape, mlp = p.s, p.tape, layer.mlp
    logits = p.linear_like(x, mlp.num_experts * s.act, mlp.num_experts * hidden)
    probs = tape.op((logits,), mlp.num_experts * 4, saves_out=True)
    indices = tape.value(mlp.top_k * 40, needs_grad=False)  # ids, order, inverse: int64 and fp32
    weights = tape.op((probs,), mlp.top_k * 4, saves=(indices,))
    tape.drop(probs)
    out = _experts(p, x, layer, hidden, weights)
    tape.drop(weights, indices, logits)
    if width != s.act:
        out = p.cast(out, hidden * width)
    shared = [m for m in layer.modules if m.kind in LINEARS and is_mlp(m, layer)]
    if len(shared) < 2 or not mlp.shared_intermediate:
        return out
    kind = MlpKind.GATED if mlp.expert_gated else MlpKind.PLAIN
    dense = replace(mlp, kind=kind, intermediate=mlp.shared_intermediate)
    fed = mlp_block(p, x, replace(layer, mlp=dense), width)
    total = tape.add(out, fed, hidden * width)
    tape.drop(out, fed)
    return total


def _experts(p: Program, x: Value, layer: LayerSpec, hidden: int, weights: Value) -> Value:
    """Record gather, two grouped matmuls, weighting and the sum over a token's experts."""
    s, tape, mlp = p.s, p.tape, layer.mlp
    wide, narrow = mlp.top_k * hidden * s.act, mlp.top_k * mlp.intermediate * s.act
    count = sum(m.weight_parameters for m in layer.modules if m.kind is ModuleKind.EXPERTS)
    parts = 3 if mlp.expert_gated else 2
    held: list[Value] = []
    rows = tape.op((x,), wide)
    both = _grouped(p, rows, (parts - 1) * narrow, count * (parts - 1) // parts, "in", held)
    if mlp.expert_gated:
        product = _gated(p, both, narrow, mlp.activation)
    else:
        product = _activation(p, both, narrow, mlp.activation)
    down = _grouped(p, product, wide, count // parts, "out", held)
    tape.drop(product)
    weighted = tape.op((down, weights), wide, saves=(down, weights), scratch=wide)
    ordered = tape.op((weighted,), wide)
    tape.drop(weighted)
    out = tape.op((ordered,), hidden * s.act)
    tape.drop(ordered, down, rows, *held)
    return out


def _grouped(
    p: Program, x: Value, per_token: float, count: int, side: str, held: list[Value]
) -> Value:
    """Record one grouped matmul over fused expert weights of `count` elements.

    PEFT adapts fused experts by making W + BA whole: a second copy of the weight, cached while the
    experts run (`held`), and a gradient of its size in backward.
    """
    s, tape = p.s, p.tape
    if not s.expert_adapters:
        return tape.op(
            (x,),
            per_token,
            saves=(x,) if s.full else (),
            weight_grad=count * s.grad if s.full else 0,
        )
    share = s.expert_adapters * (2 if side == "in" else 1) // 3
    factors = tape.value(0, share * s.act, needs_grad=False)
    merged = tape.op((), 0, count * s.act, saves=(factors,), weight_grad=share * s.adapter)
    out = tape.op((x, merged), per_token, saves=(x, merged))
    tape.drop(factors)
    held.append(merged)
    return out


def recurrent(p: Program, x: Value, layer: LayerSpec, width: int) -> Value:
    """Record Mamba or linear attention with its fused kernels (mamba-ssm, flash-linear-attention).

    The kernels save the projections and their own output and recompute the rest in backward.
    """
    tape = p.tape
    ins, out_module = mixer_linears(layer)
    inner = (layer.mixer.inner_dim or x.size / width) * p.s.act
    parts = tuple(p.linear(x, module, width) for module in ins[:2])
    mixed = tape.op(parts, inner, saves=parts, scratch=sum(part.size for part in parts))
    tape.drop(*parts)
    scanned = tape.op((mixed,), inner, saves=(mixed,), scratch=inner)
    tape.drop(mixed)
    if out_module is None:
        return scanned
    out = p.linear(scanned, out_module, p.s.act)
    tape.drop(scanned)
    return out


def run_layer(p: Program, x: Value, layer: LayerSpec, hidden: int) -> Value:
    """Record one decoder layer on `x`; the caller drops `x`."""
    width = p.s.residual
    # under autocast layer norms answer in fp32
    wide = 4 if p.s.norm == "layernorm" and p.s.autocast else width
    if layer.parallel:
        return _parallel(p, x, layer, hidden, wide)
    if layer.mlp.kind is MlpKind.NONE or layer.mixer.kind is MixerKind.NONE:
        return _single(p, x, layer, hidden, wide)
    before, after = norm_places(layer)
    middle = _block(p, x, layer, hidden, wide, _mix, before=before, after=after)
    out = _block(p, middle, layer, hidden, wide, _channel, before=before, after=after)
    p.tape.drop(middle)
    return out


Part = Callable[[Program, Value, LayerSpec, int, int], Value]


def norm_places(layer: LayerSpec) -> tuple[bool, bool]:
    """Return whether a block's input and its output are normalised.

    Gemma-2 and GLM-4 have four norms: both. OLMo-2 has two, named after what they follow.
    """
    names = [m.name for m in layer.modules if m.kind is ModuleKind.NORM and "." not in m.name]
    if layer.num_norms >= 4:
        return True, True
    only_after = bool(names) and all(name.startswith("post_") for name in names)
    return not only_after, only_after


def _block(
    p: Program,
    x: Value,
    layer: LayerSpec,
    hidden: int,
    wide: int,
    part: Part,
    *,
    before: bool,
    after: bool,
) -> Value:
    """Record x + norm(part(norm(x)))."""
    tape, width = p.tape, p.s.residual
    normed = p.norm(x, width, hidden) if before else x
    out = part(p, normed, layer, hidden, wide if before else width)
    if normed is not x:
        tape.drop(normed)
    if after:
        raw, out = out, p.norm(out, width, hidden)
        tape.drop(raw)
    out = _dropout(p, out, hidden)
    summed = tape.add(x, out, hidden * width)
    tape.drop(out)
    return summed


def _dropout(p: Program, x: Value, hidden: int) -> Value:
    """Record the residual dropout of older families; `x` is dropped."""
    if not p.s.hidden_dropout:
        return x
    mask = p.tape.value(hidden, needs_grad=False)  # one byte an element
    out = p.tape.op((x,), x.size, saves=(mask,))
    p.tape.drop(mask, x)
    return out


def _single(p: Program, x: Value, layer: LayerSpec, hidden: int, wide: int) -> Value:
    """Record a layer that is a mixer or an MLP alone (Mamba, Nemotron-H)."""
    part = _channel if layer.mixer.kind is MixerKind.NONE else _mix
    return _block(p, x, layer, hidden, wide, part, before=True, after=False)


def _parallel(p: Program, x: Value, layer: LayerSpec, hidden: int, wide: int) -> Value:
    """Record x + attention(norm(x)) + mlp(norm(x))."""
    tape, width = p.tape, p.s.residual
    normed = p.norm(x, width, hidden)
    mixed = _dropout(p, _mix(p, normed, layer, hidden, wide), hidden)
    second = normed if layer.num_norms < 2 else p.norm(x, width, hidden)
    fed = _dropout(p, _channel(p, second, layer, hidden, wide), hidden)
    if second is not normed:
        tape.drop(second)
    tape.drop(normed)
    both = tape.add(mixed, fed, hidden * p.s.act)
    tape.drop(mixed, fed)
    out = tape.add(both, x, hidden * width)
    tape.drop(both)
    return out


def _mix(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    if layer.side_mixer is not None:
        main, side = _sides(layer)
        first = _mix(p, x, main, hidden, width)
        second = _mix(p, x, side, hidden, width)
        both = p.tape.add(first, second, hidden * width)
        p.tape.drop(first, second)
        return both
    if layer.mixer.kind in (MixerKind.LINEAR, MixerKind.MAMBA):
        return recurrent(p, x, layer, width)
    return attention(p, x, layer, width)


def _sides(layer: LayerSpec) -> tuple[LayerSpec, LayerSpec]:
    """Return a layer with two mixers as two layers with one each."""
    assert layer.side_mixer is not None
    recurrent_side = tuple(m for m in layer.modules if m.name.startswith("mamba"))
    rest = tuple(m for m in layer.modules if m not in recurrent_side)
    main = replace(layer, side_mixer=None, modules=rest)
    return main, replace(main, mixer=layer.side_mixer, modules=recurrent_side)


def tiled_mlp(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    """Record an MLP run in tiles of tokens: only its input is kept, one tile works at a time."""
    inside = p.s._replace(mlp_tile=0, input_grad=True)
    forward, again = Tape(grad_enabled=False), Tape()
    size = hidden * width
    mlp_block(Program(forward, inside), forward.value(size), layer, width)
    part = again.value(size)
    out = mlp_block(Program(again, inside), part, layer, width)
    again.drop(out)
    again.start_backward(out, out.size)
    again.run()
    tokens = p.s.mlp_tile
    busy = largest(envelope(again.points), tokens)
    grads = max(point.weight_grads for point in again.points)
    running = largest(envelope(forward.points), tokens).at(tokens)
    return p.tape.op(
        (x,),
        out.size,
        saves=(x,),
        weight_grad=grads,
        weight_scratch=max(running, busy.at(tokens)),
    )


def _channel(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    if p.s.mlp_tile and layer.mlp.kind is not MlpKind.MOE:
        return tiled_mlp(p, x, layer, hidden, width)
    if layer.mlp.kind is MlpKind.MOE:
        return moe_block(p, x, layer, hidden, width)
    return mlp_block(p, x, layer, width)
