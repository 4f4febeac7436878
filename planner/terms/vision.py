"""vision: pixels, the tower's activations, its features, and what a cross-attending text keeps of them."""

from typing import NamedTuple

from planner.dtypes import element_bytes
from planner.models.lora_targets import lora_counts
from planner.models.spec import MixerKind, ModelSpec
from planner.models.vision_spec import VisionSpec
from planner.run.recipe import Checkpointing, Method
from planner.run.resolve import Resolved
from planner.terms.term import Term
from planner.vision.images import Cutting, cut_image, cut_tokens, cut_video
from planner.vision.tower import tower_activations

PIXEL_BYTES = 4
"""Processors hand over fp32; the Trainer moves them to the GPU as they are."""
DEFAULT_IMAGE = (1024, 1024)
"""What a note about images left out counts."""


class Vision(NamedTuple):
    """The term in the phases that have one."""

    no_grad: Term
    forward: Term
    loss: Term
    backward: Term


NONE = Vision(*(Term("vision", 0) for _ in range(4)))


def cuttings(vision: VisionSpec, r: Resolved) -> tuple[tuple[Cutting, int], ...]:
    """Return what one sample holds: cuts, and how many there are of each."""
    found = []
    size = r.image_size or DEFAULT_IMAGE
    if r.images:
        one = cut_tokens(vision, r.image_tokens) if r.image_tokens else cut_image(vision, *size)
        found.append((one, r.images))
    if r.videos:
        found.append((cut_video(vision, *size, r.video_frames), r.videos))
    return tuple(found)


def vision_tokens(vision: VisionSpec, r: Resolved) -> int:
    """Return the positions that a sample's images take in the text."""
    return sum(one.tokens * count for one, count in cuttings(vision, r))


def is_trained(model: ModelSpec, r: Resolved) -> bool:
    """Say whether the tower gets gradients: full training, or adapters inside it."""
    if r.method is Method.FULL:
        return True
    counts = lora_counts(model, r.lora_targets, rank=r.lora_rank, modules_to_save=r.modules_to_save)
    names = {module.name for module in model.towers}
    return any(adapted.name in names for adapted in counts.adapted)


def vision(model: ModelSpec, r: Resolved, text_forward: int) -> Vision:
    """Return the term by phase; `text_forward` is what the text's forward needs at its largest.

    The tower is done before the first text layer: frozen, only what it leaves counts beside the text.
    """
    tower = model.vision
    if tower is None or not (r.images or r.videos):
        return NONE
    cuts = cuttings(tower, r)
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
    layers = [layer for layer in model.layers if layer.mixer.kind is MixerKind.CROSS]
    if not layers or model.vision is None or not model.vision.cross:
        return 0
    mixer = layers[0].mixer
    count = sum(layer.count for layer in layers) if r.checkpointing is Checkpointing.NONE else 1
    return count * 2 * patches * mixer.num_kv_heads * mixer.head_dim * act
