"""vision: pixels (or sound), the towers' activations, their features, and what a cross-attending text keeps."""

from dataclasses import replace
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.mixers.registry import mixer_of
from planner.models.images import Cutting, cut_image
from planner.models.sounds import cut_sound
from planner.models.spec import ModelSpec
from planner.models.vision_spec import AudioSpec, TowerSpec, VisionSpec
from planner.run.image_fields import DEFAULT_IMAGE, DEFAULT_SECONDS, cuttings, sounds
from planner.run.recipe import Attention, Checkpointing, Method
from planner.run.resolved import Resolved
from planner.terms.activations import Activations, activations
from planner.terms.gradients import gradient_width
from planner.terms.projector import projector_costs, projector_graph
from planner.terms.term import Term
from planner.terms.tower import Graph, adapted, graph_of, stream_width, tower_activations
from planner.units import format_bytes

PIXEL_BYTES = 4
"""Processors hand over fp32; the Trainer moves them to the GPU as they are."""


class TowerMoment(NamedTuple):
    """Bytes while a tower runs backward, after all of the text but its embedding has."""

    bytes: int
    grads: int
    """Of the towers' own weights, those that exist by then."""


class Vision(NamedTuple):
    """The term in the phases that have one."""

    no_grad: Term
    forward: Term
    loss: Term
    backward: Term
    """While the text runs backward."""
    own: tuple[TowerMoment, ...]
    """While the towers do."""
    after: Term
    """When they are done: their inputs, which live until the step is over."""


class _Seen(NamedTuple):
    """One tower on all of a micro-batch's images or sounds."""

    rows: int
    pixels: int
    copies: int
    """The inputs in the tower's dtype."""
    features: int
    held: int
    """What the model's forward holds of the tower's outputs until it returns."""
    kept: int
    """By the graph, while the text runs."""
    kept_late: int
    """The same once the model's forward has returned."""
    passing: int
    """Without a graph, or while its forward runs."""
    own: tuple[TowerMoment, ...]


def vision(model: ModelSpec, r: Resolved, text_forward: int) -> Vision:
    """Return the term by phase; `text_forward` is what the text's forward needs at its largest.

    The towers are done before the first text layer: frozen, only what they leave counts beside the text.
    """
    seen = []
    if model.vision is not None and (r.images or r.videos):
        seen.append(_seen(model, model.vision, cuttings(model, r), r))
    if model.audio is not None and r.audio:
        seen.append(_seen(model, model.audio, sounds(model, r), r))
    if not seen:
        return NONE
    # Trainer.get_batch_samples takes the batches of a whole step, which accelerate's loader has put on the GPU
    pixels = sum(one.pixels for one in seen) * r.grad_accum
    kept, late = sum(one.kept for one in seen), sum(one.kept_late for one in seen)
    held, features = sum(one.held for one in seen), sum(one.features for one in seen)
    passing = max(one.passing for one in seen)
    cross = _cross(model, r, seen[0].features)
    rows = sum(one.rows for one in seen)
    leaf = _text_leaf(model, r)
    kept, late = kept + leaf, late + leaf
    source = " and ".join(t.source for t in (model.vision, model.audio) if t is not None)

    def term(size: int, what: str) -> Term:
        template = "{0:,} rows: inputs {1:,} B, features {2:,} B, the towers keep {3:,} B; " + what
        return Term("vision", size, template, (rows, pixels, features, late), source)

    nothing = r.checkpointing is not Checkpointing.NONE
    return Vision(
        no_grad=term(max(pixels + held, pixels + passing - text_forward), "without a gradient"),
        forward=term(
            max(pixels + held + kept + (0 if nothing else cross), pixels + passing - text_forward),
            "beside the text's forward",
        ),
        loss=term(pixels + late + cross, "while the loss is made"),
        backward=term(pixels + late + cross, "while the text runs backward"),
        own=tuple(m._replace(bytes=m.bytes + pixels) for one in seen for m in one.own),
        after=term(pixels, "the batch itself"),
    )


