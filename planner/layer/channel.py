"""The channel mixers of a decoder layer on a tape: MLPs; experts.py has the mixtures."""

from planner.layer.program import Program
from planner.layer.tape import Op, Value
from planner.models.lora_targets import is_mlp
from planner.models.spec import LINEARS, LayerSpec, MlpKind, ModuleSpec

DOWN_LEAVES = frozenset(
    {"down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2", "fc_out", "output_linear"}
)


def mlp_linears(layer: LayerSpec) -> tuple[list[ModuleSpec], ModuleSpec]:
    """Return the projections into the channel mixer, and the one out of it."""
    found = [m for m in layer.modules if m.kind in LINEARS and is_mlp(m, layer)]
    down = next((m for m in reversed(found) if m.leaf in DOWN_LEAVES), found[-1])
    return [m for m in found if m is not down], down


def activation(p: Program, x: Value, size: float, kind: str) -> Value:
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
        product = activation(p, first, size, mlp.activation)
    elif mlp.fused_gate_up:
        product = gated(p, first, size, mlp.activation)
    elif "swiglu" in s.fused:
        up = p.linear(x, ins[1], width)
        product = tape.op((first, up), size, saves=(first, up), kind=Op.KERNEL)
        tape.drop(first, up)
    else:
        activated = activation(p, first, size, mlp.activation)
        up = p.linear(x, ins[1], width)
        product = tape.op((activated, up), size, saves=(activated, up))
        tape.drop(activated, up)
    # gelu_new leaves fp32 behind under autocast
    out = p.linear(product, down, max(inner, round(product.size / mlp.intermediate)))
    tape.drop(product)
    return out


def gated(p: Program, both: Value, size: float, kind: str) -> Value:
    """Record act(gate) * up where both come from one linear; `both` is dropped."""
    tape = p.tape
    gate, up = tape.split(both, (size, size))
    tape.drop(both)
    if "swiglu" in p.s.fused:
        product = tape.op((gate, up), size, saves=(gate, up), kind=Op.KERNEL)
        tape.drop(gate, up)
        return product
    activated = activation(p, gate, size, kind)
    product = tape.op((up, activated), size, saves=(up, activated))
    tape.drop(up, activated)
    return product
