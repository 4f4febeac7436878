"""A very small autograd, in bytes: what a stretch of forward code saves, and what its backward needs.

It follows torch's rules and nothing else: a storage lives while a Python variable, a saved
tensor or a gradient holds it; the engine runs nodes in reverse order, allocates the gradients of
a node's inputs, then frees what the node saved and the gradient that came in, then accumulates
(in place when nobody else holds the buffer).

Sizes are bytes **per token**. What does not scale with tokens (casts of weights, weight
gradients) is counted beside it, so every allocation leaves a point (per_token, constant,
weight_grads), and `largest(points, tokens)` is exact for any number of tokens.
"""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Point(NamedTuple):
    """Live bytes at one moment."""

    per_token: float
    constant: int
    weight_grads: int

    def at(self, tokens: int) -> int:
        """Return the bytes at `tokens` tokens, weight gradients apart."""
        return int(self.per_token * tokens) + self.constant

    def total(self, tokens: int) -> int:
        """Return all bytes at `tokens` tokens."""
        return int(self.per_token * tokens) + self.constant + self.weight_grads


Envelope = tuple[Point, ...]
NOTHING = Point(0, 0, 0)


class Event(NamedTuple):
    """One allocation or free, for the allocator's replay."""

    block: int
    per_token: float
    """Bytes per token of an allocation; FREED for a free."""
    constant: int = 0


class Op(Enum):
    """What runs an operation: what a compiler fuses, and what a policy of checkpointing saves."""

    FUSED = "fused"
    """Pointwise, a reduction, a copy."""
    MATMUL = "matmul"
    """aten::mm: a linear without bias."""
    ADDMM = "addmm"
    """aten::addmm: a linear with one."""
    ATTENTION = "attention"
    KERNEL = "kernel"
    """Any other kernel of its own."""


FLOAT8 = "float8"
"""What an operation that casts to float8 is called, for compilers that make it once."""
FREED = -1.0
Scratch = float | tuple[float, ...]
"""Bytes per token of temporaries: one block, or several."""


class Storage:
    """Bytes with a reference count."""

    __slots__ = ("block", "constant", "per_token", "refs", "view", "weight_grad")

    def __init__(self, block: int, per_token: float, constant: int, weight_grad: int) -> None:
        self.block = block
        self.per_token = per_token
        self.constant = constant
        self.weight_grad = weight_grad
        self.refs = 1
        self.view = False
        """A gradient that torch hands on as a view (of a linear's input): never added to in place."""


class Value:
    """A tensor of the forward code: a storage, and maybe a gradient later."""

    __slots__ = ("constant", "grad", "needs_grad", "size", "storage")

    def __init__(
        self, storage: Storage, *, needs_grad: bool, size: float, constant: int = 0
    ) -> None:
        self.storage = storage
        self.needs_grad = needs_grad
        self.size = size
        """Bytes per token of its gradient; less than the storage's for a view of a part."""
        self.constant = constant
        """Bytes of its gradient that do not scale with tokens."""
        self.grad: Storage | None = None


class Node(NamedTuple):
    """One recorded operation."""

    outs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    passes_through: bool
    """The gradient goes to the inputs as it came (add)."""
    saved: tuple[Storage, ...]
    scratch: Scratch
    """Bytes per token the backward allocates and frees inside the node."""
    weight_grad: int
    """Bytes of a trained weight's gradient."""
    weight_scratch: int
    """Constant bytes alive only while the node runs (a dequantised weight)."""
    view_grad: bool = False
    """Its input's gradient is a view of a flat matrix."""


