"""Every allocation and free of one decoder layer, in order: what the allocator's replay plays.

Block numbers are the tape's; a layer's input, output and their gradients belong to the caller.
"""

from dataclasses import dataclass

from planner.layer.blocks import run_layer
from planner.layer.compiled import layer_tape
from planner.layer.costs import again_tape, cached
from planner.layer.program import OpSettings, Program
from planner.layer.selective import ForwardTape, Policy
from planner.layer.tape import FREED, Event, Tape, Value
from planner.models.spec import LayerSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerEvents:
    """One pass of a layer; a block number of 0 means there is none. Found in caches as the object it is."""

    events: tuple[Event, ...]
    x: int
    """The input; the events free it when the pass is the last to need it."""
    out: int = 0
    """Made by a forward, left for the next layer."""
    grad_out: int = 0
    """Handed to a backward, freed by its events."""
    grad_in: int = 0
    """Made by a backward, left for the layer before."""


@dataclass(frozen=True, slots=True)
class KeptEvents:
    """Forward and backward of a layer whose graph is kept; they share block numbers."""

    forward: LayerEvents
    backward: LayerEvents


def forward_events(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerEvents:
    """Return a forward without a graph; the input is the caller's to free."""
    return cached(_forward, layer, hidden, settings)


def kept_events(layer: LayerSpec, hidden: int, settings: OpSettings) -> KeptEvents:
    """Return forward and backward of a layer whose graph is kept."""
    return cached(_kept, layer, hidden, settings)


def recomputed_events(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerEvents:
    """Return the backward of a checkpointed layer: non-reentrant, stopping early, as torch does."""
    return cached(_recomputed, layer, hidden, settings)


def reentrant_events(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerEvents:
    """Return the backward of a layer under the older checkpoint, which runs the whole forward."""
    return cached(_reentrant, layer, hidden, settings)


def recomputed_held_events(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerEvents:
    """Return the same of a layer whose gradients somebody else holds: none is reused in place."""
    return cached(_recomputed_held, layer, hidden, settings)


def reentrant_held_events(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerEvents:
    """Return the older checkpoint's backward when somebody else holds the gradients."""
    return cached(_reentrant_held, layer, hidden, settings)


def _forward(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerEvents:
    tape = layer_tape(settings.compiled, grad_enabled=False)
    x = tape.value(settings.stream(hidden))
    out = run_layer(Program(tape, settings), x, layer, hidden)
    block = x.storage.block
    return LayerEvents(_without(tape.events, block), block, out.storage.block)


def _kept(layer: LayerSpec, hidden: int, settings: OpSettings) -> KeptEvents:
    if settings.again and not settings.compiled:
        return _kept_again(layer, hidden, settings)
    width = settings.stream(hidden)
    tape = layer_tape(
        settings.compiled, keep_weight_grads=not settings.accumulate, again=settings.again
    )
    x = tape.value(width, needs_grad=settings.input_grad)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    first, last = x.storage.block, out.storage.block
    tape.drop(x)
    forward = LayerEvents(_without(tape.events, first, frees=False), first, last)
    tape.events.clear()
    tape.start_backward(out, width)
    assert out.grad is not None
    incoming = out.grad.block
    tape.run()
    tape.end_graph()
    backward = LayerEvents(
        _without(tape.events, incoming, frees=False),
        first,
        grad_out=incoming,
        grad_in=x.grad.block if x.grad else 0,
    )
    return KeptEvents(forward, backward)


def _kept_again(layer: LayerSpec, hidden: int, settings: OpSettings) -> KeptEvents:
    """Return both passes of a layer of which its input stays and what the policy chooses."""
    if settings.again == "all":
        plain = settings._replace(again="")
        return KeptEvents(
            forward_events(layer, hidden, plain), recomputed_events(layer, hidden, plain)
        )
    width = settings.stream(hidden)
    first = ForwardTape(Policy())
    x = first.value(width)
    out = run_layer(Program(first, settings), x, layer, hidden)
    block = x.storage.block
    beyond = block + len(first.kept)
    forward = LayerEvents(_without(first.renamed(block), block), block, beyond + out.storage.block)
    tape = again_tape(first, layer, hidden, settings)
    x = tape.value(width, needs_grad=settings.input_grad)
    tape.left_by(first)
    tape.events.clear()
    return KeptEvents(forward, _computed_again(tape, x, layer, hidden, settings))


def _recomputed_held(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerEvents:
    return _recomputed(layer, hidden, settings, held=True)


def _reentrant_held(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerEvents:
    return _reentrant(layer, hidden, settings, held=True)


def _recomputed(
    layer: LayerSpec, hidden: int, settings: OpSettings, *, held: bool = False
) -> LayerEvents:
    tape = layer_tape(settings.compiled, keep_weight_grads=not settings.accumulate, recomputed=True)
    x = tape.value(settings.stream(hidden))
    return _computed_again(tape, x, layer, hidden, settings, held=held)


def _computed_again(
    tape: Tape,
    x: Value,
    layer: LayerSpec,
    hidden: int,
    settings: OpSettings,
    *,
    held: bool = False,
) -> LayerEvents:
    """Return a layer's second forward, as far as it goes, and its backward."""
    width = settings.stream(hidden)
    before, there = len(tape.events), set(range(1, tape.blocks + 1))
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(out)
    stop = max(tape.last_save_event, before)
    again, unwound = tape.events[:stop], tape.events[stop:]
    made = there | {event.block for event in again}
    again += [e for e in unwound if e.per_token == FREED and e.block in made]
    tape.events.clear()
    tape.start_backward(out, width)
    assert out.grad is not None
    incoming = out.grad.block
    out.grad.refs += held
    tape.run_until_saved()
    early = list(tape.events)
    tape.events.clear()
    tape.run()
    tape.end_graph()
    first = x.storage.block
    events = _without([*early, *again, *tape.events], first)
    return LayerEvents(
        _without(events, incoming, frees=False),
        first,
        grad_out=incoming,
        grad_in=x.grad.block if x.grad else 0,
    )


def _reentrant(
    layer: LayerSpec, hidden: int, settings: OpSettings, *, held: bool = False
) -> LayerEvents:
    width = settings.stream(hidden)
    tape = layer_tape(settings.compiled, keep_weight_grads=not settings.accumulate)
    x = tape.value(width)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.start_backward(out, width)
    assert out.grad is not None
    incoming = out.grad.block
    out.grad.refs += held
    tape.run()
    tape.end_graph()
    tape.drop(out)  # the recomputed output is a variable until its backward is done
    first = x.storage.block
    events = _without(_without(tape.events, first), incoming, frees=False)
    return LayerEvents(events, first, grad_out=incoming, grad_in=x.grad.block if x.grad else 0)


def _without(
    events: list[Event] | tuple[Event, ...], block: int, *, frees: bool = True
) -> tuple[Event, ...]:
    """Return the events but for the beginning of `block`, and (`frees`) its end."""
    return tuple(e for e in events if e.block != block or (e.per_token == FREED and not frees))
