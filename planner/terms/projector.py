"""A projector on a tape: what takes a tower's features to the text's width."""

from typing import NamedTuple

from planner.families.blocks import linear
from planner.layer.channel import activation
from planner.layer.program import Program
from planner.layer.tape import Tape, Value, envelope, largest
from planner.models.spec import ModelSpec
from planner.models.vision_spec import Projector, TowerSpec
from planner.run.resolved import Resolved
from planner.terms.activations import op_settings
from planner.terms.tower import Graph, adapted_names, tower_model, tower_run


class Projected(NamedTuple):
    """Bytes on all rows; the features that leave are not among them once it is done."""

    kept: int
    forward: int
    backward: int


def projector_graph(model: ModelSpec, projector: Projector, r: Resolved, graph: Graph) -> Graph:
    """Return what autograd follows of the projector behind a tower with `graph`."""
    if graph is Graph.NONE and _adapted(model, projector, r):
        return Graph.ADAPTED
    return graph


def _adapted(model: ModelSpec, projector: Projector, r: Resolved) -> frozenset[str]:
    found = adapted_names(model, r)
    return frozenset(
        leaf for leaf in projector.leaves if leaf and f"{projector.root}.{leaf}" in found
    )


def projector_costs(
    projector: Projector,
    model: ModelSpec,
    tower: TowerSpec,
    r: Resolved,
    features: int,
    graph: Graph,
    *,
    fed: bool,
) -> Projected:
    """Return what the projector keeps and needs on `features` rows; `fed`: they need a gradient."""
    own = tower_run(r, graph, (), 1, features)
    names = frozenset(leaf.rsplit(".", 1)[-1] for leaf in _adapted(model, projector, r))
    settings = op_settings(tower_model(tower), own)._replace(norm=projector.norm, adapted=names)
    tape = Tape(grad_enabled=graph is not Graph.NONE, keep_weight_grads=r.grad_accum == 1)
    x = tape.value(projector.wide * settings.residual, needs_grad=fed)
    out = _forward(Program(tape, settings), x, projector)
    forward = largest(envelope(tape.points), features).at(features)
    tape.drop(x, out)
    kept = tape.now().at(features)
    tape.points.clear()
    backward = kept
    if graph is not Graph.NONE:
        tape.start_backward(out, projector.out * settings.act)
        tape.run()
        backward = largest(envelope(tape.points), features).at(features)
    more = (projector.count - 1) * kept
    return Projected(kept + more, forward + more, backward + more)


def _merged(p: Program, patches: Value, projector: Projector, width: int) -> Value:
    """Record Mistral3PatchMerger: a token's patches unfolded and joined into one row, each a copy."""
    tape, size = p.tape, projector.wide * width
    unfolded = tape.op((patches,), size, forward_scratch=size, scratch=size)
    joined = tape.join((unfolded,), size)
    merged = p.linear(joined, linear(projector.merger, projector.wide, projector.merged), width)
    tape.drop(patches, unfolded, joined)  # its variables live until it returns
    return merged


def _forward(p: Program, x: Value, projector: Projector) -> Value:
    """Record norm, linear, activation, linear: those that there are."""
    s, tape = p.s, p.tape
    x.storage.refs += 1
    value, width = x, s.residual
    if projector.norm:
        value = p.norm(x, width, projector.wide)
        tape.drop(x)
        if projector.norm == "layernorm" and s.autocast:
            width = 4
    wide = projector.wide
    if projector.merger:
        value, wide, width = _merged(p, value, projector, width), projector.merged, s.act
    first = linear(projector.leaves[0], wide, projector.inner or projector.out)
    out = p.linear(value, first, width)
    tape.drop(value)
    if not projector.inner:
        return out
    hidden = activation(p, out, projector.inner * s.act, projector.activation)
    out = p.linear(hidden, linear(projector.leaves[1], projector.inner, projector.out), s.act)
    tape.drop(hidden)
    return out
