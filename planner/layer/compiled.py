"""A decoder layer as torch.compile runs it: what the partitioner saves, and which tensors are ever made.

The layer's program records its operations; when the layer is done its forward is played, later its
backward, by inductor's rules:

* pointwise operations and reductions fuse: a tensor exists only where a kernel of its own (a matmul,
  attention, a Triton kernel) makes or reads it, where the backward is given it, or as the layer's result;
* the backward is given a minimum cut of the forward's graph (planner/layer/cut.py);
* a result takes over a buffer of its size that dies in the same fused kernel (inductor's
  inplace_buffers; functorch's donated_buffer for what was saved);
* weight gradients come back together when the layer's backward ends.

benchmarks/laws/compiled_layers.py prints what torch's partitioner saves, beside this.
"""

from collections import Counter

from planner.layer.cut import Graph, minimum_cut
from planner.layer.launches import Backward, Key, Launch, Step
from planner.layer.selective import Policy
from planner.layer.tape import FLOAT8, Op, Scratch, Storage, Tape, Value, total

SMALLER = 4
"""A result so many times smaller than what it is made of is a reduction, never made twice."""
FARTHER = 11, 10
"""What one step more to the backward makes a tensor dearer to save: 1.1, as a ratio."""


class CompiledTape(Tape):
    """Records a layer, then plays its forward and its backward."""

    def __init__(
        self,
        *,
        grad_enabled: bool = True,
        keep_weight_grads: bool = True,
        whole_model: bool = False,
        again: str = "",
    ) -> None:
        super().__init__(grad_enabled=grad_enabled, keep_weight_grads=keep_weight_grads)
        self.whole_model = whole_model
        """The layer's input is a sum of the same graph, not the graph's input."""
        self.again = again
        """What the backward computes again: ops, all; empty: what the partitioner likes."""
        self.steps: list[Step] = []
        self.number: dict[int, int] = {}
        self.values: list[Value] = []
        self.once: dict[tuple[str, int, float, int], int] = {}
        self.narrow: set[int] = set()
        """Casts to float8: a product reads one, and its backward another, made of what it was cast from."""
        self.x: Value | None = None
        self.out: Value | None = None
        self.buffers: dict[Key, Storage] = {}
        self.saved: set[int] = set()
        self.handed: set[int] = set()
        """What the forward leaves: `saved`, or what it is computed from again."""

    # recording

    def _recorded(self, per_token: float, constant: int, *, needs_grad: bool) -> Value:
        value = Value(Storage(0, 0, 0, 0), needs_grad=needs_grad, size=per_token, constant=constant)
        self.values.append(value)  # keeps it alive, so its id stays its own
        self.number[id(value)] = len(self.values)
        return value

    def release(self, storage: Storage) -> None:
        """Drop a reference; what is only recorded holds no bytes."""
        if storage.block:
            super().release(storage)

    def value(self, per_token: float, constant: int = 0, *, needs_grad: bool = True) -> Value:
        """Return the layer's input, which is there already, or record what no operation made."""
        needs = needs_grad and self.grad_enabled
        value = self._recorded(per_token, constant, needs_grad=needs)
        if self.x is None:
            self.x = value
            value.storage = self.alloc(per_token, constant)
        elif per_token or constant:
            number = self.number[id(value)]
            self.steps.append(Step(number, (), Op.KERNEL, per_token, constant, leaf=True))
        return value

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
        """Record an operation."""
        needs = self.grad_enabled and (bool(weight_grad) or any(v.needs_grad for v in inputs))
        out = self._recorded(per_token, constant, needs_grad=needs)
        key = (same, self.number[id(inputs[0])] if inputs else 0, per_token, constant)
        if same and key in self.once:
            self.number[id(out)] = self.once[key]
            return out
        number = self.number[id(out)]
        if same:
            self.once[key] = number
        if same == FLOAT8:
            self.narrow.add(number)
        kept = [self.number[id(v)] for v in saves] + ([number] if saves_out else [])
        self.steps.append(
            Step(
                number,
                self._numbers(inputs),
                kind,
                per_token,
                constant,
                needs_grad=needs,
                saves=tuple(kept) if needs else (),
                wanted=self._wanted(inputs) if needs else (),
                scratch=scratch,
                forward_scratch=forward_scratch,
                weight_grad=weight_grad if needs else 0,
                weight_scratch=weight_scratch,
                forward_constant=weight_scratch if forward_constant is None else forward_constant,
            )
        )
        return out

    def add(self, left: Value, right: Value, per_token: float) -> Value:
        """Record a sum."""
        inputs = (left, right)
        needs = self.grad_enabled and any(v.needs_grad for v in inputs)
        out = self._recorded(per_token, 0, needs_grad=needs)
        step = Step(self.number[id(out)], self._numbers(inputs), Op.FUSED, per_token)
        if needs:
            step = step._replace(needs_grad=True, passes=True, wanted=self._wanted(inputs))
        self.steps.append(step)
        return out

    def split(self, source: Value, sizes: tuple[float, ...]) -> tuple[Value, ...]:
        """Return views: a compiler takes them for what they view."""
        parts = []
        for size in sizes:
            part = self._recorded(size, 0, needs_grad=source.needs_grad)
            self.number[id(part)] = self.number[id(source)]
            parts.append(part)
        return tuple(parts)

    def join(self, parts: tuple[Value, ...], per_token: float) -> Value:
        """Record that parts are copied one behind the other."""
        return self.op(parts, per_token)

    def add_in_place(self, total: Value, part: Value, *, saves: tuple[Value, ...]) -> Value:
        """Record that rows are added into `total`: functional code makes a new one, often in its place."""
        return self.op((total, part), total.size, saves=saves)

    def hold(self, value: Value) -> None:
        """Do nothing: a compiled graph has no nodes with attributes."""

    def _numbers(self, values: tuple[Value, ...]) -> tuple[int, ...]:
        return tuple(self.number[id(value)] for value in values)

    def _wanted(self, values: tuple[Value, ...]) -> tuple[tuple[int, float, int], ...]:
        return tuple(
            (self.number[id(v)], v.size, v.constant)
            for v in values
            if v.needs_grad and (v.size or v.constant)
        )

    # the forward

    def layer_done(self, out: Value) -> None:
        """Play the forward of what was recorded."""
        assert self.x is not None
        self.out = out
        made = self._made()
        self.saved = self._cut(made) if self.grad_enabled else set()
        self.handed = self._sources() if self.again and self.grad_enabled else self.saved
        launches = self._forward(made | self.saved)
        first, last = self.number[id(self.x)], self.number[id(out)]
        self.buffers[("value", first)] = self.x.storage
        self.x.storage.refs += 1
        self._play(launches, keep={("value", n) for n in (*self.handed, last)})
        unsaved = None if first in self.handed else self.buffers.pop(("value", first), None)
        if unsaved is not None:
            self.release(unsaved)
        out.storage = self.buffers[("value", last)]
        if last in self.handed:
            out.storage.refs += 1
        else:
            del self.buffers[("value", last)]
        self.last_save, self.last_save_event = len(self.points), len(self.events)

    def _sources(self) -> set[int]:
        """Return what stays where all is computed again but what a policy keeps."""
        policy, kept = Policy(), set[int]()
        producer = {step.out: step for step in self.steps}
        for step in self.steps if self.again == "ops" else ():
            if not step.leaf and policy.keeps(step.kind):
                kept.add(step.out)
                if step.kind is Op.ATTENTION:  # its statistics too
                    kept.update(n for n in step.saves if n in producer and producer[n].leaf)
        found: set[int] = set()
        waiting = list(self.saved)
        while waiting:
            number = waiting.pop()
            if number in kept or number not in producer:
                found.add(number)
            else:
                waiting += producer[number].inputs
        return found

    def _recomputed(self) -> list[Launch]:
        """Return the forward's kernels that make what was not left."""
        wanted = {("value", n) for n in self.saved - self.handed}
        chosen: list[Launch] = []
        for launch in reversed(self._forward(self._made() | self.saved)):
            if launch.makes in wanted and launch.makes not in self.buffers:
                chosen.append(launch)
                wanted.update(launch.reads)
        return chosen[::-1]

    def _made(self) -> set[int]:
        """Return the tensors that exist whatever is saved."""
        assert self.x is not None
        assert self.out is not None
        made = {self.number[id(self.x)], self.number[id(self.out)]}
        for step in self.steps:
            if not step.fused:
                made.update((step.out, *step.inputs))
        return made

    def _forward(self, made: set[int]) -> list[Launch]:
        """Return the forward's kernels, in order."""
        sources: dict[int, tuple[int, ...]] = {}
        read = {n for step in self.steps for n in (*step.inputs, *step.saves)}
        launches = []
        for step in self.steps:
            if step.leaf and step.out not in read:
                continue
            beside = step.saves if not step.fused else ()
            reads = {
                root
                for n in (*step.inputs, *(b for b in beside if b != step.out))
                for root in ((n,) if n in made else sources.get(n, ()))
            }
            if step.out not in made:
                sources[step.out] = tuple(reads)
                continue
            launches.append(
                Launch(
                    tuple(("value", n) for n in sorted(reads)),
                    ("value", step.out),
                    step.per_token,
                    step.constant,
                    fused=step.fused,
                    scratch=0 if step.fused else step.forward_scratch,
                    weight_scratch=0 if step.fused else step.forward_constant,
                )
            )
        return launches

    def _cut(self, made: set[int]) -> set[int]:
        """Return what the partitioner saves for the backward."""
        assert self.x is not None
        graph, sizes = Graph(), {self.number[id(self.x)]: self.x.size}
        needed = {n for step in self.steps for n in step.saves}
        passed_on = {
            n
            for step in self.steps
            if not step.fused and not self.narrow.intersection(step.inputs)
            for n in step.saves
        }
        # a cast of a kernel's own result is kept too: in the backward it would be a copy of its own
        kernels = {step.out for step in self.steps if not step.fused}
        copies = {
            step.out for step in self.steps if step.out in self.narrow and step.inputs[0] in kernels
        }
        needed |= copies
        passed_on |= copies
        far = self._far_apart()
        graph.fixed(self.number[id(self.x)])
        for step in self.steps:
            sizes[step.out] = step.per_token or step.constant
            for n in step.inputs:
                graph.computed(step.out, n)
            reduction = sizes[step.out] * SMALLER < sum(sizes[n] for n in set(step.inputs))
            if not step.fused or reduction or step.out in passed_on or step.out in far:
                graph.fixed(step.out)
        for number, steps in self._distances(needed).items():
            weight = sizes[number] * FARTHER[0] ** steps / FARTHER[1] ** steps
            graph.tensor(number, weight if number in made else 2 * weight)
        for number in needed:
            graph.needed(number)
        return minimum_cut(graph)

    def _distances(self, needed: set[int]) -> dict[int, int]:
        """Return how many operations lie between a tensor and the backward."""
        assert self.x is not None
        found = {self.number[id(self.x)]: 100} | {step.out: 100 for step in self.steps}
        found |= dict.fromkeys(needed, 1)
        for step in reversed(self.steps):
            for n in step.inputs:
                found[n] = min(found[n], found[step.out] + 1)
        return found

    def _far_apart(self) -> set[int]:
        """Return fused results of a tensor that something unfusible uses before them.

        The partitioner never makes these twice (ban_recompute_used_far_apart). The graph's own inputs
        do not count, and in a graph of one layer its input is one.
        """
        assert self.x is not None
        order = {step.out: place for place, step in enumerate(self.steps)}
        users: dict[int, list[Step]] = {}
        for step in self.steps:
            for n in set(step.inputs):
                users.setdefault(n, []).append(step)
        fusible = {step.out for step in self.steps if step.fused}
        if self.whole_model:
            fusible.add(self.number[id(self.x)])
        banned: set[int] = set()
        for number, used in users.items():
            if number not in fusible:
                continue
            last = max(order[step.out] for step in used)
            first = _first_kernel(used, users, order, last)
            banned |= {step.out for step in used if step.fused and order[step.out] > first}
        return banned

    # the backward

    def run_until_saved(self) -> None:
        """Do nothing: the layer's backward is one node, and it saved something."""

    def run(self) -> None:
        """Play the backward."""
        assert self.x is not None
        assert self.out is not None
        grad = self.out.grad
        assert grad is not None
        self.out.grad = None
        backward = Backward(self.steps, self.saved, self.number[id(self.out)])
        x = self.number[id(self.x)]
        launches, result = backward.launches(x if self.x.needs_grad else 0, self.x.size)
        self.buffers[backward.tangent] = grad
        grads: list[Storage] = []
        launches = [*self._recomputed(), *launches]
        self._play(launches, keep={result} if result else set(), grads=grads)
        if result:
            self.x.grad = self.buffers.pop(result)
        for storage in self.buffers.values():  # saved, and read by nothing after all
            self.release(storage)
        self.buffers.clear()
        if not self.keep_weight_grads:
            for storage in grads:
                self.release(storage)

    def _play(
        self, launches: list[Launch], *, keep: set[Key], grads: list[Storage] | None = None
    ) -> None:
        left = Counter(key for launch in launches for key in launch.reads)
        for launch in launches:
            passing = self._passing(launch.scratch, launch.weight_scratch)
            size, constant = launch.per_token, launch.constant
            dying = [key for key in launch.reads if left[key] == 1 and key not in keep]
            taken = next((key for key in dying if self._fits(key, launch)), None)
            if taken is not None and launch.makes:
                self.buffers[launch.makes] = self.buffers.pop(taken)
                dying.remove(taken)
            elif launch.makes:
                self.buffers[launch.makes] = self.alloc(size, constant)
            if launch.weight_grad and grads is not None:
                grads.append(self.alloc(0, weight_grad=launch.weight_grad))
            if passing:
                self.spike(total(launch.scratch), launch.weight_scratch)
            self._end(passing)
            left.subtract(launch.reads)
            for key in dying:
                self.release(self.buffers.pop(key))
            if launch.makes and not left[launch.makes] and launch.makes not in keep:
                self.release(self.buffers.pop(launch.makes))

    def _fits(self, key: Key, launch: Launch) -> bool:
        """Return whether a fused kernel may write its result over a buffer that dies in it."""
        held = self.buffers[key]
        same = held.per_token == launch.per_token and held.constant == launch.constant
        return launch.fused and same and held.refs == 1


def _first_kernel(
    used: list[Step], users: dict[int, list[Step]], order: dict[int, int], last: int
) -> int:
    """Return the place of the first unfusible operation downstream of `used`, `last` if none is before."""
    waiting, seen = list(used), set[int]()
    while waiting:
        waiting.sort(key=lambda step: order[step.out])
        step = waiting.pop(0)
        if not step.fused:
            return order[step.out]
        for user in users.get(step.out, ()):
            if order[user.out] <= last and user.out not in seen:
                seen.add(user.out)
                waiting.append(user)
    return last


def layer_tape(
    compiled: str,
    *,
    grad_enabled: bool = True,
    keep_weight_grads: bool = True,
    recomputed: bool = False,
    again: str = "",
) -> Tape:
    """Return the tape that a layer runs on: operation by operation, or as compiled code."""
    if not compiled:
        return Tape(
            grad_enabled=grad_enabled, keep_weight_grads=keep_weight_grads, recomputed=recomputed
        )
    return CompiledTape(
        grad_enabled=grad_enabled,
        keep_weight_grads=keep_weight_grads,
        whole_model=compiled == "model",
        again=again,
    )
