"""VisionSpec of the multimodal families that plan images; the others have none, and say so."""

from planner.families.fields import ConfigFields
from planner.families.llava import feature_layers, llava_vision, shuffle
from planner.families.towers import pixtral_vision, side
from planner.models.vision_spec import Cut, Projector, VisionSpec

QWEN_VIDEO_PIXELS = 768 * 28 * 28
"""models/qwen2_vl/video_processing_qwen2_vl.py: size's longest edge."""
NEXT_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""configuration_llava_next.py; (height, width)."""
ONEVISION_PINPOINTS = tuple(
    (384 * high, 384 * wide) for high in range(1, 7) for wide in range(1, 7)
)
"""configuration_llava_onevision.py."""
INTERNVL_TILES = 12
"""models/got_ocr2/image_processing_got_ocr2.py: max_patches."""
PROJECTOR = "multi_modal_projector"

Names = tuple[tuple[str, str], ...]


def _names(attention: str, out: str, mlp: tuple[str, ...]) -> Names:
    """Return the linears of a block with separate projections."""
    known = ("gate", "up", "down") if len(mlp) == 3 else ("up", "down")
    return (
        *((f"self_attn.{n}_proj", f"{attention}.{n}_proj") for n in "qkv"),
        ("self_attn.o_proj", f"{attention}.{out}"),
        *((f"mlp.{n}_proj", own) for n, own in zip(known, mlp, strict=True)),
    )


def vision_spec(fields: ConfigFields, text_hidden: int) -> VisionSpec | None:
    """Return the tower's spec, None where images are not planned."""
    kind = fields.model_type
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        return _qwen2(fields.sub("vision_config", fields.sub_types["vision_config"]), text_hidden)
    if kind in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        return _qwen3(fields.sub("vision_config", fields.sub_types["vision_config"]))
    if kind == "gemma3":
        vision = fields.sub("vision_config", fields.sub_types["vision_config"])
        return _siglip(vision, fields, text_hidden)
    if kind == "mllama":
        return _mllama(fields.sub("vision_config", fields.sub_types["vision_config"]), text_hidden)
    if kind in ("llava", "llava_next", "llava_onevision"):
        return _llava(fields, text_hidden)
    if kind == "internvl":
        return _internvl(fields, text_hidden)
    if kind in ("idefics3", "smolvlm"):
        return _idefics3(fields, text_hidden)
    if kind == "mistral3":
        return _pixtral(fields, text_hidden)
    return None


def _qwen2(vision: ConfigFields, text_hidden: int) -> VisionSpec:
    new = vision.model_type == "qwen2_5_vl_vision"
    hidden = vision.integer("hidden_size" if new else "embed_dim")
    merge = vision.integer("spatial_merge_size")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if new else ("mlp.fc1", "mlp.fc2")
    norm = "rmsnorm" if new else "layernorm"
    return VisionSpec(
        cut=Cut.NATIVE,
        hidden=hidden,
        heads=vision.integer("num_heads"),
        depth=vision.integer("depth"),
        intermediate=vision.integer("intermediate_size")
        if new
        else int(hidden * vision.number("mlp_ratio")),
        gated=new,
        norm=norm,
        activation="silu" if new else "quick_gelu",
        fused_qkv=True,
        joined=True,
        rope=True,
        root="visual.blocks.*",
        names=_fused(mlp),
        patch=side(vision, "patch_size"),
        merge=merge,
        frames=vision.integer("temporal_patch_size"),
        channels=vision.integer("in_channels"),
        min_pixels=56 * 56,
        max_pixels=12_845_056,
        video_max_pixels=QWEN_VIDEO_PIXELS,
        projector=Projector(
            root="visual.merger",
            norm=norm,
            wide=hidden * merge**2,
            inner=hidden * merge**2,
            out=text_hidden,
            leaves=("mlp.0", "mlp.2"),
        ),
        source="preprocessor_config.json of Qwen2-VL and Qwen2.5-VL: 3,136 to 12,845,056 pixels",
    )


def _fused(mlp: tuple[str, ...]) -> Names:
    known = ("gate", "up", "down") if len(mlp) == 3 else ("up", "down")
    return (
        ("self_attn.qkv_proj", "attn.qkv"),
        ("self_attn.o_proj", "attn.proj"),
        *((f"mlp.{n}_proj", own) for n, own in zip(known, mlp, strict=True)),
    )