NOTHING = Term("vision", 0)
NONE = Vision(NOTHING, NOTHING, NOTHING, NOTHING, (), NOTHING)


def _seen(
    model: ModelSpec, tower: TowerSpec, cuts: tuple[tuple[Cutting, int], ...], r: Resolved
) -> _Seen:
    act, graph = element_bytes(r.compute_dtype), graph_of(model, tower, r)
    names = adapted(model, tower, r)
    number = r.sequences
    rows = number * sum(one.patches * count for one, count in cuts)
    values = number * sum(one.pixels * count for one, count in cuts)
    made = number * sum(one.features * count for one, count in cuts)
    used = replace(tower, depth=tower.depth - tower.unused)
    runs = [_run(tower, one, count * number, r, graph, names) for one, count in cuts]
    late = runs
    if tower.unused:
        late = [_run(used, one, count * number, r, graph, names) for one, count in cuts]
    projector = tower.projector
    assert projector is not None
    bridged = projector_graph(model, projector, r, graph)
    bridge = projector_costs(projector, model, tower, r, made, bridged, fed=graph is not Graph.NONE)
    features = act * projector.out * made
    mask = _masks(tower, cuts, r, act)
    copies = act * values
    output = stream_width(tower, r, graph) * tower.hidden * rows
    saved = copies if graph is Graph.TRAINED else _leaf(tower, r, graph, rows)
    if graph is Graph.NONE:
        kept = kept_late = bridge.kept
        passing = max(run.no_grad for run in runs) + mask + (tower.states or 0) * output
        own: tuple[TowerMoment, ...] = ()
        if bridged is not Graph.NONE:
            own = (TowerMoment(bridge.backward, 0),)
    else:
        kept = sum(run.kept for run in runs) + bridge.kept + saved + mask
        kept_late = sum(run.kept for run in late) + bridge.kept + saved + mask
        passing = max(run.forward for run in runs) + saved + mask
        own = _moments(model, r, late, bridge.backward, saved + mask, used.depth)
    # a layer norm's graph holds the stream between blocks anyway, a checkpoint too; an RMS norm's does not
    holds = tower.norm == "layernorm" or r.checkpointing is not Checkpointing.NONE
    states = output * (1 if holds and graph is not Graph.NONE else max(1, tower.states))
    held = max(states, output) + features * (1 + projector.count)
    return _Seen(
        rows=rows,
        pixels=PIXEL_BYTES * values,
        copies=copies,
        features=features,
        held=held,
        kept=kept,
        kept_late=kept_late,
        passing=max(passing + copies, bridge.forward + output),
        own=own,
    )


def _text_leaf(model: ModelSpec, r: Resolved) -> int:
    """Return the text's embeddings under checkpoints and adapters: a hook made them a leaf, and what goes
    into the first layer is a copy with the features in it (masked_scatter)."""
    hooked = r.switches.frozen_embedding_leaf and r.method is not Method.FULL
    merged = any(
        t is not None and not getattr(t, "cross", False) for t in (model.vision, model.audio)
    )
    if not hooked or not merged or r.checkpointing in (Checkpointing.NONE, Checkpointing.OFFLOAD):
        return 0
    return r.tokens * model.hidden * element_bytes(r.compute_dtype)


def _leaf(tower: TowerSpec, r: Resolved, graph: Graph, rows: int) -> int:
    """Return the patch embedding's output, which a hook made a leaf: its gradient's node holds it."""
    hooked = r.switches.hooks_towers and tower.hooked and r.checkpointing is not Checkpointing.NONE
    if graph is Graph.NONE or not hooked:
        return 0
    return rows * tower.hidden * element_bytes(r.compute_dtype)


