"""The forward code of one decoder layer, operation by operation, run on a tape of sizes.

Follows transformers 5.x modelling code, PEFT's LoRA layers and bitsandbytes' Linear4bit: which
tensors each operation saves, which casts make copies, and what its backward allocates.
"""

from collections.abc import Callable
from dataclasses import replace
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
    expert_adapters: int = 0
    """LoRA elements on the fused experts of one layer."""
    attention: str = "sdpa"
    seq: int = 0
    """Tokens per sequence; only eager attention needs it."""
    repeat_kv: bool = False
    """The flash path of old code repeats keys and values for every query head."""
    masked: bool = False
    """Padding: an attention mask is there, so SDPA repeats keys and values for its heads."""
    norm: str = "rmsnorm"
    rope: bool = True
    """Queries and keys are rotated (not with learned or ALiBi positions)."""
    hidden_dropout: bool = False
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
    recompute_fetched: Envelope
    """The same with an input that came back from the host, while something needs it."""
    keeps_input: bool
    """Something in the layer saved its input itself (an fp32 residual stream)."""
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
            # kept as an attribute of the autograd node: freed with the graph, not with the node
            inner.storage.refs += 1
        out = tape.op(
            (inner,),
            rows * s.act,
            saves=(*saves, weight_copy) if weight_copy else saves,
            saves_out=s.saved_output,
            weight_grad=module.parameters * s.grad if s.full else 0,
            weight_scratch=count * s.act if s.quantized else 0,
            view_grad=not s.quantized,
        )
        if weight_copy:
            tape.drop(weight_copy)
        if cast:
            tape.drop(inner)
        if s.quantized and width != s.act:
            out = self.cast(out, rows * width)
        return self._lora(x, out, module, width) if module.leaf in s.adapted else out

    def linear_like(self, x: Value, per_token: float, count: int) -> Value:
        """Record a small matrix that is a bare parameter (a router): never quantised or adapted."""
        s = self.s
        return self.tape.op(
            (x,),
            per_token,
            saves=(x,) if s.full else (),
            weight_grad=count * s.grad if s.full else 0,
            view_grad=True,
        )

    def cast(self, x: Value, per_token: float) -> Value:
        """Record a copy of `x` in another size; `x` is dropped."""
        out = self.tape.op((x,), per_token)
        self.tape.drop(x)
        return out

    def _lora(self, x: Value, base: Value, module: ModuleSpec, width: int) -> Value:
        """Record PEFT's base(x) + B(A(dropout(x))) * scaling; `base` is dropped."""
        s, tape = self.s, self.tape
        rows, columns = module.out_features, module.in_features
        fused = "lora" in s.fused
        inside = s.act if s.autocast or fused else s.adapter
        held: list[Value] = []
        if s.quantized:
            base = self.cast(base, base.size)  # PEFT clones what a 4-bit layer returns
        inner = x
        peft_casts = not fused and s.adapter != width and not (s.quantized and s.autocast)
        if peft_casts:
            inner = tape.op((x,), columns * s.adapter)
            held.append(inner)  # PEFT's own variable, until its forward returns
        passing: list[Value] = []
        if s.dropout:
            mask = tape.value(columns, needs_grad=False)  # one byte an element
            inner = tape.op((inner,), inner.size, saves=(mask,))
            tape.drop(mask)
            passing.append(inner)
        if inside != inner.size / columns:
            inner = tape.op((inner,), columns * inside)  # autocast
            passing.append(inner)
        low = self._adapter((inner,), s.rank * columns, s.rank * inside)
        tape.drop(*passing)
        high = self._adapter((low,), s.rank * rows, rows * inside)
        tape.drop(low)
        scaled = self.cast(high, rows * inside)
        out = self._sum(base, scaled)
        tape.drop(*held)
        return out

    def _adapter(self, inputs: tuple[Value, ...], count: int, per_token: float) -> Value:
        """Record one adapter matrix of `count` elements."""
        s, tape = self.s, self.tape
        saves = inputs
        if s.autocast and s.adapter != s.act:
            saves = (*inputs, tape.value(0, count * s.act, needs_grad=False))
        out = tape.op(inputs, per_token, saves=saves, weight_grad=count * s.adapter, view_grad=True)
        tape.drop(*saves[1:])
        return out

    def _sum(self, base: Value, update: Value) -> Value:
        """Record base + update in the layer's dtype; both are dropped."""
        tape, size = self.tape, base.size
        if self.s.quantized and update.size != size and not self.s.autocast:
            update = self.cast(update, size)  # PEFT casts before it adds
        if update.size == size:
            out = tape.add(base, update, size)
            tape.drop(base, update)
            return out
        # torch promotes: the sum is as wide as the wider, then goes back to the layer's dtype
        total = tape.op((base, update), max(size, update.size))
        tape.drop(base, update)
        return total if total.size == size else self.cast(total, size)

    def norm(self, x: Value, width: int, features: int) -> Value:
        """Record a norm over `features` elements of `width` bytes."""
        s, tape = self.s, self.tape
        weight_grad = features * s.grad if s.full else 0
        if s.norm == "layernorm":
            # native layer norm, in fp32 under autocast: saves its input and two statistics
            if s.autocast and width != 4:
                wide = tape.op((x,), features * 4)
                out = self._fused_norm(wide, features * 4, 2 * weight_grad)
                tape.drop(wide)
                return out
            return self._fused_norm(x, features * width, 2 * weight_grad)
        if "rmsnorm" in s.fused:
            return self._fused_norm(x, features * width, weight_grad)
        return self._rms_norm(x, width, features, weight_grad)

    def _fused_norm(self, x: Value, size: float, weight_grad: int) -> Value:
        statistics = self.tape.value(8, needs_grad=False)
        out = self.tape.op((x,), size, saves=(x, statistics), weight_grad=weight_grad)
        self.tape.drop(statistics)
        return out

    def _rms_norm(self, x: Value, width: int, features: int, weight_grad: int) -> Value:
        """Record transformers' RMS norm: to fp32, normalise, scale (Gemma scales in fp32)."""
        s, tape = self.s, self.tape
        wide, cast, gemma = x, width != 4, s.norm == "rmsnorm_gemma"
        if cast:
            wide = tape.op((x,), features * 4)
        squares = tape.op((wide,), features * 4, saves=(wide,), scratch=features * 8)
        mean = tape.op((squares,), 4)
        tape.drop(squares)
        rstd = tape.op((mean,), 4, saves_out=True)
        tape.drop(mean)
        normed = tape.op((wide, rstd), features * 4, saves=(wide, rstd), scratch=features * 4)
        tape.drop(rstd)
        if cast:
            tape.drop(wide)
        narrow = tape.op((normed,), features * width) if cast and not gemma else normed
        size = features * (4 if gemma else width)
        out = tape.op(
            (narrow,),
            size,
            saves=(narrow,) if s.full else (),
            scratch=size if s.full else 0,
            weight_grad=weight_grad,
        )
        if narrow is not normed:
            tape.drop(narrow)
        if gemma and cast:
            out = self.cast(out, features * width)
        tape.drop(normed)  # a variable of the norm's forward: alive until it returns
        return out

    def rope(self, x: Value, size: float) -> Value:
        """Record x*cos + rotate_half(x)*sin."""
        tape = self.tape
        if "rope" in self.s.fused or not self.s.rope:
            return x
        cosine = tape.op((x,), size)
        turned = tape.op((x,), size, forward_scratch=size / 2, scratch=size)
        sine = tape.op((turned,), size)
        tape.drop(turned)
        out = tape.add(cosine, sine, size)
        tape.drop(cosine, sine, x)
        return out

    def sdpa(self, q: Value, k: Value, v: Value, heads: int, v_dim: int, width: int) -> Value:
        """Record scaled dot-product attention on elements of `width` bytes; q, k, v are dropped."""
        s, tape = self.s, self.tape
        out_size = heads * v_dim * width
        if s.attention == "eager":
            return self._eager(q, k, v, heads, out_size, width)
        if (s.repeat_kv or (s.masked and s.attention == "sdpa")) and k.size != q.size:
            k = self.cast(k, q.size)
            v = self.cast(v, out_size)
        lse = tape.value(heads * 4, needs_grad=False)
        # the backward kernel accumulates dq in fp32
        out = tape.op(
            (q, k, v),
            out_size,
            saves=(q, k, v, lse),
            saves_out=True,
            scratch=q.size * 4 / width,
        )
        tape.drop(q, k, v, lse)
        return out

    def _eager(
        self, q: Value, k: Value, v: Value, heads: int, out_size: float, width: int
    ) -> Value:
        """Record transformers' eager_attention_forward: scores of [heads, T, T] in full."""
        tape = self.tape
        row = heads * self.s.seq
        if k.size != q.size:
            k, v = self.cast(k, q.size), self.cast(v, out_size)
        scores = tape.op((q, k), row * width, saves=(q, k))
        scaled = self.cast(scores, row * width)
        masked = self.cast(scaled, row * width)
        soft = tape.op((masked,), row * 4, saves_out=True)
        tape.drop(masked)
        narrow = self.cast(soft, row * width) if width != 4 else soft
        out = tape.op((narrow, v), out_size, saves=(narrow, v))
        tape.drop(narrow, q, k, v)
        return self.cast(out, out_size)


