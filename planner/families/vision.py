"""VisionSpec of the multimodal families that plan images; the others have none, and say so."""

from planner.families.fields import ConfigFields
from planner.families.towers import side
from planner.models.vision_spec import Cut, VisionSpec

QWEN_VIDEO_PIXELS = 768 * 28 * 28
"""models/qwen2_vl/video_processing_qwen2_vl.py: size's longest edge."""


def vision_spec(fields: ConfigFields) -> VisionSpec | None:
    """Return the tower's spec, None where images are not planned."""
    kind = fields.model_type
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        return _qwen2(fields.sub("vision_config", fields.sub_types["vision_config"]))
    if kind in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        return _qwen3(fields.sub("vision_config", fields.sub_types["vision_config"]))
    if kind == "gemma3":
        return _siglip(fields.sub("vision_config", fields.sub_types["vision_config"]), fields)
    if kind == "mllama":
        return _mllama(fields.sub("vision_config", fields.sub_types["vision_config"]))
    return None


def _qwen2(vision: ConfigFields) -> VisionSpec:
    new = vision.model_type == "qwen2_5_vl_vision"
    hidden = vision.integer("hidden_size" if new else "embed_dim")
    return VisionSpec(
        cut=Cut.NATIVE,
        hidden=hidden,
        heads=vision.integer("num_heads"),
        depth=vision.integer("depth"),
        intermediate=vision.integer("intermediate_size")
        if new
        else int(hidden * vision.number("mlp_ratio")),
        gated=new,
        norm="rmsnorm" if new else "layernorm",
        activation="silu" if new else "quick_gelu",
        fused_qkv=True,
        rope=True,
        patch=side(vision, "patch_size"),
        merge=vision.integer("spatial_merge_size"),
        frames=vision.integer("temporal_patch_size"),
        channels=vision.integer("in_channels"),
        min_pixels=56 * 56,
        max_pixels=12_845_056,
        video_max_pixels=QWEN_VIDEO_PIXELS,
        source="preprocessor_config.json of Qwen2-VL and Qwen2.5-VL: 3,136 to 12,845,056 pixels",
    )


def _qwen3(vision: ConfigFields) -> VisionSpec:
    deep = 0
    if "deepstack_visual_indexes" in vision.defaults:
        deep = len(vision.items("deepstack_visual_indexes") or [])
    return VisionSpec(
        cut=Cut.NATIVE,
        hidden=vision.integer("hidden_size"),
        heads=vision.integer("num_heads"),
        depth=vision.integer("depth"),
        intermediate=vision.integer("intermediate_size"),
        fused_qkv=True,
        rope=True,
        patch=side(vision, "patch_size"),
        merge=vision.integer("spatial_merge_size"),
        frames=vision.integer("temporal_patch_size"),
        channels=vision.integer("in_channels"),
        min_pixels=65_536,
        max_pixels=16_777_216,
        video_max_pixels=QWEN_VIDEO_PIXELS,
        mergers=1 + deep,
        source="preprocessor_config.json of Qwen3-VL: 65,536 to 16,777,216 pixels",
    )


def _siglip(vision: ConfigFields, outer: ConfigFields) -> VisionSpec:
    return VisionSpec(
        cut=Cut.FIXED,
        hidden=vision.integer("hidden_size"),
        heads=vision.integer("num_attention_heads"),
        depth=vision.integer("num_hidden_layers"),
        intermediate=vision.integer("intermediate_size"),
        patch=side(vision, "patch_size"),
        channels=vision.integer("num_channels"),
        size=side(vision, "image_size"),
        tokens=outer.integer("mm_tokens_per_image", 256),
        source="models/gemma3: one square size, pooled",
    )


def _mllama(vision: ConfigFields) -> VisionSpec:
    depth = vision.integer("num_hidden_layers") + vision.integer("num_global_layers")
    return VisionSpec(
        cut=Cut.TILES,
        hidden=vision.integer("hidden_size"),
        heads=vision.integer("attention_heads", 16),
        depth=depth,
        intermediate=vision.integer("intermediate_size"),
        activation="gelu",
        bias=False,
        patch=side(vision, "patch_size"),
        channels=vision.integer("num_channels"),
        size=side(vision, "image_size"),
        tiles=vision.integer("max_num_tiles"),
        cross=True,
        source="models/mllama: always max_num_tiles tiles",
    )