class Tape:
    """Runs forward code on sizes and then its backward."""

    def __init__(
        self,
        *,
        grad_enabled: bool = True,
        keep_weight_grads: bool = True,
        recomputed: bool = False,
    ) -> None:
        self.grad_enabled = grad_enabled
        self.recomputed = recomputed
        """A checkpoint hands saved tensors back: they die with a node's work, before its gradients
        are cast to what they belong to."""
        self.keep_weight_grads = keep_weight_grads
        self.live: float = 0
        self.live_constant = 0
        self.live_grads = 0
        self.points: list[Point] = []
        self.events: list[Event] = []
        self.blocks = 0
        self.nodes: list[Node] = []
        self.held: list[Storage] = []
        self.last_save = self.last_save_event = 0
        """How many points (events) there were when something was last saved for backward: inputs
        are saved before the operation runs, outputs after."""

    def alloc(self, per_token: float, constant: int = 0, *, weight_grad: int = 0) -> Storage:
        """Allocate a storage and note the point."""
        self.live += per_token
        self.live_constant += constant
        self.live_grads += weight_grad
        self.points.append(Point(self.live, self.live_constant, self.live_grads))
        return Storage(
            self._begin(per_token, constant + weight_grad), per_token, constant, weight_grad
        )

    def release(self, storage: Storage) -> None:
        """Drop one reference."""
        storage.refs -= 1
        if storage.refs == 0:
            self.live -= storage.per_token
            self.live_constant -= storage.constant
            self.live_grads -= storage.weight_grad
            self.events.append(Event(storage.block, FREED))

    def _begin(self, per_token: float, constant: int) -> int:
        """Note that a block begins; return its number."""
        self.blocks += 1
        self.events.append(Event(self.blocks, per_token, constant))
        return self.blocks

    def _passing(self, scratch: Scratch, constant: int) -> list[int]:
        """Note blocks that live while an operation runs."""
        sizes = scratch if isinstance(scratch, tuple) else (scratch,)
        return [
            self._begin(*size)
            for size in (*((size, 0) for size in sizes), (0, constant))
            if any(size)
        ]

    def _end(self, blocks: list[int]) -> None:
        self.events.extend(Event(block, FREED) for block in blocks)

    def spike(self, per_token: float, constant: int = 0) -> None:
        """Note a temporary that is gone before the next allocation."""
        point = Point(self.live + per_token, self.live_constant + constant, self.live_grads)
        self.points.append(point)

    def now(self) -> Point:
        """Return what is live."""
        return Point(self.live, self.live_constant, self.live_grads)

    def value(self, per_token: float, constant: int = 0, *, needs_grad: bool = True) -> Value:
        """Return a new tensor that no recorded operation made."""
        storage = self.alloc(per_token, constant)
        return Value(
            storage,
            needs_grad=needs_grad and self.grad_enabled,
            size=per_token,
            constant=constant,
        )

    def result(self, kind: Op, per_token: float, constant: int) -> Storage:
        """Return the storage of an operation's result."""
        del kind
        return self.alloc(per_token, constant)

    def noted(self, *, result: bool) -> None:
        """Learn that the operation just recorded saved something: its `result`, or before it ran."""

    def statistics(self, per_token: float) -> Value:
        """Return what an attention kernel returns beside its result."""
        return self.value(per_token, needs_grad=False)

    def op(
        self,
        inputs: tuple[Value, ...],
        per_token: float,
        constant: int = 0,
        *,
        saves: tuple[Value, ...] = (),
        saves_out: bool = False,
        scratch: Scratch = 0,
        forward_scratch: Scratch = 0,
        weight_grad: int = 0,
        weight_scratch: int = 0,
        forward_constant: int | None = None,
        view_grad: bool = False,
        kind: Op = Op.FUSED,
        same: str = "",
    ) -> Value:
        """Record an operation with a new output of `per_token` bytes (and `constant` ones).

        `saves` are kept for backward; `scratch` is what its backward needs in passing, and
        `weight_scratch` constant bytes that both passes need (the forward `forward_constant`, if given).
        `same` names what a compiler does once for one input and size.
        """
        before, before_event = len(self.points), len(self.events)
        if forward_constant is None:
            forward_constant = weight_scratch
        passing: list[int] = []
        if forward_scratch or forward_constant:
            self.spike(per_token + total(forward_scratch), forward_constant)
            passing = self._passing(forward_scratch, forward_constant)
        needs = self.grad_enabled and (bool(weight_grad) or any(v.needs_grad for v in inputs))
        storage = self.result(kind, per_token, constant)
        self._end(passing)
        out = Value(storage, needs_grad=needs, size=per_token, constant=constant)
        if needs:
            saved = tuple(v.storage for v in saves) + ((out.storage,) if saves_out else ())
            for storage in saved:
                storage.refs += 1
            if saved:
                self.last_save = len(self.points) if saves_out else before
                self.last_save_event = len(self.events) if saves_out else before_event
                self.noted(result=saves_out)
            self.nodes.append(
                Node((out,), inputs, False, saved, scratch, weight_grad, weight_scratch, view_grad)
            )
        return out

    def add(self, left: Value, right: Value, per_token: float) -> Value:
        """Record left + right of equal shape and dtype: saves nothing, gradients pass through."""
        needs = self.grad_enabled and (left.needs_grad or right.needs_grad)
        out = Value(self.alloc(per_token), needs_grad=needs, size=per_token)
        if needs:
            self.nodes.append(Node((out,), (left, right), True, (), 0, 0, 0))
        return out

    def join(self, parts: tuple[Value, ...], per_token: float) -> Value:
        """Record that parts are copied one behind the other; their gradients are views of its own."""
        needs = self.grad_enabled and any(part.needs_grad for part in parts)
        out = Value(self.alloc(per_token), needs_grad=needs, size=per_token)
        if needs:
            self.nodes.append(Node((out,), parts, True, (), 0, 0, 0))
        return out

    def add_in_place(self, total: Value, part: Value, *, saves: tuple[Value, ...]) -> Value:
        """Record that rows are added into `total` (index_add_), which saves them for their shape alone: its
        gradient goes on, theirs is gathered. `total` is dropped: what is returned is its storage.
        """
        needs = self.grad_enabled and (total.needs_grad or part.needs_grad)
        rows = self.op((part,), 0, saves=(part, *saves))
        out = Value(total.storage, needs_grad=needs, size=total.size)
        if needs:
            self.nodes.append(Node((out,), (total, rows), True, (), 0, 0, 0))
        self.drop(rows)
        return out

    def view_copy(self, view: Value) -> Value:
        """Record that a strided view is copied whole; its gradient is the copy's."""
        return self.join((view,), view.size)

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

    def hold(self, value: Value) -> None:
        """Keep a tensor as an attribute of its autograd node: until the graph goes."""
        if self.grad_enabled:
            value.storage.refs += 1
            self.held.append(value.storage)

    def layer_done(self, out: Value) -> None:
        """Learn that a layer's forward is over and what it made."""

    def end_graph(self) -> None:
        """Forget the autograd nodes, whose backward is done."""
        for storage in self.held:
            self.release(storage)
        self.held.clear()

    def start_backward(self, out: Value, grad_per_token: float) -> None:
        """Hand a gradient to `out`."""
        out.grad = self.alloc(grad_per_token)

    def run_until_saved(self) -> None:
        """Run backward until the next node needs a saved tensor: there a checkpoint recomputes."""
        while self.nodes and not self.nodes[-1].saved:
            self._run(self.nodes.pop())

    def run(self) -> None:
        """Run all that is left of backward."""
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
        made: list[tuple[Value, Storage]] = []
        passing = self._passing(node.scratch, node.weight_scratch)
        for value in node.inputs:
            if not value.needs_grad:
                continue
            if node.passes_through:
                grads[0].refs += 1
                made.append((value, grads[0]))
            else:
                storage = self.alloc(value.size, value.constant)
                storage.view = node.view_grad
                made.append((value, storage))
        weight_grad = self.alloc(0, weight_grad=node.weight_grad) if node.weight_grad else None
        if passing:
            self.spike(total(node.scratch), node.weight_scratch)
        self._end(passing)
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
        if old.refs == 1 and not old.view:
            self.release(storage)
            return
        # somebody else holds the buffer, or it is a view: torch adds into a new one
        value.grad = self.alloc(storage.per_token)
        self.release(old)
        self.release(storage)


def total(scratch: Scratch) -> float:
    """Return the bytes per token of temporaries together."""
    return sum(scratch) if isinstance(scratch, tuple) else scratch


def envelope(points: list[Point]) -> Envelope:
    """Return the points that can be the largest for some number of tokens."""
    best: list[Point] = []
    floor = -1
    for point in sorted(set(points), key=lambda p: (-p.per_token, -p.constant - p.weight_grads)):
        if point.constant + point.weight_grads > floor:
            best.append(point)
            floor = point.constant + point.weight_grads
    return tuple(best)


def largest(points: Envelope, tokens: int) -> Point:
    """Return the point of an envelope that is largest at `tokens` tokens."""
    if len(points) == 1:
        return points[0]
    return max(points, key=lambda point: point.total(tokens), default=NOTHING)


def shifted(points: Iterable[Point], per_token: float) -> Envelope:
    """Return the points with `per_token` bytes added to each."""
    return tuple(Point(p.per_token + per_token, p.constant, p.weight_grads) for p in points)
