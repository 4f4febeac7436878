"""What one decoder layer keeps and needs, measured by running its program on a tape; cached."""

from typing import NamedTuple

from planner.layer_blocks import run_layer
from planner.layer_program import OpSettings, Program
from planner.model import LayerSpec
from planner.tape import Envelope, Point, Tape, envelope


class LayerCosts(NamedTuple):
    """Bytes of one layer, as envelopes over the number of tokens."""

    kept: Point
    """What its graph holds after the forward; its input too, if something saved it."""
    forward: Envelope
    """Forward with gradients on, the layer's input included."""
    no_grad: Envelope
    """Forward without a graph (checkpointed, scoring), the layer's input included."""
    backward: Envelope
    """Backward from the kept state: what is kept and the incoming gradient included."""
    recompute: Envelope
    """Recompute and backward under checkpointing, without the stored input."""
    recompute_fetched: Envelope
    """The same with an input that came back from the host, while something needs it."""
    keeps_input: bool
    """Something in the layer saved its input itself (an fp32 residual stream)."""
    input_per_token: float


_CACHE: dict[tuple[int, int, OpSettings], tuple[LayerSpec, LayerCosts]] = {}
_CACHE_LIMIT = 20_000


def layer_costs(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerCosts:
    """Return what one layer of this kind holds and needs, as envelopes over tokens."""
    key = (id(layer), hidden, settings)
    hit = _CACHE.get(key)
    if hit is not None:
        return hit[1]
    if len(_CACHE) > _CACHE_LIMIT:
        _CACHE.clear()
    costs = _measure(layer, hidden, settings)
    _CACHE[key] = (layer, costs)  # keeps `layer` alive, so its id stays its own
    return costs


def _measure(layer: LayerSpec, hidden: int, settings: OpSettings) -> LayerCosts:
    width = hidden * settings.residual
    plain = Tape(grad_enabled=False)
    x = plain.value(width)
    run_layer(Program(plain, settings), x, layer, hidden)
    kept, forward, backward, keeps_input = _graph(layer, hidden, settings)
    return LayerCosts(
        kept,
        forward,
        envelope(plain.points),
        backward,
        _recompute(layer, hidden, settings, fetched=False),
        _recompute(layer, hidden, settings, fetched=True),
        keeps_input,
        width,
    )


def _graph(
    layer: LayerSpec, hidden: int, settings: OpSettings
) -> tuple[Point, Envelope, Envelope, bool]:
    """Run forward and backward with everything kept."""
    tape = Tape(keep_weight_grads=not settings.accumulate)
    x = tape.value(hidden * settings.residual, needs_grad=settings.input_grad)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(x, out)
    forward, kept, keeps_input = envelope(tape.points), tape.now(), x.storage.refs > 0
    tape.points.clear()
    tape.start_backward(out, hidden * settings.residual)
    tape.run()
    return kept, forward, envelope(tape.points), keeps_input


def _recompute(layer: LayerSpec, hidden: int, settings: OpSettings, *, fetched: bool) -> Envelope:
    """Run a checkpointed layer's backward: non-reentrant, stopping early, as torch does.

    Backward starts on nodes that saved nothing; the first that needs a saved tensor makes the
    forward run again up to the last tensor that anything saved. The stored input is left out;
    if it was `fetched` from the host it is counted, and freed when nothing saved it.
    """
    width = hidden * settings.residual
    tape = Tape(keep_weight_grads=not settings.accumulate)
    x = tape.value(width)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(out, x) if fetched else tape.drop(out)
    counted = 0 if fetched else width
    again = tape.points[: max(tape.last_save, 1)]
    kept = tape.now()
    tape.points.clear()
    tape.start_backward(out, width)
    tape.run_until_saved()
    early = [
        Point(p.per_token - kept.per_token, p.constant - kept.constant, p.weight_grads)
        for p in tape.points
    ]
    waiting = tape.now().per_token - kept.per_token
    points = [Point(p.per_token + waiting - counted, *p[1:]) for p in again]
    tape.points.clear()
    tape.run()
    rest = [Point(p.per_token - counted, *p[1:]) for p in tape.points]
    return envelope(early + points + rest)
