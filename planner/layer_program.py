"""The forward code of one decoder layer, operation by operation, run on a tape of sizes.

Follows transformers 5.x modelling code, PEFT's LoRA layers and bitsandbytes' Linear4bit: which
tensors each operation saves, which casts make copies, and what its backward allocates.
"""

from typing import NamedTuple

from planner.model import LayerSpec, MixerKind, MlpKind, ModuleKind, ModuleSpec
from planner.tape import Envelope, Point, Tape, Value, envelope


class OpSettings(NamedTuple):
    """What decides the sizes inside a layer; hashable, so results are cached on it."""

    full: bool = False
    """All weights are trained."""
    adapted: frozenset[str] = frozenset()
    """Leaf names of the linears that have LoRA."""
    rank: int = 0
    act: int = 2
    """Bytes of an element inside linears and attention."""
    residual: int = 2
    """Bytes of an element of the hidden stream."""
    weight: int = 2
    """Bytes of an element of linear weights; differs from `act` only under autocast."""
    autocast: bool = False
    adapter: int = 4
    """Bytes of an adapter element."""
    grad: int = 2
    """Bytes of a weight gradient's element."""
    norm_weight: int = 2
    quantized: bool = False
    saved_output: bool = False
    """Every linear's output meets a trained scale (adapter_v2, IA3) and is kept."""
    saved_input: int = 0
    """Old bitsandbytes keeps the input of a frozen quantised linear; bytes per element."""
    dropout: bool = False
    dora: bool = False
    attention: str = "sdpa"
    seq: int = 0
    """Tokens per sequence; only eager attention needs it."""
    repeat_kv: bool = False
    """The flash path of old code repeats keys and values for every query head."""
    masked: bool = False
    """Padding: an attention mask is there, so SDPA repeats keys and values for its heads."""
    norm: str = "rmsnorm"
    fused: frozenset[str] = frozenset()
    """Fused kernels: rmsnorm, swiglu, rope, lora, moe."""
    input_grad: bool = True
    """The layer's input needs a gradient; not the first layer's of a frozen model, unless asked."""
    accumulate: bool = False
    """Gradients exist already: new ones are added and freed."""


class LayerCosts(NamedTuple):
    """Bytes of one layer, as envelopes over the number of tokens."""

    kept: Point
    """What its graph holds after the forward; its input too, if something saved it."""
    forward: Envelope
    """Forward with gradients on, the layer's input included."""
    no_grad: Envelope
    """Forward without a graph (checkpointed, scoring), the layer's input included."""
    backward: Envelope
    """Backward from the kept state: what is kept and the incoming gradient included."""
    recompute: Envelope
    """Recompute and backward under checkpointing, without the stored input."""
    weight_grads: int
    """Bytes of the layer's weight gradients."""
    input_per_token: float


