"""Checkpointing by operation: which results a policy keeps, and a layer that is computed again around them.

torchtitan's policy (distributed/activation_checkpoint.py, 2024 to 2026): the results of attention and of
every second aten::mm are kept, the first one included; all else is computed again. In eager code
torch.utils.checkpoint keeps every such result, needed later or not; a compiled layer keeps what its
backward reads.
"""

from planner.layer.tape import Event, Op, Storage, Tape, Value


class Policy:
    """Counts a layer's matmuls as torchtitan's policy does."""

    def __init__(self) -> None:
        self.matmuls = 0

    def keeps(self, kind: Op) -> bool:
        """Return whether the next operation's result is kept."""
        if kind is Op.MATMUL:
            self.matmuls += 1
            return self.matmuls % 2 == 1
        return kind is Op.ATTENTION


class ForwardTape(Tape):
    """A checkpointed layer's first forward: what the policy chooses stays."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(grad_enabled=False)
        self.policy = policy
        self.kept: list[Storage] = []

    def result(self, kind: Op, per_token: float, constant: int) -> Storage:
        """Return the storage of an operation's result."""
        storage = self.alloc(per_token, constant)
        return self._keep(storage) if self.policy.keeps(kind) else storage

    def statistics(self, per_token: float) -> Value:
        """Return what attention returns beside its result."""
        value = super().statistics(per_token)
        self._keep(value.storage)
        return value

    def _keep(self, storage: Storage) -> Storage:
        storage.refs += 1
        self.kept.append(storage)
        return storage

    def renamed(self, x: int) -> tuple[Event, ...]:
        """Return the events with kept blocks numbered as AgainTape numbers them: after the input."""
        numbers = {storage.block: x + place for place, storage in enumerate(self.kept, start=1)}
        numbers[x] = x
        beyond = x + len(self.kept)
        return tuple(
            event._replace(block=numbers.get(event.block, beyond + event.block))
            for event in self.events
        )


class AgainTape(Tape):
    """The layer run again: what was kept is there already."""

    def __init__(self, policy: Policy, *, keep_weight_grads: bool, asks: int | None = None) -> None:
        super().__init__(keep_weight_grads=keep_weight_grads, recomputed=True)
        self.policy = policy
        self.kept: list[Storage] = []
        self.asks = asks
        """How many results the second run asks for before it stops; None: not known yet."""
        self.asked = self.needed = 0
        self._given = False

    def left_by(self, first: ForwardTape) -> None:
        """Count what the first forward kept."""
        self.kept = [self.alloc(each.per_token, each.constant) for each in first.kept]

    def result(self, kind: Op, per_token: float, constant: int) -> Storage:
        """Return the storage of an operation's result: the kept one, if it was."""
        self._given = self.policy.keeps(kind) and self._more()
        return self._next() if self._given else self.alloc(per_token, constant)

    def statistics(self, per_token: float) -> Value:
        """Return what attention returned beside its result."""
        return Value(self._next(), needs_grad=False, size=per_token)

    def _more(self) -> bool:
        """Return whether the run gets so far: results that it does not ask for stay with the graph."""
        return self.asks is None or self.asked < self.asks

    def _next(self) -> Storage:
        self.asked += 1
        return self.kept.pop(0)

    def noted(self, *, result: bool) -> None:
        """Count what was asked for until something was last saved: there the run stops."""
        self.needed = self.asked - (self._given and not result)

    def end_graph(self) -> None:
        """Forget the autograd nodes, and kept results that nothing asked for again."""
        super().end_graph()
        for storage in self.kept:
            self.release(storage)
        self.kept.clear()