def _qwen3(vision: ConfigFields) -> VisionSpec:
    deep = 0
    if "deepstack_visual_indexes" in vision.defaults:
        deep = len(vision.items("deepstack_visual_indexes") or [])
    merge, hidden = vision.integer("spatial_merge_size"), vision.integer("hidden_size")
    return VisionSpec(
        cut=Cut.NATIVE,
        hidden=hidden,
        heads=vision.integer("num_heads"),
        depth=vision.integer("depth"),
        intermediate=vision.integer("intermediate_size"),
        fused_qkv=True,
        joined=True,
        rope=True,
        root="visual.blocks.*",
        names=_fused(("mlp.linear_fc1", "mlp.linear_fc2")),
        patch=side(vision, "patch_size"),
        merge=merge,
        frames=vision.integer("temporal_patch_size"),
        channels=vision.integer("in_channels"),
        min_pixels=65_536,
        max_pixels=16_777_216,
        video_max_pixels=QWEN_VIDEO_PIXELS,
        hooked=False,
        projector=Projector(
            root="visual.merger",
            norm="layernorm",
            wide=hidden * merge**2,
            inner=hidden * merge**2,
            out=vision.integer("out_hidden_size"),
            leaves=("linear_fc1", "linear_fc2"),
            count=1 + deep,
        ),
        source="preprocessor_config.json of Qwen3-VL: 65,536 to 16,777,216 pixels",
    )


def _siglip(vision: ConfigFields, outer: ConfigFields, text_hidden: int) -> VisionSpec:
    hidden = vision.integer("hidden_size")
    return VisionSpec(
        cut=Cut.FIXED,
        hidden=hidden,
        heads=vision.integer("num_attention_heads"),
        depth=vision.integer("num_hidden_layers"),
        intermediate=vision.integer("intermediate_size"),
        activation=vision.text("hidden_act"),
        root="vision_tower.encoder.layers.*",
        names=_names("self_attn", "out_proj", ("mlp.fc1", "mlp.fc2")),
        patch=side(vision, "patch_size"),
        channels=vision.integer("num_channels"),
        size=side(vision, "image_size"),
        tokens=outer.integer("mm_tokens_per_image", 256),
        masks_text=True,
        projector=Projector(
            root=PROJECTOR, norm="rmsnorm", wide=hidden, out=text_hidden, leaves=("",)
        ),
        source="models/gemma3: one square size, pooled",
    )


def _mllama(vision: ConfigFields, text_hidden: int) -> VisionSpec:
    layers, hidden = vision.integer("num_hidden_layers"), vision.integer("hidden_size")
    return VisionSpec(
        cut=Cut.TILES,
        hidden=hidden,
        heads=vision.integer("attention_heads", 16),
        depth=layers + vision.integer("num_global_layers"),
        intermediate=vision.integer("intermediate_size"),
        activation=vision.text("hidden_act", "gelu"),
        bias=False,
        masked=True,
        checkpoints=False,
        norm_first=True,
        root="vision_model.transformer.layers.*",
        names=_names("self_attn", "o_proj", ("mlp.fc1", "mlp.fc2")),
        patch=side(vision, "patch_size"),
        channels=vision.integer("num_channels"),
        size=side(vision, "image_size"),
        class_token=1,
        tiles=vision.integer("max_num_tiles"),
        cross=True,
        projector=Projector(
            root=PROJECTOR, wide=vision.integer("vision_output_dim"), out=text_hidden, leaves=("",)
        ),
        source="models/mllama: always max_num_tiles tiles",
    )


