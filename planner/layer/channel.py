"""The channel mixers of a decoder layer on a tape: MLPs, whole or tiled, and mixtures of experts."""

from dataclasses import replace

from planner.layer.program import Program, in_tiles
from planner.layer.tape import Value
from planner.models.lora_targets import is_mlp
from planner.models.spec import LINEARS, LayerSpec, MlpKind, ModuleKind, ModuleSpec

DOWN_LEAVES = frozenset(
    {"down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2", "fc_out", "output_linear"}
)


INTO, OUT = 0, 1
"""The sides of fused experts."""


def mlp_linears(layer: LayerSpec) -> tuple[list[ModuleSpec], ModuleSpec]:
    """Return the projections into the channel mixer, and the one out of it."""
    found = [m for m in layer.modules if m.kind in LINEARS and is_mlp(m, layer)]
    down = next((m for m in reversed(found) if m.leaf in DOWN_LEAVES), found[-1])
    return [m for m in found if m is not down], down


def _activation(p: Program, x: Value, size: float, kind: str) -> Value:
    """Record an activation function; `x` is dropped."""
    tape = p.tape
    if kind in ("gelu_new", "gelu_fast", "gelu_python"):
        # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x**3))) written out: four tensors are saved;
        # autocast takes the power, and with it all that follows, to fp32
        half = tape.op((x,), size)
        base = x
        if p.s.autocast:  # whose dtypes are 16 bit
            size *= 4 / p.s.act
            base = tape.op((x,), size)
        # pow's backward: 3 * x**2, two temporaries
        cube = tape.op((base,), size, saves=(base,), scratch=(size, size))
        if base is not x:
            tape.drop(base)
        scaled = p.cast(cube, size)
        inner = tape.op((x, scaled), size)
        tape.drop(scaled)
        inner = p.cast(inner, size)
        tanh = tape.op((inner,), size, saves_out=True)
        tape.drop(inner)
        one = p.cast(tanh, size)
        # the half's gradient is made as wide as the product, then cast: with what the node saved
        # still there, unless a checkpoint gave it back
        widened = size if half.size != size else 0
        if widened and tape.recomputed:
            widened -= half.size
        out = tape.op((half, one), size, saves=(half, one), scratch=widened)
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
    if not mlp.shared_intermediate:
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
    up, down_bias = _biases(layer, mlp.top_k * s.act)
    both = _grouped(p, rows, (parts - 1) * narrow, count * (parts - 1) // parts, INTO, held)
    bias = tape.value(up, needs_grad=False)  # a row for every row, added in place
    if mlp.activation == "clamped_swiglu":
        product = _clamped(p, both, narrow)
    elif mlp.expert_gated:
        product = _gated(p, both, narrow, mlp.activation)
    else:
        product = _activation(p, both, narrow, mlp.activation)
    second = tape.value(down_bias, needs_grad=False)
    tape.drop(bias)
    down = _grouped(p, product, wide, count // parts, OUT, held)
    tape.drop(product)
    each = 4 / s.act if mlp.routing_fp32 else 1
    weighted = tape.op((down, weights), wide * each, saves=(down, weights), scratch=wide)
    ordered = tape.op((weighted,), wide * each)
    tape.drop(weighted)
    out = _summed(p, ordered, wide * 4 / s.act, hidden)
    tape.drop(ordered, down, second, rows, *held)
    return out


def _biases(layer: LayerSpec, rows: int) -> tuple[int, int]:
    """Return bytes per token of the experts' biases gathered for every row: in, out."""
    sizes = [
        rows * shape[-1]
        for module in layer.modules
        if module.kind is ModuleKind.EXPERTS
        for shape in module.shapes
        if len(shape) == 2
    ]
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (0, 0)


def _clamped(p: Program, both: Value, size: float) -> Value:
    """Record gpt-oss: gate and up clamped, gate * sigmoid(alpha * gate) * (up + 1); `both` is dropped.

    modeling_gpt_oss.py, GptOssExperts._apply_gate; both halves are strided views, whose gradients are whole.
    """
    tape = p.tape
    gate = tape.op((both,), size, saves=(both,), scratch=2 * size)
    up = tape.op((both,), size, saves=(both,), scratch=2 * size)
    scaled = tape.op((gate,), size)
    opened = tape.op((scaled,), size, saves_out=True)
    tape.drop(scaled)
    glu = tape.op((gate, opened), size, saves=(gate, opened))
    tape.drop(opened)
    more = tape.op((up,), size)
    out = tape.op((more, glu), size, saves=(more, glu))
    tape.drop(more, glu, gate, up, both)
    return out


def _summed(p: Program, ordered: Value, full: float, hidden: int) -> Value:
    """Record the sum over a token's experts; autocast takes sums, and with them all rows, to fp32.

    torch aten/src/ATen/autocast_mode.h, AT_FORALL_FP32_SET_OPT_DTYPE.
    """
    s, tape = p.s, p.tape
    if s.act == 4 or (ordered.size < full and not s.autocast):
        return tape.op((ordered,), hidden * s.act)
    if ordered.size == full:
        return p.cast(tape.op((ordered,), hidden * 4), hidden * s.act)
    copies = tape.op((ordered,), full)
    copies.size = 0  # the sum hands its gradient on as an expanded view
    total = tape.op((copies,), hidden * 4)
    tape.drop(copies)
    return p.cast(total, hidden * s.act)


def _grouped(
    p: Program, x: Value, per_token: float, count: int, side: int, held: list[Value]
) -> Value:
    """Record one grouped matmul over fused expert weights of `count` elements.

    PEFT adapts fused experts by making W + BA whole: a second copy of the weight, cached while the
    experts run (`held`), and a gradient of its size in backward.
    """
    s, tape = p.s, p.tape
    share = s.expert_adapters[side]
    if not share:
        return tape.op(
            (x,),
            per_token,
            saves=(x,) if s.full else (),
            weight_grad=count * s.grad if s.full else 0,
        )
    factors = tape.value(0, share * s.act, needs_grad=False)
    merged = tape.op((), 0, count * s.act, saves=(factors,), weight_grad=share * s.adapter)
    out = tape.op((x, merged), per_token, saves=(x, merged))
    tape.drop(factors)
    held.append(merged)
    return out


def channel(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    if p.s.mlp_tile and layer.mlp.kind is not MlpKind.MOE:
        return in_tiles(p, x, p.s.mlp_tile, lambda q, part: mlp_block(q, part, layer, width))
    if layer.mlp.kind is MlpKind.MOE:
        return moe_block(p, x, layer, hidden, width)
    return mlp_block(p, x, layer, width)
