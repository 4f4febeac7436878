"""What all kinds of attention share: projections, rotation, scores, and keys and values in the cache."""

from collections.abc import Callable
from typing import NamedTuple

from planner.layer.attention import Shape, attend
from planner.layer.program import Program
from planner.layer.tape import Value
from planner.mixers.mixer import Linears, Pages, Record
from planner.models.spec import LayerSpec, MixerKind, MixerSpec

ROOTS = frozenset(
    {
        "self_attn",
        "attn",
        "attention",
        "self_attention",
        "cross_attn",
        "mixer",
    }
)
"""What transformers calls an attention block inside a layer."""


class Heads(NamedTuple):
    """What attention works on."""

    q: Value
    k: Value
    v: Value
    gate: Value | None
    """Comes with the queries, and opens the output."""


Project = Callable[[Program, Value, MixerSpec, Linears, int, int], Heads]
"""(program, input, mixer, linears, input's bytes an element, those of the projections) -> heads."""


def attention_by(project: Project) -> Record:
    """Return the program of an attention block that makes its heads by `project`."""

    def record(p: Program, x: Value, layer: LayerSpec, linears: Linears, width: int) -> Value:
        s, tape, mixer = p.s, p.tape, layer.mixer
        inner = width if s.quantized else s.act
        q, k, v, gate = project(p, x, mixer, linears, width, inner)
        query = inside = rotated_width(p, inner)
        if query > s.act and (s.autocast or s.attention == "flash"):
            # autocast, or transformers for flash attention, brings fp32 queries to 16 bits
            inside = s.act
            if s.attention != "eager":  # where each product casts its own
                q, k = (p.cast(part, part.size * inside / query) for part in (q, k))
                v = p.cast(v, v.size * inside / inner) if inner != inside else v
        v_dim = mixer.v_head_dim or mixer.head_dim
        context = attend(p, q, k, v, Shape(mixer.num_heads, v_dim, inside, query, mixer.window))
        if gate is not None:
            opened = tape.op((gate,), gate.size, saves_out=True)
            gated = tape.op((context, opened), context.size, saves=(context, opened))
            tape.drop(gate, opened, context)
            context = gated
        if linears.out is None:
            return context
        out = p.linear(context, linears.out, inside)
        tape.drop(context)
        return out

    return record


def separate_heads(
    p: Program, x: Value, mixer: MixerSpec, linears: Linears, width: int, inner: int
) -> Heads:
    """Record queries, keys and values from projections of their own or one for all; rotated."""
    heads, kv = mixer.num_heads, mixer.num_kv_heads or mixer.num_heads
    v_dim = mixer.v_head_dim or mixer.head_dim
    sizes = (heads * mixer.head_dim * inner, kv * mixer.head_dim * inner, kv * v_dim * inner)
    projected = [p.linear(x, module, width) for module in linears.ins]
    q, k, v, gate = _taken_apart(p, projected, sizes, gated=mixer.gated_output)
    if mixer.qk_norm:
        q = p.normed(q, inner, mixer.head_dim * heads)
        k = p.normed(k, inner, mixer.head_dim * kv)
    wider = rotated_width(p, inner) / inner
    return Heads(p.rope(q, sizes[0] * wider), p.rope(k, sizes[1] * wider), v, gate)


def rotated_width(p: Program, inner: int) -> int:
    """Return bytes of an element of rotated queries and keys: the cosines have the stream's dtype."""
    rotates = p.s.rope and "rope" not in p.s.fused
    return max(inner, p.s.residual) if rotates else inner


def _taken_apart(
    p: Program, projected: list[Value], sizes: tuple[float, float, float], *, gated: bool
) -> Heads:
    tape, gate = p.tape, None
    if len(projected) == 1:
        q, k, v = tape.split(projected[0], sizes)
        tape.drop(projected[0])
        return Heads(q, k, v, None)
    q, k = projected[0], projected[1]
    if gated:
        both = q
        q, gate = tape.split(both, (sizes[0], both.size - sizes[0]))
        tape.drop(both)
    if len(projected) == 2:  # keys double as values
        k.storage.refs += 1
        return Heads(q, k, k, gate)
    return Heads(q, k, projected[2], gate)


attention = attention_by(separate_heads)


def keys_and_values(mixer: MixerSpec, element: float) -> float:
    """Return bytes of one token's keys and values, with the keys of an indexer beside them."""
    if mixer.kv_shared:
        return 0
    heads = mixer.num_kv_heads or mixer.num_heads
    values = 0 if mixer.shares_storage else mixer.v_head_dim or mixer.head_dim
    index = 0 if mixer.compress_ratio else mixer.index_head_dim
    return (heads * (mixer.head_dim + values) + index) * element


def own_kind(mixer: MixerSpec) -> MixerKind:
    """Return the mixer's own kind."""
    return mixer.kind


def windowed_kind(mixer: MixerSpec) -> MixerKind:
    """Return the mixer's own kind, or full attention's when it has no window."""
    return mixer.kind if mixer.window else MixerKind.FULL


def whole_length(window: int, max_model_len: int, in_flight: int) -> tuple[int, int]:
    """Return pages for every token."""
    return max_model_len, 0


def no_states(mixer: MixerSpec) -> int:
    """Return 0: it has none."""
    return 0


PAGES = Pages(kind=own_kind, own_group=False, longest=whole_length, states=no_states, divided=True)
"""A page for every so many tokens, divided by key heads."""


def nothing(mixer: MixerSpec, element: float) -> float:
    """Return 0: this part of the cache does not exist."""
    return 0


def every_token(mixer: MixerSpec, tokens: int) -> int:
    """Return `tokens`: all stay cached."""
    return tokens


def last_tokens(mixer: MixerSpec, tokens: int) -> int:
    """Return the tokens of a window, of so many; without a window all of them."""
    return min(tokens, mixer.window) if mixer.window else tokens