class Program:
    """Runs the operations of one layer on a tape."""

    def __init__(self, tape: Tape, settings: OpSettings) -> None:
        self.tape = tape
        self.s = settings

    def linear(self, x: Value, module: ModuleSpec, width: int) -> Value:
        """Record a linear layer whose input has `width` bytes per element, LoRA included."""
        s, tape = self.s, self.tape
        rows, columns = module.out_features, module.in_features
        count = module.weight_parameters
        inner, cast = x, False
        if width != s.act and (s.autocast or s.quantized):
            inner, cast = tape.op((x,), columns * s.act), True
        weight_copy = None
        if s.autocast and s.weight != s.act and not s.quantized:
            # autocast's copy of the weight is what autograd saves
            weight_copy = tape.value(0, count * s.act, needs_grad=False)
        saves = (inner,) if s.full else ()
        if s.quantized and s.saved_input:
            if s.saved_input != inner.size / columns:
                wide = tape.op((inner,), columns * s.saved_input)
                inner, cast = wide, True
            saves = (inner,)
        out = tape.op(
            (inner,),
            rows * s.act,
            saves=(*saves, weight_copy) if weight_copy else saves,
            saves_out=s.saved_output,
            weight_grad=count * s.grad if s.full else 0,
            weight_scratch=count * s.act if s.quantized else 0,
        )
        if weight_copy:
            tape.drop(weight_copy)
        if cast:
            tape.drop(inner)
        if s.quantized and width != s.act:
            out = self._cast(out, rows * width)
        return self._lora(x, out, module, width) if module.leaf in s.adapted else out

    def _cast(self, x: Value, per_token: float) -> Value:
        out = self.tape.op((x,), per_token)
        self.tape.drop(x)
        return out

    def _lora(self, x: Value, base: Value, module: ModuleSpec, width: int) -> Value:
        s, tape = self.s, self.tape
        rows, columns = module.out_features, module.in_features
        fused = "lora" in s.fused
        inside = s.act if s.autocast or fused else s.adapter
        cast = x
        if not fused and s.adapter != width:
            cast = tape.op((x,), columns * s.adapter)
        if s.autocast and not fused and s.adapter != s.act:
            narrowed = tape.op((cast,), columns * s.act)
            if cast is not x:
                tape.drop(cast)
            cast = narrowed
        if s.dropout:
            mask = tape.value(columns, needs_grad=False)  # one byte an element
            dropped = tape.op((cast,), columns * inside, saves=(mask,))
            tape.drop(mask)
            if cast is not x:
                tape.drop(cast)
            cast = dropped
        low = tape.op(
            (cast,), s.rank * inside, saves=(cast,), weight_grad=s.rank * columns * s.adapter
        )
        high = tape.op((low,), rows * inside, saves=(low,), weight_grad=s.rank * rows * s.adapter)
        tape.drop(low)
        scaled = tape.op((high,), rows * inside)
        tape.drop(high)
        if fused or inside <= base.size / rows:
            out = tape.add(base, scaled, base.size)
            tape.drop(base, scaled)
        else:
            # fp32 + bf16: the sum is fp32, then cast back to the layer's dtype
            total = tape.op((base, scaled), rows * inside)
            tape.drop(base, scaled)
            out = self._cast(total, base.size)
        if cast is not x:
            tape.drop(cast)
        return out

    def norm(self, x: Value, width: int, features: int) -> Value:
        """Record a norm over `features` elements of `width` bytes."""
        s, tape = self.s, self.tape
        size = features * width
        weight_grad = features * s.grad if s.full else 0
        if "rmsnorm" in s.fused or s.norm == "layernorm":
            wide = s.norm == "layernorm" and s.autocast
            # native layer norm saves its input and two fp32 statistics; so do the fused kernels
            return tape.op((x,), features * 4 if wide else size, saves=(x,), weight_grad=weight_grad)
        wide_x, cast = x, width != 4
        if cast:
            wide_x = tape.op((x,), features * 4)
        squares = tape.op((wide_x,), features * 4, saves=(wide_x,), scratch=features * 8)
        mean = tape.op((squares,), 4)
        tape.drop(squares)
        rstd = tape.op((mean,), 4, saves_out=True)
        tape.drop(mean)
        normed = tape.op((wide_x, rstd), features * 4, saves=(wide_x, rstd), scratch=features * 4)
        tape.drop(rstd)
        if cast:
            tape.drop(wide_x)
            normed = self._cast(normed, size)
        out = tape.op(
            (normed,),
            size,
            saves=(normed,) if s.full else (),
            scratch=size if s.full else 0,
            weight_grad=weight_grad,
        )
        tape.drop(normed)
        return out

    def rope(self, x: Value, size: float) -> Value:
        """Record x*cos + rotate_half(x)*sin."""
        tape = self.tape
        if "rope" in self.s.fused:
            return x
        cosine = tape.op((x,), size)
        turned = tape.op((x,), size, forward_scratch=size / 2, scratch=size)
        sine = tape.op((turned,), size)
        tape.drop(turned)
        out = tape.add(cosine, sine, size)
        tape.drop(cosine, sine, x)
        return out

    def sdpa(self, q: Value, k: Value, v: Value, heads: int, head_dim: int, v_dim: int) -> Value:
        """Record scaled dot-product attention; q, k and v are dropped."""
        s, tape = self.s, self.tape
        out_size = heads * v_dim * s.act
        if s.attention == "eager":
            return self._eager(q, k, v, heads, out_size)
        if (s.repeat_kv or (s.masked and s.attention == "sdpa")) and k.size != q.size:
            k = self._cast(k, q.size)
            v = self._cast(v, heads * v_dim * s.act)
        lse = tape.value(heads * 4, needs_grad=False)
        # the backward kernel accumulates dq in fp32
        out = tape.op(
            (q, k, v),
            out_size,
            saves=(q, k, v, lse),
            saves_out=True,
            scratch=heads * head_dim * 4,
        )
        tape.drop(q, k, v, lse)
        return out

    def _eager(self, q: Value, k: Value, v: Value, heads: int, out_size: float) -> Value:
        s, tape = self.s, self.tape
        row = heads * s.seq
        if k.size != q.size:
            k, v = self._cast(k, q.size), self._cast(v, out_size)
        scores = tape.op((q, k), row * s.act, saves=(q, k))
        scaled = self._cast(scores, row * s.act)
        masked = self._cast(scaled, row * s.act)
        soft = tape.op((masked,), row * 4, saves_out=True)
        tape.drop(masked)
        narrow = self._cast(soft, row * s.act) if s.act != 4 else soft
        out = tape.op((narrow, v), out_size, saves=(narrow, v))
        tape.drop(narrow, q, k, v)
        return self._cast(out, out_size)


