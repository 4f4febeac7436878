"""Mixtures of experts on a tape, as transformers 5 runs them (integrations/moe.py): grouped, batched or one by one.

`OpSettings.experts` says which; see planner/run/switches.py. Only a loop over the experts depends on
how the router spreads its tokens (`OpSettings.imbalance`): a grouped matmul has all rows at once.
"""

from dataclasses import replace

from planner.layer.channel import activation, gated, mlp_block
from planner.layer.program import Program, in_tiles
from planner.layer.tape import Op, Value
from planner.models.spec import LayerSpec, MlpKind, MlpSpec, ModuleKind, ModuleSpec

INTO, OUT = 0, 1
"""The sides of fused experts."""
INDEX = 8
"""torch.where's answers are int64."""
MODULES = "modules"


def channel(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    """Record a layer's channel mixer, whole or in tiles."""
    if p.s.mlp_tile and p.s.tile_experts and layer.mlp.kind is MlpKind.MOE:
        return in_tiles(p, x, p.s.mlp_tile, lambda q, part: channel(q, part, layer, hidden, width))
    if layer.mlp.kind is MlpKind.MOE:
        return moe_block(p, x, layer, hidden, width)
    if p.s.mlp_tile:
        return in_tiles(p, x, p.s.mlp_tile, lambda q, part: mlp_block(q, part, layer, width))
    return mlp_block(p, x, layer, width)


def moe_block(p: Program, x: Value, layer: LayerSpec, hidden: int, width: int) -> Value:
    """Record router, routed experts and the shared ones: Qwen's run first, and are gated at the end."""
    s, tape, mlp = p.s, p.tape, layer.mlp
    first = _gate(layer) is not None and mlp.shared_intermediate > 0
    fed = _shared(p, x, layer, width) if first else None
    logits = _router(p, x, mlp, hidden, width)
    probs = tape.op((logits,), mlp.num_experts * 4, saves_out=True)
    indices = tape.value(mlp.top_k * 40, needs_grad=False)  # ids, order, inverse: int64 and fp32
    weights = tape.op((probs,), mlp.top_k * 4, saves=(indices,))
    tape.drop(probs)
    run = {"eager": _one_by_one, MODULES: _one_by_one, "batched_mm": _batched}.get(
        s.experts, _all_at_once
    )
    out = run(p, x, layer, hidden, weights)
    tape.drop(weights, indices, logits)
    if width != s.act:
        out = p.cast(out, hidden * width)
    if not mlp.shared_intermediate:
        return out
    if fed is None:
        fed = _shared(p, x, layer, width)
    fed = _opened(p, x, fed, layer, width)
    total = tape.add(out, fed, hidden * width)
    tape.drop(out, fed)
    return total


def _shared(p: Program, x: Value, layer: LayerSpec, width: int) -> Value:
    """Record the shared experts, one dense block."""
    mlp = layer.mlp
    kind = MlpKind.GATED if mlp.expert_gated else MlpKind.PLAIN
    dense = replace(mlp, kind=kind, intermediate=mlp.shared_intermediate)
    return mlp_block(p, x, replace(layer, mlp=dense), width)


def _gate(layer: LayerSpec) -> ModuleSpec | None:
    return next((m for m in layer.modules if m.leaf == "shared_expert_gate"), None)


def _router(p: Program, x: Value, mlp: MlpSpec, hidden: int, width: int) -> Value:
    """Record the router's matmul; DeepSeek's brings tokens and its weight to fp32 first."""
    s, tape = p.s, p.tape
    count = mlp.num_experts * hidden
    if not mlp.router_fp32 or width == 4:
        return p.linear_like(x, mlp.num_experts * s.act, count)
    wide = tape.op((x,), hidden * 4)
    inner = s.act if s.autocast else 4  # which takes the matmul back to 16 bits
    fed = p.cast(wide, hidden * inner) if inner != 4 else wide
    weight = tape.value(0, count * inner, needs_grad=False)
    out = tape.op(
        (fed,),
        mlp.num_experts * inner,
        saves=(fed, weight) if s.full else (weight,),
        weight_grad=count * s.grad if s.full else 0,
        view_grad=True,
        kind=Op.MATMUL,
    )
    tape.drop(fed, weight)
    return out


def _opened(p: Program, x: Value, out: Value, layer: LayerSpec, width: int) -> Value:
    """Record Qwen's sigmoid gate of the shared expert, one number a token; `out` is dropped."""
    tape = p.tape
    gate = _gate(layer)
    if gate is None:
        return out
    asked = p.linear(x, gate, width)
    share = tape.op((asked,), asked.size, saves_out=True)
    product = tape.op((share, out), out.size, saves=(share, out), scratch=out.size)
    tape.drop(asked, share, out)
    return product


def loads(mlp: MlpSpec, *, imbalance: bool, capacity: float) -> tuple[float, ...]:
    """Return the rows that each expert in turn gets, per token: evenly spread, or as few experts as can be.

    A token chooses an expert once, so the fullest has a row a token at most; `capacity` times an even
    share at most where rows beyond it are dropped (0: none are).
    """
    even = mlp.top_k / mlp.num_experts
    if not imbalance:
        return (even,) * mlp.num_experts
    most = min(1.0, capacity * even) if capacity else 1.0
    full, rest = divmod(mlp.top_k, most)
    rest = round(rest, 6)  # what division leaves of nothing
    return (most,) * min(int(full), mlp.num_experts) + ((rest,) if rest else ())


def _one_by_one(p: Program, x: Value, layer: LayerSpec, hidden: int, weights: Value) -> Value:
    """Record a loop over the experts that got tokens: gather, two matmuls, weighting, index_add_.

    The forward of an experts class, e.g. modeling_mixtral.py: its variables live until the next round
    binds them again. Picking an expert's matrix out of a trained stack makes a gradient as large as the
    stack in every round (SelectBackward); a list of modules (transformers 4) has one of its own for each.
    """
    s, tape, mlp = p.s, p.tape, layer.mlp
    count = sum(m.weight_parameters for m in layer.modules if m.kind is ModuleKind.EXPERTS)
    parts = 3 if mlp.expert_gated else 2
    stacks = (count * (parts - 1) // parts, count // parts)
    merged = [_merged(p, stacks[side], side) for side in (INTO, OUT)]
    chosen = tape.value(INDEX * mlp.top_k * (mlp.num_experts + 1), needs_grad=False)  # one_hot
    out = tape.value(hidden * s.act, needs_grad=False)
    biased = any(_biases(layer, 1))
    bound: dict[str, Value] = {}

    def bind(name: str, value: Value) -> None:
        """Give a variable of the loop a new value; the last round's dies now."""
        if name in bound:
            tape.drop(bound[name])
        bound[name] = value

    rounds = loads(mlp, imbalance=s.imbalance, capacity=s.capacity)
    for number, share in enumerate(rounds):
        last = number == len(rounds) - 1  # the first whose backward runs
        index = tape.value(2 * INDEX * share, needs_grad=False)
        bind("place", index)
        rows = tape.op((x,), share * x.size, saves=(index,))
        bind("rows", rows)
        size = share * hidden * s.act
        fed = rows if x.size == hidden * s.act else tape.op((rows,), size)
        narrow = share * mlp.intermediate * s.act
        both = _chosen(p, fed, (parts - 1) * narrow, stacks[INTO], mlp, merged[INTO], last=last)
        if fed is not rows:
            tape.drop(fed)
        if biased:  # matmul + bias: one more
            both = p.cast(both, both.size)
        if s.experts != MODULES:  # whose variables are the expert's own
            both.storage.refs += 1
            bind("both", both)
        product = _inside(p, both, mlp, narrow)
        bind("inside" if biased else "result", product)
        down = _chosen(p, product, size, stacks[OUT], mlp, merged[OUT], last=last)
        if biased:
            down = p.cast(down, size)
        bind("out" if biased else "result", down)
        each = 4 if mlp.routing_fp32 else s.act
        part = tape.op((weights,), share * each, saves=(index,))
        wide = share * hidden * each
        weighted = _weighted(p, down, part, wide)
        tape.drop(part)
        bind("result", weighted)
        added = tape.op((weighted,), size) if each != s.act else weighted
        out = tape.add_in_place(out, added, saves=(index,))
        if added is not weighted:
            tape.drop(added)
    tape.drop(chosen, *bound.values(), *(stack for stack in merged if stack is not None))
    return out


def _chosen(
    p: Program, x: Value, size: float, stack: int, mlp: MlpSpec, merged: Value | None, *, last: bool
) -> Value:
    """Record one expert's matmul."""
    s, tape = p.s, p.tape
    one = stack // mlp.num_experts
    if merged is not None:
        return tape.op((x, merged), size, saves=(x, merged), kind=Op.KERNEL)
    if s.experts == MODULES:
        return tape.op(
            (x,),
            size,
            saves=(x,) if s.full else (),
            weight_grad=one * s.grad if s.full else 0,
            weight_scratch=one * s.act if s.quantized else 0,
            kind=Op.KERNEL if s.quantized else Op.MATMUL,
        )
    if not s.full:
        return tape.op((x,), size, kind=Op.MATMUL)
    new = (one + (0 if last else stack)) * s.grad  # added to the first round's
    return tape.op(
        (x,),
        size,
        saves=(x,),
        weight_grad=stack * s.grad if last else 0,
        weight_scratch=new,
        forward_constant=0,
        kind=Op.MATMUL,
    )


def _batched(p: Program, x: Value, layer: LayerSpec, hidden: int, weights: Value) -> Value:
    """Record batched_mm: every row has its expert's matrices copied for it, which bmm keeps."""
    s, tape, mlp = p.s, p.tape, layer.mlp
    count = sum(m.weight_parameters for m in layer.modules if m.kind is ModuleKind.EXPERTS)
    parts = 3 if mlp.expert_gated else 2
    stacks = (count * (parts - 1) // parts, count // parts)
    merged = [_merged(p, stacks[side], side) for side in (INTO, OUT)]
    rows = tape.op((x,), mlp.top_k * hidden * s.act)
    narrow = mlp.top_k * mlp.intermediate * s.act
    biases = _biases(layer, mlp.top_k * s.act)
    held = [rows, *(stack for stack in merged if stack is not None)]

    chosen: list[Value] = []

    def multiplied(fed: Value, size: float, side: int) -> Value:
        each = mlp.top_k * (stacks[side] // mlp.num_experts) * s.act
        stack = merged[side]
        if stack is not None:
            copies = tape.op((stack,), each)
        elif s.full:
            copies = tape.op((), each, weight_grad=stacks[side] * s.grad)
        else:
            copies = tape.value(each, needs_grad=False)
        trained = s.full or stack is not None
        tape.drop(*chosen)  # selected_weights is bound again
        chosen[:] = [copies]
        held.append(tape.value(biases[side], needs_grad=False))
        return tape.op(
            (fed, copies), size, saves=(fed, copies) if trained else (copies,), kind=Op.KERNEL
        )

    both = multiplied(rows, (parts - 1) * narrow, INTO)
    product = _inside(p, both, mlp, narrow)
    down = multiplied(product, mlp.top_k * hidden * s.act, OUT)
    tape.drop(product)
    each = 4 / s.act if mlp.routing_fp32 else 1
    weighted = _weighted(p, down, weights, down.size * each)
    out = _summed(p, weighted, mlp.top_k * hidden * 4, hidden)
    tape.drop(weighted, down, *held, *chosen)
    return out


def _all_at_once(p: Program, x: Value, layer: LayerSpec, hidden: int, weights: Value) -> Value:
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
    product = _inside(p, both, mlp, narrow)
    second = tape.value(down_bias, needs_grad=False)
    tape.drop(bias)
    down = _grouped(p, product, wide, count // parts, OUT, held)
    tape.drop(product)
    each = 4 / s.act if mlp.routing_fp32 else 1
    weighted = _weighted(p, down, weights, wide * each)
    ordered = tape.op((weighted,), wide * each)
    tape.drop(weighted)
    out = _summed(p, ordered, wide * 4 / s.act, hidden)
    tape.drop(ordered, down, second, rows, *held)
    return out


def _weighted(p: Program, rows: Value, weights: Value, size: float) -> Value:
    """Record rows x their weights; fp32 weights make both gradients fp32 before the rows' is cast."""
    if size == rows.size:
        return p.tape.op((rows, weights), size, saves=(rows, weights), scratch=size)
    # a checkpoint gives the rows back before the cast
    second = size - rows.size if p.tape.recomputed else size
    return p.tape.op((rows, weights), size, saves=(rows, weights), scratch=(size, second))


def _inside(p: Program, both: Value, mlp: MlpSpec, size: float) -> Value:
    """Record what is between an expert's two matmuls; `both` is dropped."""
    if mlp.activation == "clamped_swiglu":
        return _clamped(p, both, size)
    return (gated if mlp.expert_gated else activation)(p, both, size, mlp.activation)


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


def _merged(p: Program, count: int, side: int) -> Value | None:
    """Record PEFT's W + BA of fused experts of `count` elements, None where they have no adapter.

    peft 0.21 tuners/lora/layer.py, ParamWrapper: one baddbmm, a copy of the weight that is cached while the
    experts run; its gradient is as large.
    """
    s, tape = p.s, p.tape
    share = s.expert_adapters[side]
    if not share:
        return None
    factors = tape.value(0, share * s.act, needs_grad=False)
    merged = tape.op((), 0, count * s.act, saves=(factors,), weight_grad=share * s.adapter)
    tape.drop(factors)
    return merged


def _grouped(
    p: Program, x: Value, per_token: float, count: int, side: int, held: list[Value]
) -> Value:
    """Record one grouped matmul over fused expert weights of `count` elements.

    Before Ampere there is none: transformers' own operator keeps its input, and makes the weight's
    gradient whether it is trained or not (integrations/moe.py, _grouped_mm_fallback_backward).
    """
    s, tape = p.s, p.tape
    own = s.experts == "fallback"
    merged = _merged(p, count, side)
    if merged is not None:
        out = tape.op((x, merged), per_token, saves=(x, merged), kind=Op.KERNEL)
        held.append(merged)
        return out
    return tape.op(
        (x,),
        per_token,
        saves=(x,) if s.full or own else (),
        weight_grad=count * s.grad if s.full else 0,
        weight_scratch=count * s.weight if own and not s.full else 0,
        forward_constant=0,
        kind=Op.KERNEL,
    )
