"""The analytic plan against the trace of a step with an image, tower by tower, at real sizes.

The whole model runs, its text cut to two layers (four where one must attend to the image): tower, projector
and features are those of the checkpoint, and fake tensors cost no memory.
"""

from dataclasses import dataclass, replace
from typing import Any

from planner.families import model_spec_from_config
from planner.machines.machine import Machine
from planner.models.catalogue import load_catalogue
from planner.models.images import cut_image
from planner.models.spec import ModelSpec
from planner.models.tiles import fitted
from planner.models.vision_spec import Cut
from planner.plan import plan
from planner.run.recipe import (
    Attention,
    Checkpointing,
    LoraSection,
    Method,
    Optimizer,
    Recipe,
    Task,
)
from planner.units import GiB
from profiler.compare import Comparison, compare
from profiler.subjects.hf_images import HfImages, Pictures

TOLERANCE = 0.05
"""Of every phase's total."""
WIDTH, HEIGHT, LENGTH = 1024, 1024, 4096
TOWERS = (
    "qwen2.5-vl-3b",
    "qwen3-vl-4b",
    "gemma-3-4b",
    "llama-3.2-11b-vision",
    "llava-1.5-7b",
    "internvl3-8b",
    "ministral-3-3b",
)
RUNS: dict[str, tuple[Method, Checkpointing, str]] = {
    "full": (Method.FULL, Checkpointing.NONE, ""),
    "full, checkpoints": (Method.FULL, Checkpointing.FULL, ""),
    "LoRA on the text": (Method.LORA, Checkpointing.NONE, "v_proj"),
    "LoRA, checkpoints": (Method.LORA, Checkpointing.FULL, "all-linear"),
    "LoRA everywhere": (Method.LORA, Checkpointing.NONE, "all-linear"),
}
"""Method, checkpointing and targets; v_proj is in some towers too, which are then adapted."""


@dataclass(frozen=True, slots=True)
class ImageCase:
    """One tower and one way to train it."""

    model: str
    run: str


def short_config(name: str) -> dict[str, Any]:
    """Return a checkpoint's config with few text layers."""
    from profiler.subjects.build import shorten

    config: dict[str, Any] = load_catalogue()[name]["config"]
    if config["model_type"] != "mllama":
        return shorten(config, 2)
    short = shorten(config, 4)
    text = {**short["text_config"], "cross_attention_layers": [3]}
    return {**short, "text_config": text}


def pictures(model: ModelSpec, width: int, height: int) -> Pictures:
    """Return one image's inputs, as its processor shapes them."""
    vision = model.vision
    assert vision is not None
    one, side = cut_image(vision, width, height), vision.size
    pixels = (one.sequences, vision.channels, side, side)
    if vision.cut is Cut.NATIVE:
        unit = vision.patch * vision.merge
        high = round(height / unit) * vision.merge
        grid = [[1, high, one.patches // high]]
        return Pictures(
            floats={"pixel_values": (one.patches, one.pixels // one.patches)},
            grids={"image_grid_thw": grid},
            ints={"position_ids": (3, 1, LENGTH)},
        )
    if vision.cut is Cut.TILES:
        tiles = vision.tiles
        return Pictures(
            floats={"pixel_values": (1, 1, tiles, vision.channels, side, side)},
            ints={
                "aspect_ratio_ids": (1, 1),
                "aspect_ratio_mask": (1, 1, tiles),
                "cross_attention_mask": (1, LENGTH, 1, tiles),
            },
        )
    if vision.cut is Cut.EDGE:
        wide, high = fitted(vision, width, height)
        return Pictures(
            floats={"pixel_values": (1, vision.channels, high, wide)},
            grids={"image_sizes": [[high, wide]]},
        )
    masks = ("full_attention", "sliding_attention") if vision.masks_text else ()
    return Pictures(floats={"pixel_values": pixels}, masks=masks)


def run_image_case(case: ImageCase) -> Comparison:
    """Return plan and trace of one case, side by side."""
    from profiler.subjects.from_recipe import step_options
    from profiler.trace import trace

    config = short_config(case.model)
    model = model_spec_from_config(config, name=case.model, source="matrix")
    method, checkpointing, targets = RUNS[case.run]
    recipe = Recipe(
        task=Task.SFT,
        method=method,
        framework="hf-trainer",
        lora=LoraSection(targets=targets or "all-linear"),
        mixed_precision="bf16",
        checkpointing=checkpointing,
        attention=Attention.SDPA,
        optimizer=Optimizer.ADAMW,
        micro_batch_size=1,
        context=LENGTH,
        images=1,
        image_size=f"{WIDTH}x{HEIGHT}",
    )
    planned = plan(model, recipe, Machine(vram_bytes=1024 * GiB))
    options = step_options(planned.resolved, config, steps=1)
    subject = HfImages(
        replace(options, warm_optimizer=True, padded=False), pictures(model, WIDTH, HEIGHT)
    )
    return compare(planned, trace(subject))
