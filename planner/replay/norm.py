"""The final norm's events."""

from functools import lru_cache

from planner.layer.compiled import layer_tape
from planner.layer.events import KeptEvents, LayerEvents
from planner.layer.program import OpSettings, Program
from planner.layer.tape import FREED
from planner.models.spec import ModelSpec
from planner.terms.activations import beside_layers, tail_settings


def norm_events(model: ModelSpec, settings: OpSettings) -> KeptEvents:
    """Return forward and backward of the final norm; its input and output are the caller's."""
    return _norm(model.hidden, tail_settings(settings))


@lru_cache(maxsize=1024)
def _norm(hidden: int, settings: OpSettings) -> KeptEvents:
    width = settings.stream(hidden)
    tape = layer_tape(beside_layers(settings), keep_weight_grads=not settings.accumulate)
    x = tape.value(width)
    out = Program(tape, settings).norm(x, settings.residual, hidden // settings.sequence)
    tape.layer_done(out)
    first, last = x.storage.block, out.storage.block
    tape.drop(x)
    forward = tuple(e for e in tape.events if e.block != first or e.per_token == FREED)
    tape.events.clear()
    tape.start_backward(out, width)
    assert out.grad is not None
    incoming = out.grad.block
    tape.run()
    backward = tuple(e for e in tape.events if e.block != incoming or e.per_token == FREED)
    return KeptEvents(
        LayerEvents(forward, first, last),
        LayerEvents(backward, first, grad_out=incoming, grad_in=x.grad.block if x.grad else 0),
    )