def _llava(fields: ConfigFields, text_hidden: int) -> VisionSpec:
    vision, layers = llava_vision(fields), feature_layers(fields)
    hidden, depth = vision.integer("hidden_size"), vision.integer("num_hidden_layers")
    size, patch = side(vision, "image_size"), side(vision, "patch_size")
    used = max(index if index >= 0 else depth + 1 + index for index in layers)
    if not 0 < used <= depth:
        raise fields.error("vision_feature_layer", layers, f"hidden states of {depth} blocks")
    clip = vision.model_type == "clip_vision_model"
    onevision = fields.model_type == "llava_onevision"
    patches = (size // patch) ** 2
    kept = patches + (clip and fields.text("vision_feature_select_strategy") == "full")
    video = (-(-(size // patch) // 2)) ** 2  # pooled two by two, rounded up
    return VisionSpec(
        cut=Cut.FIXED if fields.model_type == "llava" else Cut.ANYRES,
        hidden=hidden,
        heads=vision.integer("num_attention_heads"),
        depth=depth,
        intermediate=vision.integer("intermediate_size"),
        activation=vision.text("hidden_act"),
        norm_first=clip,
        unused=depth - used,
        states=depth + 1,
        root="vision_tower.encoder.layers.*",
        names=_names("self_attn", "out_proj", ("mlp.fc1", "mlp.fc2")),
        patch=patch,
        channels=vision.integer("num_channels"),
        size=size,
        class_token=int(clip),
        tokens=kept,
        tiles=_most_tiles(fields) if onevision else 0,
        pinpoints=() if fields.model_type == "llava" else _pinpoints(fields, size),
        video_tokens=video if onevision else 0,
        projector=Projector(
            root=PROJECTOR, wide=hidden * len(layers), inner=text_hidden, out=text_hidden
        ),
        source=f"models/{fields.model_type}: tiles of {size} x {size}, {kept} tokens each",
    )


def _pinpoints(fields: ConfigFields, size: int) -> tuple[tuple[int, int], ...]:
    given = fields.items("image_grid_pinpoints", None)
    if given is None:
        return NEXT_PINPOINTS if fields.model_type == "llava_next" else ONEVISION_PINPOINTS
    found = []
    for pair in given:
        if not isinstance(pair, list) or len(pair) != 2:
            raise fields.error("image_grid_pinpoints", pair, "pairs of height and width")
        high, wide = (fields.whole("image_grid_pinpoints", edge) for edge in pair)
        if high % size or wide % size or high * wide > 400 * size**2:
            raise fields.error("image_grid_pinpoints", pair, f"multiples of image_size {size}")
        found.append((high, wide))
    if not found:
        raise fields.error("image_grid_pinpoints", given, "at least one resolution")
    return tuple(found)


def _most_tiles(fields: ConfigFields) -> int:
    text = fields.text("vision_aspect_ratio")
    number = text.removeprefix("anyres_max_")
    if not number.isdigit() or not 0 < int(number) < 1000:
        raise fields.error("vision_aspect_ratio", text, "anyres_max_ and a number of tiles")
    return int(number)


def _internvl(fields: ConfigFields, text_hidden: int) -> VisionSpec:
    vision = fields.sub("vision_config", "internvl_vision")
    hidden, merge = vision.integer("hidden_size"), shuffle(fields)
    size, patch = side(vision, "image_size"), side(vision, "patch_size")
    tokens = (size // patch // merge) ** 2
    return VisionSpec(
        cut=Cut.CROPS,
        hidden=hidden,
        heads=vision.integer("num_attention_heads"),
        depth=vision.integer("num_hidden_layers"),
        intermediate=vision.integer("intermediate_size"),
        norm="layernorm" if vision.text("norm_type") == "layer_norm" else "rmsnorm",
        activation=vision.text("hidden_act"),
        scaled=True,
        root="vision_tower.encoder.layer.*",
        names=_names("attention", "projection_layer", ("mlp.fc1", "mlp.fc2")),
        patch=patch,
        merge=merge,
        channels=vision.integer("num_channels"),
        size=size,
        class_token=1,
        tokens=tokens,
        tiles=INTERNVL_TILES,
        # each frame is one tile between two tokens
        video_tokens=tokens + 2,
        projector=Projector(
            root=PROJECTOR,
            norm="layernorm",
            wide=hidden * merge**2,
            inner=text_hidden,
            out=text_hidden,
        ),
        source=f"models/got_ocr2, models/internvl: up to {INTERNVL_TILES} tiles of {size} x {size} and a thumbnail",
    )


def _pixtral(fields: ConfigFields, text_hidden: int) -> VisionSpec:
    vision, merge = pixtral_vision(fields), fields.integer("spatial_merge_size")
    hidden, size = vision.integer("hidden_size"), side(vision, "image_size")
    depth = vision.integer("num_hidden_layers")
    return VisionSpec(
        cut=Cut.EDGE,
        hidden=hidden,
        heads=vision.integer("num_attention_heads"),
        depth=depth,
        intermediate=vision.integer("intermediate_size"),
        gated=True,
        norm="rmsnorm",
        activation=vision.text("hidden_act"),
        bias=False,
        mlp_bias=False,
        rope=True,
        masked=True,
        one_sequence=True,
        states=depth + 1,
        root="vision_tower.transformer.layers.*",
        names=(
            *((f"self_attn.{n}_proj", f"attention.{n}_proj") for n in "qkvo"),
            *((f"mlp.{n}_proj", f"feed_forward.{n}_proj") for n in ("gate", "up", "down")),
        ),
        patch=side(vision, "patch_size"),
        merge=merge,
        channels=vision.integer("num_channels"),
        edge=size,
        projector=Projector(
            root=PROJECTOR,
            norm="rmsnorm",
            wide=hidden * merge**2,
            merger="patch_merger.merging_layer",
            merged=hidden,
            inner=text_hidden,
            out=text_hidden,
            activation=fields.text("projector_hidden_act"),
        ),
        source=f"models/pixtral, models/mistral3: a longest edge of {size}",
    )


def _idefics3(fields: ConfigFields, text_hidden: int) -> VisionSpec:
    vision = fields.sub("vision_config", fields.sub_types["vision_config"])
    hidden, merge = vision.integer("hidden_size"), fields.integer("scale_factor", 2)
    size, patch = side(vision, "image_size"), side(vision, "patch_size")
    return VisionSpec(
        cut=Cut.SPLIT,
        hidden=hidden,
        heads=vision.integer("num_attention_heads"),
        depth=vision.integer("num_hidden_layers"),
        intermediate=vision.integer("intermediate_size"),
        activation=vision.text("hidden_act"),
        root="vision_model.encoder.layers.*",
        names=_names("self_attn", "out_proj", ("mlp.fc1", "mlp.fc2")),
        patch=patch,
        merge=merge,
        channels=vision.integer("num_channels"),
        size=size,
        tokens=(size // patch) ** 2 // merge**2,
        edge=4 * size,
        projector=Projector(
            root="connector.modality_projection",
            wide=hidden * merge**2,
            out=text_hidden,
            leaves=("proj",),
        ),
        source="preprocessor_config.json of Idefics3 and SmolVLM: a longest edge of four tiles",
    )
