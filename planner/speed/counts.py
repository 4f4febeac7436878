"""What one decoder layer moves and launches, counted while its program runs on the memory model's tape.

Matrix products are counted from the modules (planner/speed/matmuls.py); everything else a layer does is
an operation of the tape that reads its inputs and writes its result.
"""

from typing import NamedTuple

from planner.layer.blocks import run_layer
from planner.layer.costs import cached
from planner.layer.program import OpSettings, Program
from planner.layer.tape import Node, Op, Scratch, Storage, Tape, Value, total
from planner.models.spec import LayerSpec

PRODUCTS = (Op.MATMUL, Op.ADDMM, Op.ATTENTION)


class Moved(NamedTuple):
    """What one pass over a layer does beside its products."""

    per_token: float
    """Bytes read and written by pointwise operations, norms, copies and casts."""
    constant: float
    """The same of what does not scale with tokens: casts of weights."""
    launches: int
    """Kernels, products and attention included."""
    attentions: int
    """Attention kernels among them."""


class LayerCounts(NamedTuple):
    """One layer's forward and backward."""

    forward: Moved
    backward: Moved


def layer_counts(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerCounts:
    """Return what one layer of this kind moves; cached like its bytes."""
    plain = settings._replace(
        mlp_tile=0, norm_tile=0, again="", compiled="", accumulate=False, seq=0, input_grad=True
    )
    counted = cached(_counts, layer, hidden, plain)
    return counted if not settings.compiled else LayerCounts(*map(_fused, counted))


FUSED_OPS = 3
"""Pointwise operations that inductor makes one kernel of, about: what each would read and write is
read and written once. benchmarks/laws/compiled_layers.py prints the kernels of a layer."""


def _fused(moved: Moved) -> Moved:
    return Moved(
        moved.per_token / FUSED_OPS,
        moved.constant / FUSED_OPS,
        -(-moved.launches // FUSED_OPS),
        moved.attentions,
    )


def _counts(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerCounts:
    tape = CountingTape()
    x = tape.value(settings.stream(hidden), needs_grad=settings.input_grad)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(x, out)
    forward = tape.taken()
    if settings.full or settings.adapted or settings.input_grad:
        tape.start_backward(out, settings.stream(hidden))
        tape.run()
    return LayerCounts(forward, tape.taken())


class CountingTape(Tape):
    """Counts what operations read and write, as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.per_token = self.constant = 0.0
        self.launches = self.attentions = 0
        self.products: set[int] = set()
        """Outputs of products and attention, by id; `kept` holds them, so that no id comes twice."""
        self.kept: list[Value] = []

    def taken(self) -> Moved:
        """Return the counts, and begin anew."""
        found = Moved(self.per_token, self.constant, self.launches, self.attentions)
        self.per_token = self.constant = 0.0
        self.launches = self.attentions = 0
        return found

    def op(
        self,
        inputs: tuple[Value, ...],
        per_token: float,
        constant: int = 0,
        *,
        kind: Op = Op.FUSED,
        forward_scratch: Scratch = 0,
        weight_scratch: int = 0,
        **more: object,
    ) -> Value:
        """Record an operation and count it."""
        out = super().op(
            inputs, per_token, constant, kind=kind, forward_scratch=forward_scratch,
            weight_scratch=weight_scratch, **more,  # type: ignore[arg-type]
        )  # fmt: skip
        self.kept.append(out)
        self.launches += 1
        self.attentions += kind is Op.ATTENTION
        if kind in PRODUCTS or weight_scratch:
            self.products.add(id(out))
            self.launches += bool(weight_scratch)  # a dequantised or cast weight
        else:
            read = sum(value.size for value in inputs)
            self._moved(read + per_token + 2 * total(forward_scratch), constant)
        return out

    def add(self, left: Value, right: Value, per_token: float) -> Value:
        """Record and count an addition."""
        self.launches += 1
        self._moved(left.size + right.size + per_token, 0)
        return super().add(left, right, per_token)

    def join(self, parts: tuple[Value, ...], per_token: float) -> Value:
        """Record and count a copy."""
        self.launches += 1
        self._moved(2 * per_token, 0)
        return super().join(parts, per_token)

    def _moved(self, per_token: float, constant: float) -> None:
        self.per_token += per_token
        self.constant += constant

    def _run(self, node: Node) -> None:
        product = any(id(value) in self.products for value in node.outs)
        grads = [value.grad for value in node.outs if value.grad is not None]
        if grads and not node.passes_through:
            wanted = [value for value in node.inputs if value.needs_grad]
            if product:
                # one product for the input, one for a trained weight
                self.launches += len(wanted) + bool(node.weight_grad) + bool(node.weight_scratch)
            else:
                read = sum(grad.per_token for grad in grads)
                read += sum(storage.per_token for storage in node.saved)
                made = sum(value.size for value in wanted)
                self._moved(read + made + 2 * total(node.scratch), node.weight_grad)
                self.launches += 1 + bool(total(node.scratch))
        super()._run(node)

    def _accumulate(self, value: Value, storage: Storage) -> None:
        self.launches += 1
        self._moved(3 * storage.per_token, 0)
        super()._accumulate(value, storage)
