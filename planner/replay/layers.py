"""The decoder layers' passes: what a forward leaves behind and what a backward frees again."""

from dataclasses import dataclass, field

from planner.allocator.pool import Chunk
from planner.layer.events import (
    KeptEvents,
    LayerEvents,
    forward_events,
    kept_events,
    recomputed_events,
    recomputed_held_events,
    reentrant_events,
    reentrant_held_events,
)
from planner.layer.program import OpSettings
from planner.models.spec import LayerSpec, ModelSpec
from planner.replay.player import Blocks, Player
from planner.replay.recurring import Recurring
from planner.replay.units import Units
from planner.run.recipe import Checkpointing
from planner.run.resolved import Resolved
from planner.terms.activations import KEEPS_GRAPHS, layer_settings


@dataclass(slots=True)
class Layers:
    """The decoder stack during one micro-batch."""

    model: ModelSpec
    r: Resolved
    settings: OpSettings
    tokens: int
    player: Player
    units: Units | None = None
    """Set when layers are sharded."""
    inputs: list[Chunk | None] = field(default_factory=list)
    """Checkpointed layers' inputs, first to last; None: it waits on the host."""
    kept: list[Blocks] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Bytes per token of the hidden stream."""
        return self.settings.stream(self.model.hidden)

    @property
    def order(self) -> list[LayerSpec]:
        """Every decoder layer."""
        return [self.model.layers[index] for index in self.model.layer_order]

    def no_grad(self, x: Chunk) -> Chunk:
        """Play all layers without a graph; `x` is freed."""
        order, index = self.order, 0
        recurring = self._recurring(order, len(order))
        while index < len(order):
            self._gather(order[index])
            events = forward_events(order[index], self.model.hidden, self.settings)
            left = self.player.play(events, self.tokens, {events.x: x})
            self.player.give(left.pop(events.x))
            x = left[events.out]
            index = recurring.after(index, x)
        return x

    def _recurring(self, order: list[LayerSpec], until: int) -> Recurring:
        """Return what skips layers before `until`, where nothing but their outputs is left of them."""
        return Recurring(order, self.player, until if self.units is None else 0)

    def forward(self, x: Chunk) -> Chunk:
        """Play the forward; what backward needs stays."""
        if self.r.checkpointing in KEEPS_GRAPHS:
            return self._keep(x)
        offload = self.r.checkpointing is Checkpointing.OFFLOAD
        every = self.r.checkpoint_every if self.r.checkpointing is Checkpointing.EVERY_K else 1
        resident = self.r.keep_layers if offload else self.model.num_layers
        away = max(0, self.model.num_layers - resident)
        order, index = self.order, 0
        recurring = self._recurring(order, away)
        while index < len(order):
            self._gather(order[index])
            events = forward_events(order[index], self.model.hidden, self.settings)
            left = self.player.play(events, self.tokens, {events.x: x})
            if index % every or index < away:
                self.player.give(left.pop(events.x))
            x_before = left.pop(events.x, None)
            x = left[events.out]
            following = recurring.after(index, x)
            if index < away:
                self.inputs += [None] * (following - index)
            elif not index % every:
                self.inputs.append(x_before)
            index = following
        return x

    def _gather(self, layer: LayerSpec, *, backward: bool = False) -> None:
        if self.units is not None:
            self.units.before(layer, backward=backward)

    def _reduce(self, layer: LayerSpec, made: list[Chunk], grads: list[Chunk]) -> None:
        if self.units is None and self.r.copies_into_buckets:
            self.player.give(*made)
        elif self.units is None:
            grads.extend(made)
        else:
            self.units.after_backward(layer, made, grads)

    @property
    def _frozen_hooks(self) -> bool:
        """Every layer's input and the input's gradient stay until the backward ends."""
        held = self.r.placement.holds_frozen_inputs
        return held and self.r.checkpointing is Checkpointing.FULL

    def _keep(self, x: Chunk) -> Chunk:
        for index, layer in enumerate(self.order):
            self._gather(layer)
            events = self._kept_events(index, layer).forward
            left = self.player.play(events, self.tokens, {events.x: x})
            x = left.pop(events.out)
            self.kept.append(left)
        return x

    def _kept_events(self, index: int, layer: LayerSpec) -> KeptEvents:
        settings = layer_settings(self.r, self.settings, index)
        if (
            index == 0 and not settings.embedding
        ):  # nothing before the first adapters needs a gradient
            settings = settings._replace(input_grad=False)
        return kept_events(layer, self.model.hidden, settings)

    def backward(self, out: Chunk | None, grad: Chunk, grads: list[Chunk]) -> Chunk | None:
        """Play the backward; `grads` gets the weights' gradients. Returns the embeddings' gradient.

        `out` is the last layer's output, `grad` its gradient; both are freed.
        """
        self.player.give(out)
        if self.r.checkpointing in KEEPS_GRAPHS:
            return self._backward_kept(grad, grads)
        every = self.r.checkpoint_every if self.r.checkpointing is Checkpointing.EVERY_K else 1
        held = self._frozen_hooks
        hooked: list[Chunk | None] = []
        order = self.order
        fetched = self._fetch(len(self.inputs) - 1)
        for number in range(len(self.inputs) - 1, -1, -1):
            x, fetched = fetched, self._fetch(number - 1)
            assert x is not None
            first = number * every
            segment = order[first : first + every]
            if len(segment) > 1:
                grad = self._segment(segment, x, grad, grads)
                continue
            self._gather(segment[0], backward=True)
            lasting = held and number < len(self.inputs) - 1  # the last output is no layer's input
            events = self._again(segment[0], held=lasting)
            left = self.player.play(events, self.tokens, {events.x: x, events.grad_out: grad})
            if held:
                hooked.append(left.pop(events.x, None))
            if lasting:
                hooked.append(grad)
                left.pop(events.grad_out, None)
            grad = left.pop(events.grad_in)
            self.player.give(left.pop(events.x, None))
            self._reduce(segment[0], list(left.values()), grads)
        self.player.give(*hooked)
        return grad

    def _again(self, layer: LayerSpec, *, held: bool) -> LayerEvents:
        """Return a checkpointed layer's backward; `held`: somebody else has its output's gradient."""
        if self.r.switches.reentrant:
            pick = reentrant_held_events if held else reentrant_events
        else:
            pick = recomputed_held_events if held else recomputed_events
        return pick(layer, self.model.hidden, self.settings)

    def _fetch(self, number: int) -> Chunk | None:
        """Return a checkpoint's input, brought back from the host if it was there."""
        if number < 0:
            return None
        held = self.inputs[number]
        return held if held is not None else self.player.block(self.width * self.tokens)

    def _segment(
        self, segment: list[LayerSpec], x: Chunk, grad: Chunk, grads: list[Chunk]
    ) -> Chunk:
        """Play the recompute and backward of several layers checkpointed as one."""
        inside = Layers(self.model, self.r, self.settings, self.tokens, self.player)
        for layer in segment:
            self._gather(layer, backward=True)
            events = kept_events(layer, self.model.hidden, self.settings).forward
            left = self.player.play(events, self.tokens, {events.x: x})
            x = left.pop(events.out)
            inside.kept.append(left)
        self.player.give(x)
        for layer, left in zip(reversed(segment), reversed(inside.kept), strict=True):
            events = kept_events(layer, self.model.hidden, self.settings).backward
            left = self.player.play(events, self.tokens, {**left, events.grad_out: grad})
            grad = left.pop(events.grad_in)
            self.player.give(left.pop(events.x, None))
            self._reduce(layer, list(left.values()), grads)
        return grad

    def _backward_kept(self, grad: Chunk, grads: list[Chunk]) -> Chunk | None:
        incoming: Chunk | None = grad
        order = self.order
        for index in range(self.model.num_layers - 1, -1, -1):
            layer = order[index]
            self._gather(layer, backward=True)
            events = self._kept_events(index, layer).backward
            assert incoming is not None  # only the first layer may end without one
            blocks = {**self.kept.pop(), events.grad_out: incoming}
            left = self.player.play(events, self.tokens, blocks)
            incoming = left.pop(events.grad_in, None)
            self._reduce(layer, list(left.values()), grads)
        return incoming
