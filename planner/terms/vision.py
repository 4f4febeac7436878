"""vision: pixels, the tower's activations, its features, and what a cross-attending text keeps of them."""

from dataclasses import replace
from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.mixers.registry import mixer_of
from planner.models.images import cut_image
from planner.models.spec import ModelSpec
from planner.models.vision_spec import VisionSpec
from planner.run.image_fields import DEFAULT_IMAGE, cuttings
from planner.run.recipe import Checkpointing, Method
from planner.run.resolve import Resolved
from planner.terms.activations import activations
from planner.terms.counts import lora_of
from planner.terms.term import Term
from planner.terms.tower import tower_activations
from planner.units import format_bytes

PIXEL_BYTES = 4
"""Processors hand over fp32; the Trainer moves them to the GPU as they are."""


class Vision(NamedTuple):
    """The term in the phases that have one."""

    no_grad: Term
    forward: Term
    loss: Term
    backward: Term


NONE = Vision(*(Term("vision", 0) for _ in range(4)))


def is_trained(model: ModelSpec, r: Resolved) -> bool:
    """Say whether the tower gets gradients: full training, or adapters inside it."""
    if r.method is Method.FULL:
        return True
    counts = lora_of(model, r)
    names = {module.name for module in model.towers}
    return any(adapted.name in names for adapted in counts.adapted)


def vision(model: ModelSpec, r: Resolved, text_forward: int) -> Vision:
    """Return the term by phase; `text_forward` is what the text's forward needs at its largest.

    The tower is done before the first text layer: frozen, only what it leaves counts beside the text.
    """
    tower = model.vision
    if tower is None or not (r.images or r.videos):
        return NONE
    fields = ("images", "image_size", "image_tokens", "videos", "video_frames")
    cuts = cuttings(model, {name: getattr(r, name) for name in fields})
    trained = is_trained(model, r)
    act = element_bytes(r.compute_dtype)
    pixels = PIXEL_BYTES * r.sequences * sum(one.pixels * count for one, count in cuts)
    patches = r.sequences * sum(one.patches * count for one, count in cuts)
    features = act * model.hidden * (patches // tower.merge**2 if not tower.tokens else 0)
    if tower.tokens:
        features = act * model.hidden * tower.tokens * r.sequences * sum(n for _, n in cuts)
    features *= tower.mergers
    cross = _cross(model, r, patches, act)
    runs = [
        tower_activations(tower, r, one.patches, r.sequences * count, trained=trained)
        for one, count in cuts
    ]
    passing = max(run.no_grad for run in runs)
    kept = _merger(tower, model, patches, act) + sum(run.kept for run in runs) if trained else 0
    working = max(run.forward for run in runs) if trained else passing
    low = max(moment.activations for run in runs for moment in run.backward) if trained else 0
    shown = (patches, pixels, features, kept)

    def term(size: int, what: str) -> Term:
        template = (
            "{0:,} patches: pixels {1:,} B, features {2:,} B, the tower keeps {3:,} B; " + what
        )
        return Term("vision", size, template, shown, tower.source)

    left = pixels + features + kept + cross
    return Vision(
        term(max(left - kept, pixels + passing - text_forward), "no gradient"),
        term(max(left, pixels + working - text_forward), "beside the text's forward"),
        term(left, "while the loss is made"),
        term(max(left, pixels + low - text_forward), "until the tower's own backward"),
    )


def _merger(tower: VisionSpec, model: ModelSpec, patches: int, act: int) -> int:
    """Return what the projector saves: its norm's input and output, two layers' inputs and the activation."""
    if tower.merge == 1:
        return patches * tower.hidden * act
    wide = tower.hidden * tower.merge**2
    rows = patches // tower.merge**2
    return tower.mergers * rows * wide * act * 4


def _cross(model: ModelSpec, r: Resolved, patches: int, act: int) -> int:
    """Return keys and values of cross-attending layers: all of them, or one under checkpointing."""
    layers = [layer for layer in model.layers if mixer_of(layer.mixer).reads_images]
    if not layers or model.vision is None or not model.vision.cross:
        return 0
    mixer = layers[0].mixer
    count = sum(layer.count for layer in layers) if r.checkpointing is Checkpointing.NONE else 1
    return count * 2 * patches * mixer.num_kv_heads * mixer.head_dim * act


def left_out(model: ModelSpec, r: Resolved) -> str:
    """Return what to say of a multimodal model's plan without images; "" where there is nothing."""
    if not model.multimodal or not r.trains or r.images or r.videos:
        return ""
    tower = model.vision
    if tower is None:
        return (
            f"images, video and audio: none are planned for {model.model_type}; its towers' weights are "
            "counted, their activations are not"
        )
    width, height = DEFAULT_IMAGE
    one = cut_image(tower, width, height)
    with_one = replace(r, images=1, image_size=DEFAULT_IMAGE)
    added = vision(model, with_one, activations(model, r, r.tokens).forward)
    most = max(term.bytes for term in (added.forward, added.loss, added.backward))
    return (
        f"images: none are given (--images, --image-size); one of {width} x {height} a sample is "
        f"{one.patches:,} patches, {one.tokens:,} of the context's tokens, and adds up to "
        f"{format_bytes(most)}"
    )
