"""Gemma 4's vision and audio towers and their projections into the text width."""

from planner.families.blocks import conv, linear, norm, parameter
from planner.families.fields import ConfigFields
from planner.families.towers import Modules, repeated, side


def gemma4_towers(fields: ConfigFields, text_hidden: int) -> Modules:
    """Return the towers whose configs are there; Gemma 4 builds none that is null."""
    modules: Modules = ()
    if fields.config.get("vision_config") is not None:
        vision = fields.sub("vision_config", "gemma4_vision")
        hidden = vision.integer("hidden_size")
        modules += _vision(vision)
        modules += (linear("embed_vision.embedding_projection", hidden, text_hidden),)
    if fields.config.get("audio_config") is not None:
        audio = fields.sub("audio_config", "gemma4_audio")
        out = audio.integer("output_proj_dims", 1536)
        modules += _audio(audio, out)
        modules += (linear("embed_audio.embedding_projection", out, text_hidden),)
    return modules


def _vision(vision: ConfigFields) -> Modules:
    hidden, head_dim = vision.integer("hidden_size"), vision.integer("head_dim")
    query = vision.integer("num_attention_heads") * head_dim
    keys = vision.integer("num_key_value_heads") * head_dim
    width = vision.integer("intermediate_size")
    block = (
        linear("self_attn.q_proj.linear", hidden, query),
        linear("self_attn.k_proj.linear", hidden, keys),
        linear("self_attn.v_proj.linear", hidden, keys),
        linear("self_attn.o_proj.linear", query, hidden),
        norm("self_attn.q_norm", head_dim),
        norm("self_attn.k_norm", head_dim),
        linear("mlp.gate_proj.linear", hidden, width),
        linear("mlp.up_proj.linear", hidden, width),
        linear("mlp.down_proj.linear", width, hidden),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
        norm("pre_feedforward_layernorm", hidden),
        norm("post_feedforward_layernorm", hidden),
    )
    patch = side(vision, "patch_size")
    positions = vision.integer("position_embedding_size")
    return (
        parameter("vision_tower.patch_embedder", (2, positions, hidden)),
        linear("vision_tower.patch_embedder.input_proj", 3 * patch**2, hidden),
        *repeated("vision_tower.encoder.layers.*", vision.integer("num_hidden_layers"), block),
    )


def _feed_forward(name: str, hidden: int) -> Modules:
    return (
        linear(f"{name}.ffw_layer_1.linear", hidden, 4 * hidden),
        linear(f"{name}.ffw_layer_2.linear", 4 * hidden, hidden),
        norm(f"{name}.pre_layer_norm", hidden),
        norm(f"{name}.post_layer_norm", hidden),
    )


def _audio(audio: ConfigFields, out: int) -> Modules:
    hidden = audio.integer("hidden_size")
    heads = audio.integer("num_attention_heads")
    head_dim = audio.divide("hidden_size", hidden, "num_attention_heads", heads)
    kernel = audio.integer("conv_kernel_size")
    block = (
        *_feed_forward("feed_forward1", hidden),
        *_feed_forward("feed_forward2", hidden),
        parameter("self_attn", (head_dim,)),
        *(
            linear(f"self_attn.{name}.linear", hidden, hidden)
            for name in ("q_proj", "k_proj", "v_proj", "post")
        ),
        linear("self_attn.relative_k_proj", hidden, hidden),
        linear("lconv1d.linear_start.linear", hidden, 2 * hidden),
        linear("lconv1d.linear_end.linear", hidden, hidden),
        conv("lconv1d.depthwise_conv1d", (hidden, 1, kernel)),
        norm("lconv1d.pre_layer_norm", hidden),
        norm("lconv1d.conv_norm", hidden),
        norm("norm_pre_attn", hidden),
        norm("norm_post_attn", hidden),
        norm("norm_out", hidden),
    )
    channels = audio.items("subsampling_conv_channels") or []
    if len(channels) != 2 or not all(isinstance(c, int) and 0 < c < 2**20 for c in channels):
        raise audio.error("subsampling_conv_channels", channels, "two whole numbers")
    first, second = channels
    sub = "audio_tower.subsample_conv_projection"
    return (
        conv(f"{sub}.layer0.conv", (first, 1, 3, 3)),
        norm(f"{sub}.layer0.norm", first),
        conv(f"{sub}.layer1.conv", (second, first, 3, 3)),
        norm(f"{sub}.layer1.norm", second),
        linear(f"{sub}.input_proj_linear", (first // 4) * second, hidden),
        *repeated("audio_tower.layers.*", audio.integer("num_hidden_layers"), block),
        linear("audio_tower.output_proj", hidden, out, bias=True),
    )
