"""What one decoder layer keeps and needs, measured by running its program on a tape; cached."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeVar

from planner.layer.blocks import run_layer
from planner.layer.compiled import layer_tape
from planner.layer.program import OpSettings, Program
from planner.layer.selective import AgainTape, ForwardTape, Policy
from planner.layer.tape import Envelope, Point, envelope, shifted
from planner.models.spec import LayerSpec

Costs = TypeVar("Costs")


class KeptCosts(NamedTuple):
    """A layer whose graph is kept, as envelopes over the number of tokens."""

    kept: Point
    """What its graph holds after the forward; its input too, if something saved it."""
    forward: Envelope
    """Forward with gradients on, the layer's input included."""
    backward: Envelope
    """Backward from the kept state: what is kept and the incoming gradient included."""
    keeps_input: bool
    """Something in the layer saved its input itself (an fp32 residual stream)."""


@dataclass(frozen=True)
class CheckpointedCosts:
    """A layer that is recomputed in backward."""

    layer: LayerSpec
    hidden: int
    settings: OpSettings
    parts: tuple[list[Point], list[Point], list[Point]]
    """Before, during and after the recompute, without the stored input."""
    saves_input: bool

    @cached_property
    def recompute(self) -> Envelope:
        """Recompute and backward, without the stored input."""
        return envelope(list(chain(*self.parts)))

    @cached_property
    def recompute_fetched(self) -> Envelope:
        """The same with an input that came back from the host, while something needs it."""
        if self.saves_input:
            early, again, rest, _ = _recompute(self.layer, self.hidden, self.settings, fetched=True)
            return envelope(early + again + rest)
        early, again, rest = self.parts  # freed as soon as the forward has run again
        return envelope([*early, *shifted(again, self.settings.stream(self.hidden)), *rest])


_BY_ID: dict[tuple[object, ...], tuple[LayerSpec, object]] = {}
_BY_VALUE: dict[tuple[object, ...], object] = {}
_CACHE_LIMIT = 20_000


def cached(
    what: Callable[[LayerSpec, int, OpSettings], Costs],
    layer: LayerSpec,
    hidden: int,
    settings: OpSettings,
) -> Costs:
    """Return `what(layer, hidden, settings)`, once for equal layers of all models."""
    key = (what, id(layer), hidden, settings)
    hit = _BY_ID.get(key)
    if hit is None:
        if len(_BY_ID) > _CACHE_LIMIT:
            _BY_ID.clear()
            _BY_VALUE.clear()
        value = (what, replace(layer, count=1), hidden, settings)
        if value not in _BY_VALUE:
            _BY_VALUE[value] = what(layer, hidden, settings)
        hit = (layer, _BY_VALUE[value])  # keeps `layer` alive, so its id stays its own
        _BY_ID[key] = hit
    return hit[1]  # type: ignore[return-value]


def no_grad_costs(layer: LayerSpec, hidden: int, settings: OpSettings) -> Envelope:
    """Return a forward without a graph (checkpointed, scoring), the layer's input included."""
    return cached(_no_grad, layer, hidden, settings)


def kept_costs(layer: LayerSpec, hidden: int, settings: OpSettings) -> KeptCosts:
    """Return what one layer of this kind holds and needs when its graph is kept."""
    return cached(_kept, layer, hidden, settings)


def checkpointed_costs(layer: LayerSpec, hidden: int, settings: OpSettings) -> CheckpointedCosts:
    """Return what one layer of this kind needs when it is recomputed in backward."""
    return cached(_checkpointed, layer, hidden, settings)


def _no_grad(layer: LayerSpec, hidden: int, settings: OpSettings) -> Envelope:
    tape = layer_tape(settings.compiled, grad_enabled=False)
    run_layer(Program(tape, settings), tape.value(settings.stream(hidden)), layer, hidden)
    return envelope(tape.points)


