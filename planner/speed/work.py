"""The work of one optimizer step on one rank: FLOPs, bytes and launches, pass by pass.

Products are counted from the modules, everything else from the tape that counts memory
(planner/speed/counts.py); recomputing, adapters, dequantisation, the head and the optimizer are the
memory model's own. Nothing here knows a card.
"""

from dataclasses import replace
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.layer.program import OpSettings
from planner.mixers.registry import mixer_of
from planner.models.spec import LINEARS, LayerSpec, ModelSpec, ModuleKind
from planner.quant.table import BITSANDBYTES
from planner.run.experts import LOOPS, MODULES
from planner.run.logits_law import width
from planner.run.ranks import rank_runs
from planner.run.recipe import Checkpointing, Method, Reference, Sharding
from planner.run.resolved import Resolved
from planner.run.tasks import TASKS
from planner.speed.counts import Moved, layer_counts
from planner.terms.activations import op_settings
from planner.terms.adapters import trained_parameters, trains_head
from planner.terms.counts import adapters, base_weights
from planner.terms.gradients import gradients
from planner.terms.logits import scored_rows
from planner.terms.optimizer import optimizer
from planner.terms.optimizer_kinds import KINDS
from planner.terms.weights import trained_width


class Pass(NamedTuple):
    """What one phase of a step does, all its micro-batches together."""

    name: str
    flops: float = 0
    """Of products in the compute dtype."""
    wide_flops: float = 0
    """Of products in fp32: adapters that no autocast narrows."""
    narrow_flops: float = 0
    """Of products in float8."""
    attention_flops: float = 0
    product_bytes: float = 0
    """Matrices that products read and write."""
    moved_bytes: float = 0
    """Pointwise operations, norms, copies, casts, logits."""
    packed: float = 0
    """Elements of packed weights that are dequantised."""
    integer: float = 0
    """The same of packed integers."""
    launches: float = 0
    """Kernels that the host starts."""
    units: float = 0
    """Units of weights that the host fetches and gives back though no other rank has a part of them."""

    def times(self, count: float) -> "Pass":
        """Return so many of it."""
        return Pass(self.name, *(count * each for each in self[1:]))

    def plus(self, other: "Pass") -> "Pass":
        """Return both together, under this name."""
        return Pass(self.name, *(a + b for a, b in zip(self[1:], other[1:], strict=True)))


class Work(NamedTuple):
    """One optimizer step of one rank."""

    passes: tuple[Pass, ...]
    micro_batches: int
    gathers: int = 0
    """Units whose weights are gathered: a layer in its forward and in its backward."""
    serial: bool = False
    """Ranks wait for what they send each other: parts of one layer, or of one sequence."""
    gpus: int = 1
    """That work together."""


def training_work(model: ModelSpec, r: Resolved) -> Work:
    """Return the work of the busiest rank in a step that trains; rollouts are planner/speed/engine.py's."""
    works = [_rank_work(kind.model, kind.resolved) for kind in rank_runs(model, r)]
    return max(works, key=lambda work: sum(each.flops + each.narrow_flops for each in work.passes))


def _rank_work(part: ModelSpec, r: Resolved) -> Work:
    share = _Share(part, r)
    count = micro_batches(r)
    forward, backward = share.forward(), share.backward()
    if r.sharding is Sharding.ZERO3 and r.placement.weight_shards == 1:
        # its hooks run on one GPU too (DeepSpeed partitioned_param_coordinator.py): nobody to wait for, host time alone
        units = float(part.num_layers)
        forward, backward = (each._replace(units=units) for each in (forward, backward))
    passes = []
    if TASKS[r.task].generates:
        passes.append(share.scoring("score").times(count))
        if r.reference is not Reference.NONE:
            passes.append(share.scoring("reference").times(count))
    elif r.reference in (Reference.ADAPTER_OFF, Reference.SEPARATE, Reference.OFFLOADED):
        passes.append(share.scoring("reference").times(count))
    passes += [
        forward.times(count),
        share.loss().times(count),
        backward.times(count),
        share.step(),
    ]
    stages = r.layout.pipeline
    if stages > 1:  # of m micro-batches the pipeline idles through stages - 1 more
        passes = [each.times((count + stages - 1) / count) for each in passes]
    gathers = 2 * count * part.num_layers if r.placement.weight_shards > 1 else 0
    serial = r.layout.tensor * r.layout.context > 1
    return Work(tuple(passes), count, gathers, serial, r.layout.gpus)