def _run(
    tower: TowerSpec, one: Cutting, count: int, r: Resolved, graph: Graph, names: tuple[str, ...]
) -> Activations:
    each, sequences = one.patches // one.sequences, count * one.sequences
    if tower.one_sequence:
        each, sequences = each * sequences, 1
    return tower_activations(tower, r, each, sequences, graph=graph, names=names)


def _moments(
    model: ModelSpec, r: Resolved, runs: list[Activations], bridge: int, saved: int, depth: int
) -> tuple[TowerMoment, ...]:
    """Return the projector's backward and the first and last blocks', with the gradients they left."""
    kept = sum(run.kept for run in runs)
    moments = [TowerMoment(kept + bridge + saved, 0)]
    width = gradient_width(r) if r.method is Method.FULL else 0
    own = sum(module.parameters for module in model.towers) * width
    for run in runs:
        for moment in run.backward:
            done = own * (depth - moment.layers_left) // depth
            moments.append(TowerMoment(moment.activations + saved, done + moment.layer_grads))
    return tuple(moments)


def _masks(tower: TowerSpec, cuts: tuple[tuple[Cutting, int], ...], r: Resolved, act: int) -> int:
    """Return the additive masks of attention, one of [1, T, T] an image or for all of them."""
    if not tower.masked or r.attention is Attention.FLASH:
        return 0
    if tower.one_sequence:
        return act * (r.sequences * sum(count * one.patches for one, count in cuts)) ** 2
    return r.sequences * act * sum(count * one.patches**2 for one, count in cuts)


def _cross(model: ModelSpec, r: Resolved, features: int) -> int:
    """Return keys and values of cross-attending layers: all of them, or one under checkpointing."""
    layers = [layer for layer in model.layers if mixer_of(layer.mixer).reads_images]
    if not layers or model.vision is None or not model.vision.cross:
        return 0
    mixer = layers[0].mixer
    count = sum(layer.count for layer in layers) if r.checkpointing is Checkpointing.NONE else 1
    return count * 2 * features // model.hidden * mixer.num_kv_heads * mixer.head_dim


def left_out(model: ModelSpec, r: Resolved) -> str:
    """Return what to say of a multimodal model's plan without images or sounds; "" where there is nothing."""
    if not model.multimodal or not r.trains or r.images or r.videos or r.audio:
        return ""
    parts = [part for part in (_left_images(model, r), _left_sounds(model, r)) if part]
    if parts:
        return "; ".join(parts)
    return (
        f"images, video and audio: none are planned for {model.model_type}; its towers' weights are "
        "counted, their activations are not"
    )


def _left_images(model: ModelSpec, r: Resolved) -> str:
    tower: VisionSpec | None = model.vision
    if tower is None:
        return ""
    width, height = DEFAULT_IMAGE
    one = cut_image(tower, width, height)
    added = _most(model, replace(r, images=1, image_size=DEFAULT_IMAGE))
    return (
        f"images: none are given (--images, --image-size); one of {width} x {height} a sample is "
        f"{one.patches:,} patches, {one.tokens:,} of the context's tokens, and adds up to {added}"
    )


def _left_sounds(model: ModelSpec, r: Resolved) -> str:
    tower: AudioSpec | None = model.audio
    if tower is None:
        return ""
    one = cut_sound(tower, DEFAULT_SECONDS)
    added = _most(model, replace(r, audio=1, audio_seconds=DEFAULT_SECONDS))
    return (
        f"audio: none is given (--audio, --audio-seconds); one of {DEFAULT_SECONDS:g} s a sample is "
        f"{one.patches:,} rows, {one.tokens:,} of the context's tokens, and adds up to {added}"
    )


def _most(model: ModelSpec, r: Resolved) -> str:
    """Return the term at its largest, as printed."""
    added = vision(model, r, activations(model, r, r.tokens).forward)
    terms = (added.forward, added.loss, added.backward)
    return format_bytes(max(*(t.bytes for t in terms), *(m.bytes for m in added.own)))
