"""Towers of LLaVA (1.5, NeXT, OneVision), InternVL, Idefics3 and SmolVLM, and their projectors."""

from planner.families.blocks import conv, embedding, linear, norm, parameter
from planner.families.fields import ConfigFields
from planner.families.towers import (
    Modules,
    pooling_head,
    repeated,
    separate_attention,
    side,
    two_layer,
)

LLAVA_VISION = {
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
"""What LlavaConfig and LlavaNextConfig build without a vision_config."""
ONEVISION_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "vision_use_head": False,
}
"""What LlavaOnevisionConfig builds without one."""


def llava_vision(fields: ConfigFields) -> ConfigFields:
    """Return the fields of a LLaVA's tower: CLIP's or SigLIP's."""
    onevision = fields.model_type == "llava_onevision"
    usual = "siglip_vision_model" if onevision else "clip_vision_model"
    if fields.config.get("vision_config") is None:
        return ConfigFields(ONEVISION_VISION if onevision else LLAVA_VISION, usual)
    vision = fields.sub("vision_config")
    kind = vision.text("model_type", usual)
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise vision.error("model_type", kind, "clip_vision_model or siglip_vision_model")
    return ConfigFields(vision.config, kind, path=vision.path)


def feature_layers(fields: ConfigFields) -> list[int]:
    """Return the hidden states that LLaVA's projector reads, side by side."""
    value = fields.raw("vision_feature_layer")
    chosen = value if isinstance(value, list) else [value]
    if not chosen or not all(type(index) is int and abs(index) < 1000 for index in chosen):
        raise fields.error("vision_feature_layer", value, "a whole number, or a list of them")
    return chosen


def llava(fields: ConfigFields, text_hidden: int) -> Modules:
    """Return CLIP or SigLIP, the projector and, from NeXT on, the vector at a row's end."""
    vision = llava_vision(fields)
    wide = vision.integer("hidden_size") * len(feature_layers(fields))
    bias = fields.flag("multimodal_projector_bias")
    root = "multi_modal_projector"
    newline = () if fields.model_type == "llava" else (parameter("model", (text_hidden,)),)
    return (
        *newline,
        *_contrastive(vision),
        linear(f"{root}.linear_1", wide, text_hidden, bias=bias),
        linear(f"{root}.linear_2", text_hidden, text_hidden, bias=bias),
    )


def _contrastive(vision: ConfigFields) -> Modules:
    """Return CLIP's vision model or SigLIP's, whose class token and first norm it has not."""
    hidden, patch = vision.integer("hidden_size"), side(vision, "patch_size")
    patches = (side(vision, "image_size") // patch) ** 2
    kernel = (hidden, vision.integer("num_channels"), patch, patch)
    root = "vision_tower"
    block = (
        norm("layer_norm1", hidden, bias=True),
        norm("layer_norm2", hidden, bias=True),
        *separate_attention(hidden, hidden, bias=True, out="out_proj"),
        *two_layer(hidden, vision.integer("intermediate_size")),
    )
    blocks = (
        *repeated(f"{root}.encoder.layers.*", vision.integer("num_hidden_layers"), block),
        norm(f"{root}.post_layernorm", hidden, bias=True),
    )
    if vision.model_type == "clip_vision_model":
        return (
            parameter(f"{root}.embeddings", (hidden,)),
            conv(f"{root}.embeddings.patch_embedding", kernel),
            embedding(f"{root}.embeddings.position_embedding", patches + 1, hidden),
            norm(f"{root}.pre_layrnorm", hidden, bias=True),
            *blocks,
        )
    return (
        conv(f"{root}.embeddings.patch_embedding", kernel, (hidden,)),
        embedding(f"{root}.embeddings.position_embedding", patches, hidden),
        *blocks,
        *(pooling_head(vision, hidden) if vision.flag("vision_use_head", True) else ()),
    )


def internvl(fields: ConfigFields, text_hidden: int) -> Modules:
    """Return InternViT, whose residual branches are scaled, and its projector."""
    vision = fields.sub("vision_config", "internvl_vision")
    hidden, patch = vision.integer("hidden_size"), side(vision, "patch_size")
    patches = (side(vision, "image_size") // patch) ** 2
    kernel = (hidden, vision.integer("num_channels"), patch, patch)
    plain = vision.text("norm_type") == "layer_norm"
    bias = vision.flag("attention_bias")
    query_norms = vision.flag("use_qk_norm")
    block = (
        parameter("", (hidden,), (hidden,)),
        *(linear(f"attention.{name}_proj", hidden, hidden, bias=bias) for name in ("q", "k", "v")),
        linear("attention.projection_layer", hidden, hidden, bias=True),
        *(norm(f"attention.{name}_norm", hidden) for name in ("q", "k") if query_norms),
        *two_layer(hidden, vision.integer("intermediate_size")),
        norm("layernorm_before", hidden, bias=plain),
        norm("layernorm_after", hidden, bias=plain),
    )
    tokens = [(1, 1, hidden)] * (1 + vision.flag("use_mask_token", False))
    if vision.flag("use_absolute_position_embeddings"):
        tokens.append((1, patches + 1, hidden))
    wide = hidden * shuffle(fields) ** 2
    root, projector = "vision_tower", "multi_modal_projector"
    after = (
        () if vision.flag("use_mean_pooling") else (norm(f"{root}.layernorm", hidden, bias=True),)
    )
    return (
        parameter(f"{root}.embeddings", *tokens),
        conv(f"{root}.embeddings.patch_embeddings.projection", kernel, (hidden,)),
        *repeated(f"{root}.encoder.layer.*", vision.integer("num_hidden_layers"), block),
        *after,
        norm(f"{projector}.layer_norm", wide, bias=True),
        linear(f"{projector}.linear_1", wide, text_hidden, bias=True),
        linear(f"{projector}.linear_2", text_hidden, text_hidden, bias=True),
    )


def shuffle(fields: ConfigFields) -> int:
    """Return how many patches of a side InternVL's pixel shuffle joins."""
    ratio = fields.number("downsample_ratio")
    if not 0 < ratio <= 1 or int(1 / ratio) * ratio != 1:
        raise fields.error("downsample_ratio", ratio, "one over a whole number")
    return int(1 / ratio)


def idefics3(fields: ConfigFields, text_hidden: int) -> Modules:
    """Return the tower of Idefics3 and SmolVLM and the one linear after its pixel shuffle."""
    vision = fields.sub("vision_config", fields.sub_types["vision_config"])
    hidden, patch = vision.integer("hidden_size"), side(vision, "patch_size")
    positions = (side(vision, "image_size") // patch) ** 2
    kernel = (hidden, vision.integer("num_channels"), patch, patch)
    block = (
        norm("layer_norm1", hidden, bias=True),
        norm("layer_norm2", hidden, bias=True),
        *separate_attention(hidden, hidden, bias=True, out="out_proj"),
        *two_layer(hidden, vision.integer("intermediate_size")),
    )
    root = "vision_model"
    wide = hidden * fields.integer("scale_factor", 2) ** 2
    return (
        conv(f"{root}.embeddings.patch_embedding", kernel, (hidden,)),
        embedding(f"{root}.embeddings.position_embedding", positions, hidden),
        *repeated(f"{root}.encoder.layers.*", vision.integer("num_hidden_layers"), block),
        norm(f"{root}.post_layernorm", hidden, bias=True),
        linear("connector.modality_projection.proj", wide, text_hidden),
    )
