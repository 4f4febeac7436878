"""A decoder layer on a tape: norms, its token mixer (planner/mixers), its MLP or experts (channel.py, experts.py), residuals.

Follows transformers 5.x modelling code, operation by operation.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.layer.experts import channel
from planner.layer.megatron import megatron_layer
from planner.layer.program import Program
from planner.layer.tape import Value
from planner.mixers.registry import mixer_of
from planner.models.spec import LayerSpec, MlpKind, ModuleKind


def run_layer(p: Program, x: Value, layer: LayerSpec, hidden: int) -> Value:
    """Record one decoder layer on `x`; the caller drops `x`."""
    record = megatron_layer if p.s.code == "megatron" else _layer
    out = record(p, x, layer, hidden)
    p.end_layer()
    p.tape.layer_done(out)
    return out


def _layer(p: Program, x: Value, layer: LayerSpec, hidden: int) -> Value:
    width = p.s.residual
    # under autocast layer norms answer in fp32
    wide = 4 if p.s.norm == "layernorm" and p.s.autocast else width
    if layer.parallel:
        return _parallel(p, x, layer, hidden, wide)
    if layer.mlp.kind is MlpKind.NONE or mixer_of(layer.mixer).record is None:
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
    normed = p.norm(x, width, hidden // p.s.sequence) if before else x
    normed = p.gathered(normed, hidden * (wide if before else width), keep=not before)
    out = part(p, normed, layer, hidden, wide if before else width)
    if normed is not x:
        tape.drop(normed)
    out = p.summed(out, hidden)
    if after:
        raw, out = out, p.norm(out, width, hidden // p.s.sequence)
        tape.drop(raw)
    out = _dropout(p, out, hidden)
    if layer.scaled:
        raw, size = out, max(out.size, hidden * p.s.weight)
        saves = (raw,) if p.s.full else ()
        out = tape.op((raw,), size, saves=saves, weight_grad=hidden * p.s.grad if p.s.full else 0)
        tape.drop(raw)
    summed = tape.add(x, out, p.s.stream(hidden))
    tape.drop(out)
    return summed


def _dropout(p: Program, x: Value, hidden: int) -> Value:
    """Record the residual dropout of older families; `x` is dropped."""
    if not p.s.hidden_dropout:
        return x
    mask = p.tape.value(hidden / p.s.sequence, needs_grad=False)  # one byte an element
    out = p.tape.op((x,), x.size, saves=(mask,))
    p.tape.drop(mask, x)
    return out


def _single(p: Program, x: Value, layer: LayerSpec, hidden: int, wide: int) -> Value:
    """Record a layer that is a mixer or an MLP alone (Mamba, Nemotron-H)."""
    part = channel if mixer_of(layer.mixer).record is None else _mix
    return _block(p, x, layer, hidden, wide, part, before=True, after=False)


def _parallel(p: Program, x: Value, layer: LayerSpec, hidden: int, wide: int) -> Value:
    """Record x + attention(norm(x)) + mlp(norm(x))."""
    tape, width = p.tape, p.s.residual
    normed = p.norm(x, width, hidden)
    one = layer.num_norms < 2
    early = one or any(m.name == "ln_mlp" for m in layer.modules)  # Falcon makes both norms first
    second = normed if one else p.norm(x, width, hidden) if early else None
    mixed = _dropout(p, _mix(p, normed, layer, hidden, wide), hidden)
    if second is None:
        tape.drop(normed)
        normed = second = p.norm(x, width, hidden)
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
    mixer = mixer_of(layer.mixer)
    assert mixer.record is not None
    return mixer.record(p, x, layer, mixer.linears(layer), width)


def _sides(layer: LayerSpec) -> tuple[LayerSpec, LayerSpec]:
    """Return a layer with two mixers as two layers with one each."""
    assert layer.side_mixer is not None
    recurrent_side = tuple(m for m in layer.modules if m.name.startswith("mamba"))
    rest = tuple(m for m in layer.modules if m not in recurrent_side)
    main = replace(layer, side_mixer=None, modules=rest)
    return main, replace(main, mixer=layer.side_mixer, modules=recurrent_side)
