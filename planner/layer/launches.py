"""Recorded operations of a compiled layer, and the kernels of its backward.

Inductor's code is a row of launches: each reads buffers and makes one. Fused pointwise operations are
no launches of their own, backward neither: a gradient is made where a kernel reads it, or where it leaves.
"""

from typing import NamedTuple

from planner.layer.tape import Op, Scratch

Key = tuple[str, int]
"""A buffer: of a forward tensor ("value"), of a gradient ("grad"), or what one kernel adds to one."""


class Step(NamedTuple):
    """One recorded operation; inputs and outputs are numbers of tensors, views counted as what they view."""

    out: int
    inputs: tuple[int, ...]
    kind: Op
    per_token: float
    constant: int = 0
    needs_grad: bool = False
    saves: tuple[int, ...] = ()
    wanted: tuple[tuple[int, float, int], ...] = ()
    """Inputs with a gradient: number, bytes per token of the gradient, constant ones."""
    scratch: Scratch = 0
    forward_scratch: Scratch = 0
    weight_grad: int = 0
    weight_scratch: int = 0
    forward_constant: int = 0
    passes: bool = False
    """An addition: a gradient goes through as it is."""
    leaf: bool = False
    """Made by no operation: a mask, a cast weight, an attention's statistics."""

    @property
    def fused(self) -> bool:
        """Whether inductor may make it part of another kernel."""
        return self.kind is Op.FUSED and not self.leaf


class Launch(NamedTuple):
    """One kernel: what it reads, and the buffer it makes."""

    reads: tuple[Key, ...]
    makes: Key | None
    per_token: float = 0
    constant: int = 0
    fused: bool = True
    scratch: Scratch = 0
    weight_scratch: int = 0
    weight_grad: int = 0


class Backward:
    """Turns recorded steps into the kernels of their backward."""

    def __init__(self, steps: list[Step], saved: set[int], out: int) -> None:
        self.steps = steps
        self.saved = saved
        self.tangent: Key = ("grad", out)
        self.made: dict[int, Key] = {out: self.tangent}
        self.found: list[Launch] = []
        self.users: dict[int, list[tuple[int, Step]]] = {}
        self.producer = {step.out: step for step in steps}
        self.added: dict[tuple[int, int], list[Key]] = {}
        for place, step in enumerate(steps):
            for n in {n for n, _, _ in step.wanted}:
                self.users.setdefault(n, []).append((place, step))

    def launches(self, x: int, x_size: float) -> tuple[list[Launch], Key | None]:
        """Return the kernels in order and the buffer of the input's gradient (`x` = 0: none)."""
        for place in range(len(self.steps) - 1, -1, -1):
            step = self.steps[place]
            if not step.needs_grad:
                continue
            if not step.fused:
                self._kernel(place, step)
            elif step.weight_grad:
                reads = self._gradients(step.out) | self._forward(step.saves)
                self.found.append(Launch(tuple(sorted(reads)), None, weight_grad=step.weight_grad))
        return self.found, self._gradient(x, x_size, 0) if x else None

    def _kernel(self, place: int, step: Step) -> None:
        """Add a kernel's backward: a gradient an input, and the weight's."""
        grad = self._gradient(step.out, step.per_token, step.constant)
        if grad is None:
            return
        saved = self._forward(step.saves)
        reads = tuple(sorted({grad, *saved}))
        for index, (number, size, constant) in enumerate(step.wanted):
            key = (f"part {index}", place)
            self.added.setdefault((place, number), []).append(key)
            self.found.append(
                Launch(
                    reads,
                    key,
                    size,
                    constant,
                    fused=False,
                    scratch=step.scratch if index == 0 else 0,
                    weight_scratch=step.weight_scratch,
                )
            )
        if step.weight_grad:
            self.found.append(Launch(reads, None, fused=False, weight_grad=step.weight_grad))

    def _gradient(self, number: int, size: float, constant: int) -> Key | None:
        """Return the buffer of a tensor's whole gradient, made now unless it exists."""
        if number in self.made:
            return self.made[number]
        users = self.users.get(number, [])
        if len(users) == 1 and users[0][1].passes:
            step = users[0][1]
            key = self._gradient(step.out, step.per_token, 0)
            if key is not None and step.per_token == size:
                self.made[number] = key
                return key
        reads = self._gradients(number)
        if not reads:
            return None
        if len(reads) == 1 and len(users) == 1 and not users[0][1].fused:
            (key,) = reads  # one kernel's result is all of it
            self.made[number] = key
            return key
        for _, step in self._between(number):
            reads |= self._forward(step.saves)
        key = ("grad", number)
        self.found.append(Launch(tuple(sorted(reads)), key, size, constant))
        self.made[number] = key
        return key

    def _gradients(self, number: int) -> set[Key]:
        """Return the buffers that a tensor's gradient is computed from."""
        if number in self.made:
            return {self.made[number]}
        found: set[Key] = set()
        for place, step in self.users.get(number, []):
            if step.fused:
                found |= self._gradients(step.out)
            else:
                found.update(self.added.get((place, number), ()))
        return found

    def _between(self, number: int) -> list[tuple[int, Step]]:
        """Return the fused operations that a tensor's gradient comes through."""
        found = []
        for place, step in self.users.get(number, []):
            if step.fused:
                found.append((place, step))
                if step.out not in self.made:
                    found += self._between(step.out)
        return found

    def _forward(self, numbers: tuple[int, ...]) -> set[Key]:
        """Return the saved buffers that forward tensors are read or made again from."""
        found: set[Key] = set()
        for number in numbers:
            if number in self.saved:
                found.add(("value", number))
            elif number in self.producer:
                found |= self._forward(self.producer[number].inputs)
        return found
