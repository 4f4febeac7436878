"""Vision and audio towers and projectors of the multimodal models, as flat module lists."""

from collections.abc import Callable

from planner.families.blocks import conv, embedding, gated_mlp, linear, norm, parameter
from planner.families.fields import ConfigFields
from planner.models.spec import ModuleSpec

Modules = tuple[ModuleSpec, ...]


def repeated(prefix: str, count: int, modules: Modules) -> Modules:
    """Return `modules` under `prefix`, each `count` times."""
    return tuple(
        ModuleSpec(
            name=f"{prefix}.{module.name}" if module.name else prefix,
            kind=module.kind,
            shapes=module.shapes,
            count=module.count * count,
        )
        for module in modules
    )


def side(fields: ConfigFields, field: str) -> int:
    """Return one side of a square size that configs write as 14 or [14, 14]."""
    value = fields.raw(field)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return fields.whole(field, value)


def _fused_attention(hidden: int) -> Modules:
    return (
        linear("attn.qkv", hidden, 3 * hidden, bias=True),
        linear("attn.proj", hidden, hidden, bias=True),
    )


def separate_attention(
    hidden: int, inner: int, *, bias: bool, out: str, prefix: str = "self_attn"
) -> Modules:
    """Return four projections of their own."""
    return (
        *(linear(f"{prefix}.{name}_proj", hidden, inner, bias=bias) for name in ("q", "k", "v")),
        linear(f"{prefix}.{out}", inner, hidden, bias=bias),
    )


def two_layer(hidden: int, width: int, names: tuple[str, str] = ("mlp.fc1", "mlp.fc2")) -> Modules:
    """Return a plain MLP's two linears."""
    return (
        linear(names[0], hidden, width, bias=True),
        linear(names[1], width, hidden, bias=True),
    )


def _merger(prefix: str, wide: int, out: int, norm_width: int) -> Modules:
    return (
        norm(f"{prefix}.norm", norm_width, bias=True),
        linear(f"{prefix}.linear_fc1", wide, wide, bias=True),
        linear(f"{prefix}.linear_fc2", wide, out, bias=True),
    )


def qwen2_vl(vision: ConfigFields, text_hidden: int) -> Modules:
    """Return the tower of Qwen2-VL and Qwen2.5-VL."""
    depth, patch = vision.integer("depth"), side(vision, "patch_size")
    is_new = vision.model_type == "qwen2_5_vl_vision"
    hidden = vision.integer("hidden_size" if is_new else "embed_dim")
    channels = vision.integer("in_channels")
    if is_new:
        block: Modules = (
            norm("norm1", hidden),
            norm("norm2", hidden),
            *_fused_attention(hidden),
            *gated_mlp(hidden, vision.integer("intermediate_size"), bias=True),
        )
        out = vision.integer("out_hidden_size")
    else:
        width = int(hidden * vision.number("mlp_ratio"))
        block = (
            norm("norm1", hidden, bias=True),
            norm("norm2", hidden, bias=True),
            *_fused_attention(hidden),
            *two_layer(hidden, width),
        )
        out = vision.integer("hidden_size")
    wide = hidden * vision.integer("spatial_merge_size") ** 2
    kernel = (hidden, channels, vision.integer("temporal_patch_size"), patch, patch)
    return (
        conv("visual.patch_embed.proj", kernel),
        *repeated("visual.blocks.*", depth, block),
        norm("visual.merger.ln_q", hidden, bias=not is_new),
        linear("visual.merger.mlp.0", wide, wide, bias=True),
        linear("visual.merger.mlp.2", wide, out, bias=True),
    )