def _kept(layer: LayerSpec, hidden: int, settings: OpSettings) -> KeptCosts:
    if settings.again and not settings.compiled:
        return _kept_again(layer, hidden, settings)
    tape = layer_tape(
        settings.compiled, keep_weight_grads=not settings.accumulate, again=settings.again
    )
    x = tape.value(settings.stream(hidden), needs_grad=settings.input_grad)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(x, out)
    forward, kept, keeps_input = envelope(tape.points), tape.now(), x.storage.refs > 0
    tape.points.clear()
    tape.start_backward(out, settings.stream(hidden))
    tape.run()
    return KeptCosts(kept, forward, envelope(tape.points), keeps_input)


def _kept_again(layer: LayerSpec, hidden: int, settings: OpSettings) -> KeptCosts:
    """Run a layer of which a checkpoint keeps its input and what its policy chooses."""
    width = settings.stream(hidden)
    if settings.again == "all":
        forward = no_grad_costs(layer, hidden, settings._replace(again=""))
        again = checkpointed_costs(layer, hidden, settings._replace(again=""))
        return KeptCosts(Point(width, 0, 0), forward, shifted(again.recompute, width), True)
    first = ForwardTape(Policy())
    x = first.value(width)
    out = run_layer(Program(first, settings), x, layer, hidden)
    first.drop(out)
    forward, kept = envelope(first.points), first.now()
    tape = again_tape(first, layer, hidden, settings)
    x = tape.value(width, needs_grad=settings.input_grad)
    tape.left_by(first)
    start = len(tape.points)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(out)  # the input is the checkpoint's until its backward is done
    computed = tape.points[start : max(tape.last_save, start + 1)]
    left = tape.now()
    tape.points.clear()
    tape.start_backward(out, width)
    tape.run_until_saved()
    # before the recompute only what was kept is there
    early = [
        Point(
            p.per_token - left.per_token + kept.per_token,
            p.constant - left.constant + kept.constant,
            p.weight_grads,
        )
        for p in tape.points
    ]
    waiting = tape.now().per_token - left.per_token
    tape.points.clear()
    tape.run()
    return KeptCosts(
        kept, forward, envelope([*early, *shifted(computed, waiting), *tape.points]), True
    )


def again_tape(
    first: ForwardTape, layer: LayerSpec, hidden: int, settings: OpSettings
) -> AgainTape:
    """Return the tape of a selectively checkpointed layer's second run, which stops early."""
    grads = not settings.accumulate
    trial = AgainTape(Policy(), keep_weight_grads=grads)
    x = trial.value(settings.stream(hidden), needs_grad=settings.input_grad)
    trial.left_by(first)
    run_layer(Program(trial, settings), x, layer, hidden)
    return AgainTape(Policy(), keep_weight_grads=grads, asks=trial.needed)


def _checkpointed(layer: LayerSpec, hidden: int, settings: OpSettings) -> CheckpointedCosts:
    early, again, rest, saved = _recompute(layer, hidden, settings, fetched=False)
    return CheckpointedCosts(layer, hidden, settings, (early, again, rest), saved)


def _recompute(
    layer: LayerSpec, hidden: int, settings: OpSettings, *, fetched: bool
) -> tuple[list[Point], list[Point], list[Point], bool]:
    """Run a checkpointed layer's backward: non-reentrant, stopping early, as torch does.

    Backward starts on nodes that saved nothing; the first that needs a saved tensor makes the
    forward run again up to the last tensor that anything saved. The stored input is left out;
    if it was `fetched` from the host it is counted, and freed when nothing saved it. Returns the
    points before, during and after the recompute, and whether something saved the input.
    """
    width = settings.stream(hidden)
    tape = layer_tape(settings.compiled, keep_weight_grads=not settings.accumulate, recomputed=True)
    x = tape.value(width)
    out = run_layer(Program(tape, settings), x, layer, hidden)
    tape.drop(out, x) if fetched else tape.drop(out)
    saved = x.storage.refs > (0 if fetched else 1)
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
    again = list(shifted(again, waiting - counted))
    tape.points.clear()
    tape.run()
    return early, again, list(shifted(tape.points, -counted)), saved
