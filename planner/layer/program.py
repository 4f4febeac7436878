"""Linears, LoRA, norms, rotation and attention, operation by operation, on a tape of sizes.

Follows transformers 5.x modelling code, PEFT's LoRA layers and bitsandbytes' Linear4bit: which
tensors each operation saves, which casts make copies, and what its backward allocates.
"""

from collections.abc import Callable
from typing import NamedTuple

from planner.layer.attention import Shape, attend
from planner.layer.dora import Sides, norm_matrices, scaled_sum
from planner.layer.tape import FLOAT8, Op, Tape, Value, envelope, largest
from planner.models.spec import ModuleSpec


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
    quantized: bool = False
    saved_output: bool = False
    """Every linear's output meets a trained scale (adapter_v2, IA3) and is kept."""
    saved_input: int = 0
    """Old bitsandbytes keeps the input of a frozen quantised linear; bytes per element."""
    dropout: bool = False
    dora: bool = False
    saved: frozenset[str] = frozenset()
    """Names of the layer's linears that are trained whole beside adapters."""
    saved_norms: bool = False
    """The layer's norms are."""
    biases: frozenset[str] = frozenset()
    """Leaf names of modules whose biases are trained beside adapters."""
    rest: int = 2
    """Bytes of a gradient's element of what is trained beside adapters."""
    final_norm: bool = False
    """The final norm is trained beside adapters."""
    head: bool = False
    """The output head is trained."""
    embedding: bool = False
    """The input embedding is trained: the first layer's input needs a gradient."""
    expert_adapters: tuple[int, int] = (0, 0)
    """LoRA elements on the fused experts of one layer: on what leads into them, and out."""
    experts: str = "grouped_mm"
    """How fused experts run: grouped_mm, fallback (before Ampere), batched_mm, eager (a loop), or modules."""
    imbalance: bool = False
    """Experts in a loop: all tokens choose the same ones, as far as `capacity` lets them."""
    capacity: float = 0.0
    """Rows an expert takes at most, in even shares; 0 = all."""
    attention: str = "sdpa"
    cpu: bool = False
    """On a CPU one fused kernel takes every dtype and declared groups, and accumulates in place."""
    seq: int = 0
    """Tokens per sequence; only attention with scores or a mask in full needs it."""
    batched: bool = False
    """Several sequences; only attention with scores in full needs it."""
    reads_half: bool = False
    """fp16: CUDA's softmax in fp32 reads it without a copy."""
    score_cap: bool = False
    """Eager attention caps its scores by tanh (Gemma-2)."""
    sinks: bool = False
    """Eager attention has a learned column beside the scores (gpt-oss)."""
    undeclared_groups: bool = False
    """The model hands SDPA fewer key heads than query heads without enable_gqa (Falcon-7B)."""
    repeat_kv: bool = False
    """The flash path of old code repeats keys and values for every query head."""
    masked: bool = False
    """An attention mask is there, so SDPA repeats keys and values for its heads."""
    additive_mask: bool = False
    """The mask is additive as it comes: no layer makes one of a boolean mask."""
    padded_bias: int = 0
    """Elements of a row of each layer's copy of an additive mask whose rows are not aligned; 0: no copy."""
    norm: str = "rmsnorm"
    rope: bool = True
    """Queries and keys are rotated (not with learned or ALiBi positions)."""
    hidden_dropout: bool = False
    fused: frozenset[str] = frozenset()
    """Fused kernels: rmsnorm, swiglu, rope, lora, moe."""
    mlp_tile: int = 0
    """Tokens of one tile of the MLP, recomputed tile by tile in backward; 0 = whole."""
    tile_experts: bool = False
    """A tile of the MLP takes its tokens through the experts too."""
    norm_tile: int = 0
    """The same of the norms of the hidden stream."""
    input_grad: bool = True
    """The layer's input needs a gradient; not the first layer's of a frozen model, unless asked."""
    accumulate: bool = False
    """Gradients exist already: new ones are added and freed."""
    compiled: str = ""
    """What torch.compile compiles at once: layer, model; empty: nothing."""
    again: str = ""
    """What a kept layer computes again: ops (all but what the policy of planner/layer/selective.py
    keeps), all; empty: nothing."""
    float8: bool = False
    """Linears cast what they multiply to float8 (torchao)."""
    code: str = "transformers"
    """Whose layers they are: transformers, megatron."""
    tensor: int = 1
    """Ranks that share a layer's matrices."""
    sequence: int = 1
    """Ranks that share the tokens of the hidden stream (sequence parallelism)."""
    context: int = 1
    """Ranks that share a sequence."""
    context_kind: str = ""
    """How keys and values get round: ring (two blocks at once), gathered (all), ulysses; empty: not at all."""
    attention_dropout: bool = False
    """Scores in full are dropped out."""
    expert_rows: float = 1.0
    """Rows that a rank's experts get for every row that the rank sends."""
    expert_groups: int = 1
    """Ranks that the experts are divided over."""

    def stream(self, hidden: int) -> int:
        """Return bytes per token of the hidden stream between layers."""
        return hidden * self.residual // self.sequence