def micro_batches(r: Resolved) -> int:
    """Return the micro-batches of a step: of generating tasks at least as many as hold one group."""
    count = max(1, r.grad_accum)
    if TASKS[r.task].generates:
        count = max(count, -(-r.num_generations // max(1, r.sequences)))
    return count


class Product(NamedTuple):
    """[rows, into] x [into, out], so many times."""

    rows: float
    out: int
    into: int
    times: float
    matrices: float
    """Different matrices read: of experts all that got a row."""

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.rows * self.out * self.into * self.times

    def bytes(self, act: float, weight: float) -> float:
        """Return what is read and written once."""
        rows = self.rows * (self.out + self.into) * act * self.times
        return rows + self.out * self.into * weight * self.matrices


def layer_products(layer: LayerSpec, tokens: float) -> list[Product]:
    """Return the products of one layer's forward over `tokens` tokens."""
    found = []
    for module in layer.modules:
        if module.kind in LINEARS:
            found.append(
                Product(tokens, module.out_features, module.in_features, module.count, module.count)
            )
        elif module.kind is ModuleKind.EXPERTS:
            mlp = layer.mlp
            experts = max(1, mlp.num_experts)
            touched = experts * (1 - (1 - min(1, mlp.top_k / experts)) ** tokens)
            each = tokens * mlp.top_k / max(1.0, touched)
            for shape in module.shapes:
                if len(shape) == 3:
                    found.append(Product(each, shape[-2], shape[-1], touched, touched))
    return found


def attention_flops(layer: LayerSpec, tokens: float, keys: float) -> float:
    """Return the FLOPs of a layer's attention: `tokens` queries that see `keys` keys each at most."""
    total = 0.0
    for mixer in layer.mixers:
        seen = mixer_of(mixer).cache.tokens_held(mixer, int(keys)) if mixer.num_heads else 0
        if mixer.state_shapes:  # a recurrence: its state is updated and read for every token
            state = 1
            for size in mixer.state_shapes[-1]:
                state *= size
            total += 4 * tokens * state
        elif seen:
            causal = seen / 2 if seen == int(keys) else seen
            total += (
                2.0
                * tokens
                * causal
                * mixer.num_heads
                * (mixer.head_dim + (mixer.v_head_dim or mixer.head_dim))
            )
    return total


def timed_settings(model: ModelSpec, r: Resolved) -> OpSettings:
    """Return how a layer's operations run, of those that are started one by one.

    Experts that are packed linears of their own run one after another, whatever fused experts would do.
    """
    settings = op_settings(model, r)
    if r.linear_experts and r.quantization in BITSANDBYTES and r.experts not in LOOPS:
        return settings._replace(experts=MODULES)
    return settings


ATTENTION_BACKWARD = 5 / 2
"""Products of a flash kernel's backward over its forward's: five instead of two, scores made again."""


class _Share:
    """One rank's part of a micro-batch: its layers, matrices and tokens are the rank's already."""

    def __init__(self, model: ModelSpec, r: Resolved) -> None:
        self.model = model
        self.r = r

    @property
    def tokens(self) -> float:
        return float(self.r.tokens)

    @property
    def act(self) -> int:
        return element_bytes(self.r.compute_dtype)

    def _layers(self, name: str, *, part: str, grads: bool) -> Pass:
        """Return one pass over all layers: `part` is forward, backward or elementwise."""
        r, model = self.r, self.model
        run = r if grads else replace(r, trains=False, method=Method.FULL)
        settings = timed_settings(model, run)
        found = Pass(name)
        for layer in model.layers:
            counts = layer_counts(layer, model.hidden, settings)
            moved = counts.backward if part == "backward" else counts.forward
            one = self._moved(name, moved)
            if part != "elementwise":
                one = one.plus(self._products(name, layer, backward=part == "backward"))
            found = found.plus(one.times(layer.count))
        return found

    def _moved(self, name: str, moved: Moved) -> Pass:
        return Pass(
            name,
            moved_bytes=moved.per_token * self.tokens + moved.constant,
            launches=moved.launches,
        )

    def _products(self, name: str, layer: LayerSpec, *, backward: bool) -> Pass:
        r = self.r
        # of the input always; of the weight where it is trained
        times = (1 + (r.method is Method.FULL and r.trains)) if backward else 1
        products = layer_products(layer, self.tokens)
        flops = sum(each.flops for each in products) * times
        moved = sum(each.bytes(self.act, self.act) for each in products) * times
        # of a divided sequence every rank's queries see all keys
        attention = attention_flops(layer, r.tokens, r.seq_tokens * max(1, r.layout.context))
        narrow = r.float8 is not None
        return Pass(
            name,
            flops=0 if narrow else flops,
            narrow_flops=flops if narrow else 0,
            product_bytes=moved,
            attention_flops=attention * (ATTENTION_BACKWARD if backward else 1),
        )

    def _adapters(self, name: str, times: int) -> Pass:
        """Return `times` products with every adapter matrix."""
        r = self.r
        if r.method is Method.FULL or not r.trains:
            return Pass(name)
        held = element_bytes(r.adapter_dtype)
        inside = self.act if r.autocast or "lora" in r.switches.fused else held
        flops = moved = 0.0
        for rows, columns, count in adapters(self.model, r).matrices:
            flops += 2.0 * rows * columns * count * self.tokens
            moved += (
                rows + columns
            ) * self.tokens * inside * count + rows * columns * count * inside
        flops, moved = times * flops, times * moved
        if inside == element_bytes("fp32"):
            return Pass(name, wide_flops=flops, product_bytes=moved)
        return Pass(name, flops=flops, product_bytes=moved)

    def _unpacked(self, name: str) -> Pass:
        """Return the dequantisation of every packed weight once: packed ones read, 16-bit ones written."""
        base = base_weights(self.model, self.r)
        if not base.quantized:
            return Pass(name)
        moved = base.quantized + base.quantized_parameters * self.act
        if self.r.quantization in BITSANDBYTES:
            return Pass(name, moved_bytes=moved, packed=base.quantized_parameters)
        return Pass(name, moved_bytes=moved, integer=base.quantized_parameters)

    def forward(self) -> Pass:
        """Return a forward with a graph."""
        name = "forward"
        run = self._layers(name, part="forward", grads=True)
        return run.plus(self._adapters(name, 1)).plus(self._unpacked(name))

    def backward(self) -> Pass:
        """Return a backward, with what it computes again."""
        name, again = "backward", self.r.checkpointing
        found = self._layers(name, part="backward", grads=True)
        found = found.plus(self._adapters(name, 2)).plus(self._unpacked(name))
        if again in (Checkpointing.FULL, Checkpointing.OFFLOAD):
            found = found.plus(self.forward())
        elif again is Checkpointing.SELECTIVE_LAYER:
            found = found.plus(self.forward().times(1 / max(1, self.r.checkpoint_every)))
        elif again is Checkpointing.SELECTIVE_OP:
            found = found.plus(self._layers(name, part="elementwise", grads=True))
        return found

    def scoring(self, name: str) -> Pass:
        """Return a forward without a graph and the head on its rows."""
        found = self._layers(name, part="forward", grads=False)
        found = found.plus(self._adapters(name, 1)).plus(self._unpacked(name))
        return found.plus(self._head(name, products=1, both=False))

    def loss(self) -> Pass:
        """Return the head, forward and backward."""
        trained = trains_head(self.model, self.r)
        again = self.r.law.kind in ("chunked", "tiled") and trained
        return self._head("loss", products=2 + trained + again, both=True)

    def _head(self, name: str, *, products: int, both: bool) -> Pass:
        r, model, law = self.r, self.model, self.r.law
        if law.kind in ("score", "none"):  # or another stage's
            return Pass(name)
        rows = scored_rows(r, law)
        one = Product(rows, model.vocab, model.hidden, products, products)
        if law.kind == "full":
            kept = [dtype for _, dtype in law.forward]
            kept += [dtype for _, dtype in law.backward] if both else []
        else:
            kept = 2 * [dtype for _, dtype in law.chunk] or ["act", "act"]
        # each is written once and read once
        wide = 2.0 * sum(width(dtype, self.act) for dtype in kept)
        return Pass(
            name,
            flops=one.flops,
            product_bytes=one.bytes(0, self.act),
            moved_bytes=rows * model.vocab * wide,
            launches=len(kept) * products,
        )

    def step(self) -> Pass:
        """Return the optimizer: weights, gradients and states read, weights and states written."""
        r, model = self.r, self.model
        if not r.trains:
            return Pass("step")
        trained = trained_parameters(model, r)
        shards = max(1, r.placement.state_shards)
        each = trained_width(r) if r.method is Method.FULL else element_bytes(r.adapter_dtype)
        states = optimizer(model, r).states.bytes
        made = gradients(model, r).bytes
        clipped = 2 * made  # its norm, then scaled
        tensors = (
            len(adapters(model, r).matrices)
            if r.method is not Method.FULL
            else sum(layer.count * len(layer.modules) for layer in model.layers)
        )
        if r.method is not Method.FULL:
            tensors = sum(count for _, _, count in adapters(model, r).matrices)
        kind = KINDS[r.optimizer]
        return Pass(
            "step",
            moved_bytes=2 * states + 2 * trained * each / shards + made + clipped,
            launches=tensors * (1.0 if kind.eight_bit else 1 / TENSORS_A_LAUNCH),
        )


TENSORS_A_LAUNCH = 32
"""torch's multi-tensor kernels take that many small tensors at once, about (aten ForeachUtils)."""