def _by_leaf(layer: LayerSpec) -> dict[str, ModuleSpec]:
    return {module.name: module for module in layer.modules if module.kind in _LINEARS}


_LINEARS = (ModuleKind.LINEAR, ModuleKind.CONV1D)
OUT_LEAVES = frozenset({"o_proj", "out_proj", "c_proj", "dense", "wo", "output_proj"})
DOWN_LEAVES = frozenset(
    {"down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2", "fc_out", "output_linear"}
)


def _is_mlp(module: ModuleSpec) -> bool:
    first = module.name.split(".", 1)[0]
    return (
        first in ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "fc1", "fc2")
        or ".mlp." in module.name
        # Nemotron-H names every layer's only part "mixer"
        or (first == "mixer" and module.leaf in ("up_proj", "down_proj"))
    )


def _attention(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    """Record an attention block: projections, rope, attention, output projection."""
    s, tape, mixer = p.s, p.tape, layer.mixer
    inner = width if s.quantized else s.act
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
    inside = inner
    if inner > s.act and (s.autocast or s.attention == "flash"):
        # autocast, or transformers for flash attention, brings fp32 queries to 16 bits
        inside = s.act
        q, k, v = (p.cast(x, x.size * inside / inner) for x in (q, k, v))
    context = p.sdpa(q, k, v, heads, v_dim, inside)
    if out_module is None:
        return context
    out = p.linear(context, out_module, inside)
    tape.drop(context)
    return out


def _qk_norm(p: Program, x: Value, features: int, width: int) -> Value:
    out = p.norm(x, width, features)
    p.tape.drop(x)
    return out


def _activation(p: Program, x: Value, size: float, kind: str) -> Value:
    """Record an activation function; `x` is dropped."""
    tape = p.tape
    if kind in ("gelu_new", "gelu_fast", "gelu_python"):
        # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x**3))) written out: four tensors are saved
        half = tape.op((x,), size)
        cube = tape.op((x,), size, saves=(x,))
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


def _mlp(p: Program, x: Value, layer: LayerSpec, width: int) -> Value:
    """Record a dense MLP."""
    s, tape, mlp = p.s, p.tape, layer.mlp
    inner = width if s.quantized else s.act
    modules = [m for m in layer.modules if m.kind in _LINEARS and _is_mlp(m)]
    ins = [m for m in modules if m.leaf not in DOWN_LEAVES]
    down = next(m for m in modules if m.leaf in DOWN_LEAVES)
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
    out = p.linear(product, down, inner)
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


def _moe(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
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
    shared = [m for m in layer.modules if m.kind in _LINEARS and _is_mlp(m)]
    if len(shared) < 2 or not mlp.shared_intermediate:
        return out
    kind = MlpKind.GATED if mlp.expert_gated else MlpKind.PLAIN
    dense = replace(mlp, kind=kind, intermediate=mlp.shared_intermediate)
    fed = _mlp(p, x, replace(layer, mlp=dense), width)
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
    if layer.mixer.kind in (MixerKind.FULL, MixerKind.SLIDING, MixerKind.CHUNKED):
        return _attention(p, x, layer, hidden, width)
    return _generic_mixer(p, x, layer, hidden, width)


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
    kept, forward, backward, keeps_input = _graph(layer, hidden, settings)
    return LayerCosts(
        kept,
        forward,
        envelope(plain.points),
        backward,
        _recompute(layer, hidden, settings, fetched=False),
        _recompute(layer, hidden, settings, fetched=True),
        keeps_input,
        width,
    )


def _graph(
    layer: LayerSpec, hidden: int, settings: OpSettings
) -> tuple[Point, Envelope, Envelope, bool]:
    """Run forward and backward with everything kept."""
    tape = Tape(keep_weight_grads=not settings.accumulate)
    x = tape.value(hidden * settings.residual, needs_grad=settings.input_grad)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(x, out)
    forward, kept, keeps_input = envelope(tape.points), tape.now(), x.storage.refs > 0
    tape.points.clear()
    tape.start_backward(out, hidden * settings.residual)
    tape.run()
    return kept, forward, envelope(tape.points), keeps_input


def _recompute(layer: LayerSpec, hidden: int, settings: OpSettings, *, fetched: bool) -> Envelope:
    """Run a checkpointed layer's backward: non-reentrant, stopping early, as torch does.

    Backward starts on nodes that saved nothing; the first that needs a saved tensor makes the
    forward run again up to the last tensor that anything saved. The stored input is left out;
    if it was `fetched` from the host it is counted, and freed when nothing saved it.
    """
    width = hidden * settings.residual
    tape = Tape(keep_weight_grads=not settings.accumulate)
    x = tape.value(width)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(out, x) if fetched else tape.drop(out)
    counted = 0 if fetched else width
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
    points = [Point(p.per_token + waiting - counted, *p[1:]) for p in again]
    tape.points.clear()
    tape.run()
    rest = [Point(p.per_token - counted, *p[1:]) for p in tape.points]
    return envelope(early + points + rest)