FLOAT8_MULTIPLE = 16
"""Linears with a side that is no multiple of this are not converted (torchtitan module_filter_fn)."""


class Program:
    """Runs the operations of one layer on a tape."""

    def __init__(self, tape: Tape, settings: OpSettings) -> None:
        self.tape = tape
        self.s = settings
        self._ending: list[Value] = []

    def linear(self, x: Value, module: ModuleSpec, width: int) -> Value:
        """Record a linear layer whose input has `width` bytes per element, LoRA included."""
        s, tape = self.s, self.tape
        rows, columns = module.out_features, module.in_features
        count = module.weight_parameters
        inner, cast = x, False
        if width != s.act and (s.autocast or s.quantized):
            inner, cast = tape.op((x,), columns * s.act, same="cast"), True
        weight_copy = None
        if s.autocast and s.weight != s.act and not s.quantized:
            # autocast's copy of the weight is what autograd saves
            weight_copy = tape.value(0, count * s.act, needs_grad=False)
        whole = s.full or module.name in s.saved
        saves = (inner,) if whole else ()
        low = self._in_float8(inner, module) if s.float8 else None
        if s.quantized and s.saved_input:
            if s.saved_input != inner.size / columns:
                wide = tape.op((inner,), columns * s.saved_input, same="cast")
                inner, cast = wide, True
            tape.hold(inner)  # freed with the graph, not with the node
        out = tape.op(
            (low or inner,),
            rows * s.act,
            saves=(*saves, weight_copy) if weight_copy else saves,
            scratch=(rows, rows + columns) if low else 0,  # of the gradient, twice, and the input
            weight_grad=self._own_gradient(module),
            weight_scratch=count * s.act if s.quantized else count if low else 0,
            view_grad=not s.quantized,
            kind=_kind(module, quantized=s.quantized),
        )
        if weight_copy:
            tape.drop(weight_copy)
        if low:
            tape.drop(low)
        if cast:
            tape.drop(inner)
        if s.saved_output:
            scaled = tape.op((out,), rows * s.act, saves=(out,))
            tape.drop(out)
            out = scaled
        if s.quantized and width != s.act:
            out = self.cast(out, rows * width)
        return self._lora(x, out, module, width) if module.leaf in s.adapted else out

    def _in_float8(self, x: Value, module: ModuleSpec) -> Value | None:
        """Record torchao's cast of a linear's input, a byte an element; None: it stays in 16 bits.

        torchao float8_linear.py, matmul_with_hp_or_float8_args: saves its input as it came (compiled: what
        that is made of, a cast being fused); casts that and the weight in the forward, and in the backward
        the gradient for both products, the weight, the input.
        """
        if module.out_features % FLOAT8_MULTIPLE or module.in_features % FLOAT8_MULTIPLE:
            return None
        low = self.tape.op((x,), module.in_features, same=FLOAT8)
        low.size = module.in_features * self.s.act  # its gradient is not in float8
        return low

    def _own_gradient(self, module: ModuleSpec) -> int:
        """Return bytes of the gradients of a linear's own weight and bias."""
        s = self.s
        if s.full:
            return module.parameters * s.grad
        if module.name in s.saved:
            return module.parameters * s.rest
        return (module.parameters - module.weight_parameters) * s.rest * (module.leaf in s.biases)

    def linear_like(self, x: Value, per_token: float, count: int) -> Value:
        """Record a small matrix that is a bare parameter (a router): never quantised or adapted."""
        s = self.s
        return self.tape.op(
            (x,),
            per_token,
            saves=(x,) if s.full else (),
            weight_grad=count * s.grad if s.full else 0,
            view_grad=True,
            kind=Op.MATMUL,
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
        with_dropout = "qlora" in s.fused and s.quantized
        fused = with_dropout or ("lora" in s.fused and not s.dropout)
        inside = s.act if s.autocast or fused else s.adapter
        held: list[Value] = []
        if s.quantized and not with_dropout:
            base = self.cast(base, base.size)  # PEFT clones what a 4-bit layer returns
        inner = x
        peft_casts = not fused and s.adapter != width and not (s.quantized and s.autocast)
        if peft_casts:
            inner = tape.op((x,), columns * s.adapter, same="cast")
            held.append(inner)  # PEFT's own variable, until its forward returns
        passing: list[Value] = []
        if s.dropout and with_dropout:  # one function saves x and what is left of it, no mask
            inner = tape.op((inner,), inner.size, saves=(inner,))
            passing.append(inner)
        elif s.dropout:
            mask = tape.value(columns, needs_grad=False)  # one byte an element
            inner = tape.op((inner,), inner.size, saves=(mask,))
            tape.drop(mask)
            passing.append(inner)
        if inside != inner.size / columns:
            inner = tape.op((inner,), columns * inside, same="cast")  # autocast
            passing.append(inner)
        sides = Sides(
            rows=rows,
            columns=columns,
            rank=s.rank,
            adapter=s.adapter,
            inside=inside,
            weight_copy=s.quantized or inside != s.weight,
            bias=module.parameters > module.weight_parameters,
            recomputes=s.dropout,
        )
        if s.dora:
            held += norm_matrices(tape, sides)
        low = self._adapter((inner,), s.rank * columns, s.rank * inside)
        if not s.dora:  # DoRA's sum reads it again
            tape.drop(*passing)
        high = self._adapter((low,), s.rank * rows, rows * inside)
        tape.drop(low)
        if s.dora:
            scaled = scaled_sum(tape, base, inner, high, sides)
            tape.drop(*passing)
        else:
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
        out = tape.op(
            inputs,
            per_token,
            saves=saves,
            weight_grad=count * s.adapter,
            view_grad=True,
            kind=Op.MATMUL,
        )
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
        if s.norm_tile:
            return in_tiles(self, x, s.norm_tile, lambda q, part: q.norm(part, width, features))
        trained = s.full or s.saved_norms
        weight_grad = features * (s.grad if s.full else s.rest) if trained else 0
        if s.norm == "layernorm":
            # native layer norm, in fp32 under autocast: saves its input and two statistics
            if s.autocast and width != 4:
                wide = tape.op((x,), features * 4)
                out = self._fused_norm(wide, features * 4, 2 * weight_grad)
                tape.drop(wide)
                return out
            return self._fused_norm(x, features * width, 2 * weight_grad)
        if "rmsnorm" in s.fused:
            return self._fused_norm(x, features * width, weight_grad, kind=Op.KERNEL)
        return self._rms_norm(x, width, features, weight_grad)

    def _fused_norm(self, x: Value, size: float, weight_grad: int, *, kind: Op = Op.FUSED) -> Value:
        statistics = self.tape.value(8, needs_grad=False)
        out = self.tape.op((x,), size, saves=(x, statistics), weight_grad=weight_grad, kind=kind)
        self.tape.drop(statistics)
        return out

    def _rms_norm(self, x: Value, width: int, features: int, weight_grad: int) -> Value:
        """Record transformers' RMS norm: to fp32, normalise, scale (Gemma scales in fp32)."""
        s, tape = self.s, self.tape
        wide, cast, gemma = x, width != 4, s.norm == "rmsnorm_gemma"
        if cast:
            wide = tape.op((x,), features * 4)
        squares = tape.op(
            (wide,), features * 4, saves=(wide,), scratch=(features * 4, features * 4)
        )
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
            saves=(narrow,) if weight_grad else (),
            scratch=size if weight_grad else 0,
            weight_grad=weight_grad,
        )
        if narrow is not normed:
            tape.drop(narrow)
        if gemma and cast:
            out = self.cast(out, features * width)
        tape.drop(normed)  # a variable of the norm's forward: alive until it returns
        return out

    def normed(self, x: Value, width: int, features: int) -> Value:
        """Record a norm whose input is dropped."""
        whole = Program(self.tape, self.s._replace(norm_tile=0))
        out = whole.norm(x, width, features)
        self.tape.drop(x)
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

    def gathered(self, x: Value, size: float, *, keep: bool = False) -> Value:
        """Record that a tensor divided over the tensor ranks by tokens is made whole for a block's linears.

        DTensor redistributes it into a new tensor, which the linears keep (torch.distributed.tensor.parallel
        PrepareModuleInput). `x` is dropped unless `keep`.
        """
        if self.s.sequence == 1:
            return x
        whole = self.tape.op((x,), size, kind=Op.KERNEL)
        if not keep:
            self.tape.drop(x)
        return whole

    def summed(self, x: Value, hidden: int) -> Value:
        """Record the sum of the tensor ranks' partial results; `x` is dropped.

        Scattered over the tokens, or all-reduced: a functional collective, with a result of its own.
        """
        if self.s.tensor == 1:
            return x
        out = self.tape.op((x,), self.s.stream(hidden), kind=Op.KERNEL)
        self.tape.drop(x)
        return out

    def sdpa(self, q: Value, k: Value, v: Value, heads: int, v_dim: int, width: int) -> Value:
        """Record attention on elements of `width` bytes; q, k, v are dropped."""
        return attend(self, q, k, v, Shape(heads, v_dim, width))

    def until_layer_ends(self, value: Value) -> None:
        """Keep a variable of the layer's forward until that returns."""
        self._ending.append(value)

    def end_layer(self) -> None:
        """Drop what the layer's forward held."""
        self.tape.drop(*self._ending)
        self._ending.clear()


def in_tiles(p: Program, x: Value, tokens: int, run: Callable[[Program, Value], Value]) -> Value:
    """Record run(p, x) in tiles of `tokens` tokens: only `x` is kept, one tile works at a time."""
    inside = p.s._replace(mlp_tile=0, norm_tile=0, input_grad=True)
    forward, again = Tape(grad_enabled=False), Tape()
    run(Program(forward, inside), forward.value(x.size))
    part = again.value(x.size)
    out = run(Program(again, inside), part)
    again.drop(out)
    again.start_backward(out, out.size)
    again.run()
    work = largest(envelope(again.points), tokens)
    return p.tape.op(
        (x,),
        out.size,
        saves=(x,),
        weight_grad=max(point.weight_grads for point in again.points),
        # a tile's own weight gradients, until they are added to those of the tiles before it
        weight_scratch=work.total(tokens),
        forward_constant=largest(envelope(forward.points), tokens).at(tokens),
        kind=Op.KERNEL,
    )


def _kind(module: ModuleSpec, *, quantized: bool) -> Op:
    if quantized:
        return Op.KERNEL
    return Op.ADDMM if len(module.shapes) > 1 else Op.MATMUL
