"""The blocks of a decoder layer on a tape: attention, latent attention, recurrent mixers, MLPs, experts.

Follows transformers 5.x modelling code, operation by operation.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.layer.channel import channel
from planner.layer.program import LINEARS, Program
from planner.layer.tape import Value
from planner.models.lora_targets import is_attention
from planner.models.spec import LayerSpec, MixerKind, MixerSpec, MlpKind, ModuleKind, ModuleSpec

OUT_LEAVES = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "output_proj"})
LATENT = "kv_a_proj_with_mqa"


def mixer_linears(layer: LayerSpec) -> tuple[list[ModuleSpec], ModuleSpec | None]:
    """Return the projections into the token mixer, and the one out of it."""
    found = [m for m in layer.modules if m.kind in LINEARS and is_attention(m, layer)]
    out = next((m for m in reversed(found) if m.leaf in OUT_LEAVES), None)
    return [m for m in found if m is not out], out


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
    out = _block(p, middle, layer, hidden, wide, channel, before=before, after=after)
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
    part = channel if layer.mixer.kind is MixerKind.NONE else _mix
    return _block(p, x, layer, hidden, wide, part, before=True, after=False)


def _parallel(p: Program, x: Value, layer: LayerSpec, hidden: int, wide: int) -> Value:
    """Record x + attention(norm(x)) + mlp(norm(x))."""
    tape, width = p.tape, p.s.residual
    normed = p.norm(x, width, hidden)
    mixed = _dropout(p, _mix(p, normed, layer, hidden, wide), hidden)
    second = normed if layer.num_norms < 2 else p.norm(x, width, hidden)
    fed = _dropout(p, channel(p, second, layer, hidden, wide), hidden)
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