def qwen3_vl(vision: ConfigFields, text_hidden: int) -> Modules:
    """Return the tower of Qwen3-VL (with deepstack mergers) and Qwen3.5."""
    hidden, depth = vision.integer("hidden_size"), vision.integer("depth")
    patch, out = side(vision, "patch_size"), vision.integer("out_hidden_size")
    kernel = (
        hidden,
        vision.integer("in_channels"),
        vision.integer("temporal_patch_size"),
        patch,
        patch,
    )
    block = (
        norm("norm1", hidden, bias=True),
        norm("norm2", hidden, bias=True),
        *_fused_attention(hidden),
        *two_layer(
            hidden, vision.integer("intermediate_size"), ("mlp.linear_fc1", "mlp.linear_fc2")
        ),
    )
    wide = hidden * vision.integer("spatial_merge_size") ** 2
    modules = (
        conv("visual.patch_embed.proj", kernel, (hidden,)),
        embedding("visual.pos_embed", vision.integer("num_position_embeddings"), hidden),
        *repeated("visual.blocks.*", depth, block),
        *_merger("visual.merger", wide, out, hidden),
    )
    if "deepstack_visual_indexes" in vision.defaults:
        count = len(vision.items("deepstack_visual_indexes") or [])
        if count:
            deep = tuple(
                ModuleSpec(name=m.name, kind=m.kind, shapes=m.shapes, count=count)
                for m in _merger("visual.deepstack_merger_list.*", wide, out, wide)
            )
            modules += deep
    return modules


