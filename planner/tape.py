"""A very small autograd, in bytes: what a stretch of forward code saves, and what its backward needs.

It follows torch's rules and nothing else: a storage lives while a Python variable, a saved
tensor or a gradient holds it; the engine runs nodes in reverse order, allocates the gradients of
a node's inputs, then frees what the node saved and the gradient that came in, then accumulates
(in place when nobody else holds the buffer).

Sizes are bytes **per token**; what does not scale with tokens (weight gradients, casts of
weights) is counted beside it. Every allocation therefore leaves a point (per_token, constant), and
`peak(points, tokens)` is exact for any number of tokens.
"""

from dataclasses import dataclass

Point = tuple[float, int]
Envelope = tuple[Point, ...]


class Storage:
    """Bytes with a reference count."""

    __slots__ = ("constant", "label", "per_token", "refs")

    def __init__(self, per_token: float, constant: int) -> None:
        self.per_token = per_token
        self.constant = constant
        self.refs = 1
        self.label = ""


class Value:
    """A tensor of the forward code: a storage, and maybe a gradient later."""

    __slots__ = ("grad", "needs_grad", "size", "storage")

    def __init__(self, storage: Storage, *, needs_grad: bool, size: float) -> None:
        self.storage = storage
        self.needs_grad = needs_grad
        self.size = size
        """Bytes per token of its gradient; less than the storage's for a view of a part."""
        self.grad: Storage | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One recorded operation."""

    outs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    passes_through: bool
    """The gradient goes to the inputs as it came (add, view)."""
    saved: tuple[Storage, ...]
    scratch: float
    """Bytes per token the backward allocates and frees inside the node."""
    weight_grad: int
    """Bytes of a trained weight's gradient."""
    weight_scratch: int
    """Constant bytes alive only while the node runs (a dequantised weight)."""


class Tape:
    """Runs forward code on sizes and then its backward."""

    def __init__(self, *, grad_enabled: bool = True, keep_weight_grads: bool = True) -> None:
        self.grad_enabled = grad_enabled
        self.keep_weight_grads = keep_weight_grads
        self.live: float = 0
        self.live_constant = 0
        self.points: list[Point] = []
        self.nodes: list[Node] = []

    def alloc(self, per_token: float, constant: int = 0) -> Storage:
        """Allocate a storage and note the point."""
        self.live += per_token
        self.live_constant += constant
        self.points.append((self.live, self.live_constant))
        return Storage(per_token, constant)

    def release(self, storage: Storage) -> None:
        """Drop one reference."""
        storage.refs -= 1
        if storage.refs == 0:
            self.live -= storage.per_token
            self.live_constant -= storage.constant

    def spike(self, per_token: float, constant: int = 0) -> None:
        """Note a temporary that is gone before the next allocation."""
        self.points.append((self.live + per_token, self.live_constant + constant))

    def _new(self, per_token: float, label: str, needs_grad: bool) -> Value:
        storage = self.alloc(per_token)
        storage.label = label
        return Value(storage, needs_grad=needs_grad, size=per_token)

    def value(self, per_token: float, label: str = "", *, needs_grad: bool = True) -> Value:
        """Return a new tensor that no recorded op made."""
        return self._new(per_token, label, needs_grad)

    def op(
        self,
        inputs: tuple[Value, ...],
        per_token: float,
        label: str = "",
        *,
        saves: tuple[Value, ...] = (),
        saves_out: bool = False,
        scratch: float = 0,
        forward_scratch: float = 0,
        weight_grad: int = 0,
        weight_scratch: int = 0,
    ) -> Value:
        """Record an operation with a new output of `per_token` bytes.

        `saves` are kept for backward; `scratch` is what its backward needs in passing.
        """
        if forward_scratch or weight_scratch:
            self.spike(per_token + forward_scratch, weight_scratch)
        needs = self.grad_enabled and (bool(weight_grad) or any(v.needs_grad for v in inputs))
        out = self._new(per_token, label, needs)
        if needs:
            kept = tuple(v.storage for v in saves) + ((out.storage,) if saves_out else ())
            for storage in kept:
                storage.refs += 1
            self.nodes.append(
                Node((out,), inputs, False, kept, scratch, weight_grad, weight_scratch)
            )
        return out

    def add(self, left: Value, right: Value, per_token: float, label: str = "") -> Value:
        """Record left + right of equal shape and dtype: saves nothing, gradients pass through."""
        needs = self.grad_enabled and (left.needs_grad or right.needs_grad)
        out = self._new(per_token, label, needs)
        if needs:
            self.nodes.append(Node((out,), (left, right), True, (), 0, 0, 0))
        return out

    def split(self, source: Value, sizes: tuple[float, ...]) -> tuple[Value, ...]:
        """Record that `source` is cut into views; its gradient is one new buffer."""
        parts = []
        for size in sizes:
            source.storage.refs += 1
            parts.append(Value(source.storage, needs_grad=source.needs_grad, size=size))
        if source.needs_grad:
            self.nodes.append(Node(tuple(parts), (source,), False, (), 0, 0, 0))
        return tuple(parts)

    def drop(self, *values: Value) -> None:
        """Forget Python variables."""
        for value in values:
            self.release(value.storage)

    def backward(self, out: Value, grad_per_token: float) -> None:
        """Run the recorded nodes in reverse, starting with a gradient for `out`."""
        out.grad = self.alloc(grad_per_token)
        while self.nodes:
            self._run(self.nodes.pop())

    def _run(self, node: Node) -> None:
        grads = [value.grad for value in node.outs if value.grad is not None]
        for value in node.outs:
            value.grad = None
        if not grads:
            for storage in node.saved:
                self.release(storage)
            return
        grad = grads[0]
        made: list[tuple[Value, Storage]] = []
        for value in node.inputs:
            if not value.needs_grad:
                continue
            if node.passes_through:
                grad.refs += 1
                made.append((value, grad))
            else:
                made.append((value, self.alloc(value.size)))
        weight_grad = self.alloc(0, node.weight_grad) if node.weight_grad else None
        if node.scratch or node.weight_scratch:
            self.spike(node.scratch, node.weight_scratch)
        for storage in node.saved:
            self.release(storage)
        for incoming in grads:
            self.release(incoming)
        if weight_grad is not None and not self.keep_weight_grads:
            self.release(weight_grad)
        for value, storage in made:
            if value.grad is None:
                value.grad = storage
            else:
                self._accumulate(value, storage)

    def _accumulate(self, value: Value, storage: Storage) -> None:
        old = value.grad
        assert old is not None
        if old.refs == 1:
            self.release(storage)
            return
        # somebody else holds the buffer: torch adds into a new one
        value.grad = self.alloc(storage.per_token)
        self.release(old)
        self.release(storage)


def envelope(points: list[Point]) -> Envelope:
    """Return the points that can be the largest for some number of tokens."""
    best: list[Point] = []
    for point in sorted(set(points), reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return tuple(best)


def peak(points: Envelope, tokens: int) -> int:
    """Return the largest bytes of an envelope at `tokens` tokens."""
    return max((int(a * tokens) + c for a, c in points), default=0)