def _by_leaf(layer: LayerSpec) -> dict[str, ModuleSpec]:
    return {module.name: module for module in layer.modules if module.kind in _LINEARS}


_LINEARS = (ModuleKind.LINEAR, ModuleKind.CONV1D)
OUT_LEAVES = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "output_proj"})
DOWN_LEAVES = frozenset({"down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2", "fc_out"})


def _is_mlp(module: ModuleSpec) -> bool:
    first = module.name.split(".", 1)[0]
    return (
        first in ("mlp", "feed_forward", "block_sparse_moe", "fc1", "fc2") or ".mlp." in module.name
    )


def _attention(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    """Record an attention block: projections, rope, attention, output projection."""
    s, tape, mixer = p.s, p.tape, layer.mixer
    inner = s.act if s.autocast or not s.quantized else width
    modules = [m for m in layer.modules if m.kind in _LINEARS and not _is_mlp(m)]
    ins = [m for m in modules if m.leaf not in OUT_LEAVES]
    out_module = next((m for m in modules if m.leaf in OUT_LEAVES), None)
    projected = [p.linear(x, module, width) for module in ins]
    heads, kv = mixer.num_heads, mixer.num_kv_heads or mixer.num_heads
    v_dim = mixer.v_head_dim or mixer.head_dim
    sizes = (heads * mixer.head_dim * inner, kv * mixer.head_dim * inner, kv * v_dim * inner)
    if len(projected) == 1:
        q, k, v = tape.split(projected[0], sizes)
        tape.drop(projected[0])
    elif len(projected) >= 3:
        q, k, v = projected[:3]
    else:
        q, k = projected[0], projected[-1]
        v = tape.value(sizes[2], needs_grad=False)
    if mixer.qk_norm:
        q, k = (
            _qk_norm(p, q, mixer.head_dim * heads, inner),
            _qk_norm(p, k, mixer.head_dim * kv, inner),
        )
    q, k = p.rope(q, sizes[0]), p.rope(k, sizes[1])
    context = p.sdpa(q, k, v, heads, mixer.head_dim, v_dim)
    if out_module is None:
        return context
    out = p.linear(context, out_module, inner)
    tape.drop(context)
    return out


def _qk_norm(p: Program, x: Value, features: int, width: int) -> Value:
    out = p.norm(x, width, features)
    p.tape.drop(x)
    return out


def _mlp(p: Program, x: Value, layer: LayerSpec, width: int) -> Value:
    """Record a dense MLP."""
    s, tape = p.s, p.tape
    inner = s.act if s.autocast or not s.quantized else width
    modules = [m for m in layer.modules if m.kind in _LINEARS and _is_mlp(m)]
    ins = [m for m in modules if m.leaf not in DOWN_LEAVES]
    down = next(m for m in modules if m.leaf in DOWN_LEAVES)
    size = layer.mlp.intermediate * inner
    first = p.linear(x, ins[0], width)
    if layer.mlp.kind is MlpKind.PLAIN:
        product = tape.op((first,), size, saves=(first,))
        tape.drop(first)
    else:
        gate, up = first, None
        if layer.mlp.fused_gate_up:
            gate, up = tape.split(first, (size, size))
            tape.drop(first)
        if up is None and "swiglu" not in s.fused:
            activated = tape.op((gate,), size, saves=(gate,))
            tape.drop(gate)
            up = p.linear(x, ins[1], width)
            product = tape.op((activated, up), size, saves=(activated, up))
            tape.drop(activated, up)
        else:
            up = up or p.linear(x, ins[1], width)
            if "swiglu" in s.fused:
                product = tape.op((gate, up), size, saves=(gate, up))
            else:
                activated = tape.op((gate,), size, saves=(gate,))
                product = tape.op((activated, up), size, saves=(activated, up))
                tape.drop(activated)
            tape.drop(gate, up)
    out = p.linear(product, down, inner)
    tape.drop(product)
    return out


def _moe(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    """Record routed experts: each token's row is copied to its top_k experts."""
    s, tape, mlp = p.s, p.tape, layer.mlp
    inner, k = s.act, mlp.top_k
    router = tape.op((x,), mlp.num_experts * 4, saves_out=True)
    count = sum(m.weight_parameters for m in layer.modules if m.kind is ModuleKind.EXPERTS)
    rows = tape.op((x,), k * hidden * inner, saves=(x,) if s.full else ())
    both = tape.op(
        (rows,),
        k * 2 * mlp.intermediate * inner,
        saves=(rows,) if s.full else (),
        weight_grad=count * s.grad * 2 // 3 if s.full else 0,
    )
    gate, up = tape.split(both, (k * mlp.intermediate * inner,) * 2)
    tape.drop(both, rows)
    activated = tape.op((gate,), k * mlp.intermediate * inner, saves=(gate,))
    product = tape.op((activated, up), k * mlp.intermediate * inner, saves=(activated, up))
    tape.drop(gate, up, activated)
    down = tape.op(
        (product,),
        k * hidden * inner,
        saves=(product,) if s.full else (),
        weight_grad=count * s.grad // 3 if s.full else 0,
    )
    tape.drop(product)
    weighted = tape.op((down, router), k * hidden * inner, saves=(down,))
    tape.drop(down, router)
    out = tape.op((weighted,), hidden * width)
    tape.drop(weighted)
    return out


def _generic_mixer(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    """Record a recurrent mixer from its projections: every one keeps its output."""
    s, tape = p.s, p.tape
    modules = [m for m in layer.modules if m.kind in _LINEARS and not _is_mlp(m)]
    outs = [m for m in modules if m.leaf in OUT_LEAVES]
    ins = [m for m in modules if m not in outs]
    parts = tuple(p.linear(x, module, width) for module in ins)
    inner = (layer.mixer.inner_dim or hidden) * s.act
    state = tape.op(parts, inner, saves=parts, scratch=inner * 2)
    tape.drop(*parts)
    if not outs:
        return state
    out = p.linear(state, outs[-1], s.act)
    tape.drop(state)
    return out


def run_layer(p: Program, x: Value, layer: LayerSpec, hidden: int) -> Value:
    """Record one decoder layer on `x`; the caller drops `x`."""
    s, tape = p.s, p.tape
    width = s.residual
    size = hidden * width
    wide = 4 if s.norm == "layernorm" and s.autocast else width
    normed = p.norm(x, width, hidden)
    if layer.mixer.kind in (MixerKind.FULL, MixerKind.SLIDING, MixerKind.CHUNKED):
        mixed = _attention(p, normed, layer, hidden, wide)
    elif layer.mixer.kind is MixerKind.NONE:
        mixed = normed
    else:
        mixed = _generic_mixer(p, normed, layer, hidden, wide)
    if mixed is not normed:
        tape.drop(normed)
    if layer.mlp.kind is MlpKind.NONE or layer.mixer.kind is MixerKind.NONE:
        if layer.mlp.kind is not MlpKind.NONE:
            mixed = _channel(p, mixed, layer, hidden, wide)
        out = tape.add(x, mixed, size)
        tape.drop(mixed)
        return out
    if layer.num_norms >= 4:
        mixed = _post_norm(p, mixed, width, hidden)
    middle = tape.add(x, mixed, size)
    tape.drop(mixed)
    normed = p.norm(middle, width, hidden)
    fed = _channel(p, normed, layer, hidden, wide)
    tape.drop(normed)
    if layer.num_norms >= 4:
        fed = _post_norm(p, fed, width, hidden)
    out = tape.add(middle, fed, size)
    tape.drop(middle, fed)
    return out


def _post_norm(p: Program, x: Value, width: int, hidden: int) -> Value:
    out = p.norm(x, width, hidden)
    p.tape.drop(x)
    return out


def _channel(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    if layer.mlp.kind is MlpKind.MOE:
        return _moe(p, x, layer, hidden, width)
    return _mlp(p, x, layer, width)


_CACHE: dict[tuple[int, int, OpSettings], tuple[LayerSpec, LayerCosts]] = {}
_CACHE_LIMIT = 20_000


def layer_costs(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerCosts:
    """Return what one layer of this kind holds and needs, as envelopes over tokens."""
    key = (id(layer), hidden, settings)
    hit = _CACHE.get(key)
    if hit is not None:
        return hit[1]
    if len(_CACHE) > _CACHE_LIMIT:
        _CACHE.clear()
    costs = _measure(layer, hidden, settings)
    _CACHE[key] = (layer, costs)  # keeps `layer` alive, so its id stays its own
    return costs


def _measure(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerCosts:
    width = hidden * settings.residual
    plain = Tape(grad_enabled=False)
    x = plain.value(width)
    run_layer(Program(plain, settings), x, layer, hidden)
    kept, forward, backward, grads = _graph(layer, hidden, settings)
    return LayerCosts(
        kept,
        forward,
        envelope(plain.points),
        backward,
        _recompute(layer, hidden, settings),
        grads,
        width,
    )


def _graph(
    layer: LayerSpec, hidden: int, settings: OpSettings
) -> tuple[Point, Envelope, Envelope, int]:
    """Run forward and backward with everything kept."""
    tape = Tape(keep_weight_grads=not settings.accumulate)
    x = tape.value(hidden * settings.residual, needs_grad=settings.input_grad)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(x, out)
    forward, kept = envelope(tape.points), tape.now()
    tape.points.clear()
    tape.start_backward(out, hidden * settings.residual)
    tape.run()
    grads = max((point.weight_grads for point in tape.points), default=0)
    return kept, forward, envelope(tape.points), grads


def _recompute(layer: LayerSpec, hidden: int, settings: OpSettings) -> Envelope:
    """Run a checkpointed layer's backward: non-reentrant, stopping early, as torch does.

    Backward starts on nodes that saved nothing; the first that needs a saved tensor makes the
    forward run again up to the last tensor that anything saved.
    """
    width = hidden * settings.residual
    tape = Tape(keep_weight_grads=not settings.accumulate)
    x = tape.value(width)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(out)
    again = tape.points[: max(tape.last_save, 1)]
    kept = tape.now()
    tape.points.clear()
    tape.start_backward(out, width)
    tape.run_until_saved()
    early = [
        Point(p.per_token - kept.per_token, p.constant - kept.constant, p.weight_grads)
        for p in tape.points
    ]
    waiting = tape.now().per_token - kept.per_token
    points = [Point(p.per_token + waiting - width, *p[1:]) for p in again]
    tape.points.clear()
    tape.run()
    rest = [Point(p.per_token - width, *p[1:]) for p in tape.points]
    return envelope(early + points + rest)