def siglip(vision: ConfigFields, text_hidden: int) -> Modules:
    """Return SigLIP and Gemma 3's projector."""
    hidden, patch = vision.integer("hidden_size"), side(vision, "patch_size")
    positions = (side(vision, "image_size") // patch) ** 2
    block = (
        norm("layer_norm1", hidden, bias=True),
        norm("layer_norm2", hidden, bias=True),
        *separate_attention(hidden, hidden, bias=True, out="out_proj"),
        *two_layer(hidden, vision.integer("intermediate_size")),
    )
    kernel = (hidden, vision.integer("num_channels"), patch, patch)
    return (
        conv("vision_tower.embeddings.patch_embedding", kernel, (hidden,)),
        embedding("vision_tower.embeddings.position_embedding", positions, hidden),
        *repeated("vision_tower.encoder.layers.*", vision.integer("num_hidden_layers"), block),
        norm("vision_tower.post_layernorm", hidden, bias=True),
        *(pooling_head(vision, hidden) if vision.flag("vision_use_head", True) else ()),
        parameter("multi_modal_projector", (hidden, text_hidden)),
        norm("multi_modal_projector.mm_soft_emb_norm", hidden),
    )


def pooling_head(vision: ConfigFields, hidden: int) -> Modules:
    """Return SigLIP's attention pooling head, built unless vision_use_head is false."""
    root = "vision_tower.head"
    return (
        parameter(root, (1, 1, hidden)),
        parameter(f"{root}.attention", (3 * hidden, hidden), (3 * hidden,)),
        linear(f"{root}.attention.out_proj", hidden, hidden, bias=True),
        norm(f"{root}.layernorm", hidden, bias=True),
        linear(f"{root}.mlp.fc1", hidden, vision.integer("intermediate_size"), bias=True),
        linear(f"{root}.mlp.fc2", vision.integer("intermediate_size"), hidden, bias=True),
    )


def pixtral_vision(fields: ConfigFields) -> ConfigFields:
    """Return the fields of Mistral 3's tower."""
    if fields.config.get("vision_config") is None:
        return ConfigFields({"patch_size": 14, "image_size": 1540}, "pixtral")
    vision = fields.sub("vision_config")
    return ConfigFields(vision.config, "pixtral", path=vision.path)


def pixtral(vision: ConfigFields, text_hidden: int, *, merge: int, bias: bool) -> Modules:
    """Return Pixtral and Mistral 3's projector with its patch merger."""
    hidden, patch = vision.integer("hidden_size"), side(vision, "patch_size")
    block = (
        norm("attention_norm", hidden),
        norm("ffn_norm", hidden),
        *gated_mlp(hidden, vision.integer("intermediate_size"), prefix="feed_forward"),
        *separate_attention(hidden, hidden, bias=False, out="o_proj", prefix="attention"),
    )
    kernel = (hidden, vision.integer("num_channels"), patch, patch)
    projector = "multi_modal_projector"
    return (
        conv("vision_tower.patch_conv", kernel),
        norm("vision_tower.ln_pre", hidden),
        *repeated("vision_tower.transformer.layers.*", vision.integer("num_hidden_layers"), block),
        norm(f"{projector}.norm", hidden),
        linear(f"{projector}.patch_merger.merging_layer", hidden * merge**2, hidden),
        linear(f"{projector}.linear_1", hidden, text_hidden, bias=bias),
        linear(f"{projector}.linear_2", text_hidden, text_hidden, bias=bias),
    )


def llama4(vision: ConfigFields, text_hidden: int) -> Modules:
    """Return Llama 4's tower: patches unfolded into a linear, pixel shuffle, projector."""
    hidden, patch = vision.integer("hidden_size"), side(vision, "patch_size")
    positions = (side(vision, "image_size") // patch) ** 2 + 1
    channels, width = vision.integer("num_channels"), vision.integer("intermediate_size")
    block = (
        *separate_attention(hidden, hidden, bias=True, out="o_proj"),
        *two_layer(hidden, width),
        norm("input_layernorm", hidden, bias=True),
        norm("post_attention_layernorm", hidden, bias=True),
    )
    project_in, project_out = (
        vision.integer("projector_input_dim"),
        vision.integer("projector_output_dim"),
    )
    return (
        parameter("vision_model", (hidden,), (positions, hidden)),
        linear("vision_model.patch_embedding.linear", channels * patch**2, hidden),
        norm("vision_model.layernorm_pre", hidden, bias=True),
        norm("vision_model.layernorm_post", hidden, bias=True),
        *repeated("vision_model.model.layers.*", vision.integer("num_hidden_layers"), block),
        linear("vision_model.vision_adapter.mlp.fc1", width, project_in),
        linear("vision_model.vision_adapter.mlp.fc2", project_out, project_out),
        linear("multi_modal_projector.linear_1", vision.integer("vision_output_dim"), text_hidden),
    )


def mllama(vision: ConfigFields, text_hidden: int) -> Modules:
    """Return Llama 3.2 Vision's two transformers, tile embeddings and projector."""
    hidden, patch = vision.integer("hidden_size"), side(vision, "patch_size")
    positions = (side(vision, "image_size") // patch) ** 2 + 1
    tiles = vision.integer("max_num_tiles")
    ratios = vision.items("supported_aspect_ratios")
    ids = (8 if ratios is None else len(ratios)) + 1
    block = (
        *separate_attention(hidden, hidden, bias=False, out="o_proj"),
        *two_layer(hidden, vision.integer("intermediate_size")),
        norm("input_layernorm", hidden, bias=True),
        norm("post_attention_layernorm", hidden, bias=True),
    )
    root = "vision_model"
    kernel = (hidden, vision.integer("num_channels"), patch, patch)
    return (
        parameter(root, (hidden,)),
        conv(f"{root}.patch_embedding", kernel),
        parameter(f"{root}.gated_positional_embedding", (1,), (positions, hidden)),
        embedding(
            f"{root}.gated_positional_embedding.tile_embedding", ids, tiles * positions * hidden
        ),
        parameter(f"{root}.pre_tile_positional_embedding", (1,)),
        embedding(f"{root}.pre_tile_positional_embedding.embedding", ids, tiles * hidden),
        parameter(f"{root}.post_tile_positional_embedding", (1,)),
        embedding(f"{root}.post_tile_positional_embedding.embedding", ids, tiles * hidden),
        norm(f"{root}.layernorm_pre", hidden, bias=True),
        norm(f"{root}.layernorm_post", hidden, bias=True),
        *repeated(f"{root}.transformer.layers.*", vision.integer("num_hidden_layers"), block),
        *repeated(
            f"{root}.global_transformer.layers.*",
            vision.integer("num_global_layers"),
            (parameter("", (1,), (1,)), *block),
        ),
        linear(
            "multi_modal_projector", vision.integer("vision_output_dim"), text_hidden, bias=True
        ),
    )


def kimi_k25(vision: ConfigFields, text_hidden: int) -> Modules:
    """Return Kimi K2.5's tower (its repository spells the sizes vt_*) and patch merger."""
    hidden = vision.integer("vt_hidden_size", vision.raw("hidden_size"))
    width = vision.integer("vt_intermediate_size", vision.raw("intermediate_size"))
    depth = vision.integer("vt_num_hidden_layers", vision.raw("num_hidden_layers"))
    patch = side(vision, "patch_size")
    grid = tuple(
        vision.integer(f"init_pos_emb_{axis}", vision.raw(f"pos_emb_{axis}"))
        for axis in ("height", "width")
    )
    merge = vision.items("merge_kernel_size") or [1, 1]
    wide = (
        hidden
        * vision.whole("merge_kernel_size", merge[0])
        * vision.whole("merge_kernel_size", merge[-1])
    )
    block = (
        norm("norm1", hidden, bias=True),
        norm("norm2", hidden, bias=True),
        *separate_attention(hidden, hidden, bias=True, out="proj", prefix="attn"),
        *two_layer(hidden, width),
    )
    return (
        conv("vision_tower.patch_embed.proj", (hidden, 3, patch, patch), (hidden,)),
        parameter("vision_tower.patch_embed.pos_emb", (*grid, hidden)),
        *repeated("vision_tower.layers.*", depth, block),
        norm("vision_tower.final_layernorm", hidden, bias=True),
        norm("mm_projector.pre_norm", hidden, bias=True),
        linear("mm_projector.in_proj", wide, wide, bias=True),
        linear("mm_projector.out_proj", wide, text_hidden, bias=True),
    )


def minimax_m3(vision: ConfigFields, text_hidden: int, *, project: int) -> Modules:
    """Return MiniMax-M3's tower and its projector, which merges patches after projecting them."""
    hidden, patch = vision.integer("hidden_size"), side(vision, "patch_size")
    kernel = (
        hidden,
        vision.integer("num_channels"),
        vision.integer("temporal_patch_size"),
        patch,
        patch,
    )
    block = (
        norm("layer_norm1", hidden, bias=True),
        norm("layer_norm2", hidden, bias=True),
        *separate_attention(hidden, hidden, bias=True, out="out_proj"),
        *two_layer(hidden, vision.integer("intermediate_size")),
    )
    merged = text_hidden * vision.integer("spatial_merge_size") ** 2
    root = "multi_modal_projector"
    return (
        conv("vision_tower.embeddings.proj", kernel),
        norm("vision_tower.pre_layrnorm", hidden, bias=True),
        *repeated("vision_tower.layers.*", vision.integer("num_hidden_layers"), block),
        linear(f"{root}.linear_1", hidden, project, bias=True),
        linear(f"{root}.linear_2", project, text_hidden, bias=True),
        linear(f"{root}.merge_linear_1", merged, project, bias=True),
        linear(f"{root}.merge_linear_2", project, text_hidden, bias=True),
    )


def glm4v(vision: ConfigFields, text_hidden: int) -> Modules:
    """Return GLM-4.5V's tower: RMS norms, gated MLPs as wide as the text, a merger after a convolution."""
    hidden, out = vision.integer("hidden_size"), vision.integer("out_hidden_size")
    patch, merge = side(vision, "patch_size"), vision.integer("spatial_merge_size")
    kernel = (hidden, vision.integer("in_channels"), vision.integer("temporal_patch_size"))
    bias, width = vision.flag("attention_bias"), vision.integer("intermediate_size")
    block = (
        norm("norm1", hidden),
        norm("norm2", hidden),
        linear("attn.qkv", hidden, 3 * hidden, bias=bias),
        linear("attn.proj", hidden, hidden),
        *gated_mlp(hidden, out),
    )
    return (
        embedding(
            "visual.embeddings.position_embedding",
            (side(vision, "image_size") // patch) ** 2,
            hidden,
        ),
        conv("visual.patch_embed.proj", (*kernel, patch, patch), (hidden,)),
        *repeated("visual.blocks.*", vision.integer("depth"), block),
        linear("visual.merger.proj", out, out),
        norm("visual.merger.post_projection_norm", out, bias=True),
        *gated_mlp(out, width, prefix="visual.merger"),
        norm("visual.post_conv_layernorm", hidden),
        conv("visual.downsample", (out, hidden, merge, merge), (out,)),
        norm("visual.post_layernorm", hidden),
    )


VISION: dict[str, Callable[[ConfigFields, int], Modules]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    "qwen3_5": qwen3_vl,
    "qwen3_5_moe": qwen3_vl,
    "gemma3": siglip,
    "llama4": llama4,
    "mllama": mllama,
    "kimi_k25": kimi_k25,
    "glm4v_moe": glm4v,
}
