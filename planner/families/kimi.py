"""Kimi Linear and Kimi K3: delta attention (KDA) beside latent attention, latent experts.

K3's code is in its own repository. Its tensor shapes (full-rank gates, 128 A_log entries for 96
heads, attention residuals, experts on a latent width) add up to the published 2,779,931,837,184.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.families.blocks import buffer, conv, gated_mlp, group_layers, linear, norm, parameter
from planner.families.decoder import MlpPart, finish
from planner.families.experts import fused_experts, moe_spec
from planner.families.fields import ConfigFields
from planner.families.mamba import Mixer
from planner.families.mla import dense_part, mla_mixer, mla_modules
from planner.families.towers import Modules, repeated
from planner.models.spec import LayerSpec, MixerKind, MixerSpec, ModelSpec, ModuleSpec


def _linear_config(fields: ConfigFields) -> Mapping[str, Any]:
    given = fields.raw("linear_attn_config", None)
    return given if isinstance(given, Mapping) else {}


def layer_kinds(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return whether each layer has full (latent) attention; the lists in the config count from 1."""
    types = fields.pattern("layer_types", num_layers, ("linear_attention", "full_attention"))
    if types is not None:
        return [kind == "full_attention" for kind in types]
    given = _linear_config(fields)
    full, linear_layers = given.get("full_attn_layers"), given.get("kda_layers")
    if full is None or linear_layers is None:
        return [bool(layer) and layer % 4 == 0 for layer in range(num_layers)]
    if not isinstance(full, list) or not isinstance(linear_layers, list):
        raise fields.error("linear_attn_config", full, "lists of layers counted from 1")
    if sorted(map(str, (*full, *linear_layers))) != sorted(map(str, range(1, num_layers + 1))):
        raise fields.error(
            "linear_attn_config.full_attn_layers",
            full,
            f"every layer from 1 to {num_layers} once in full_attn_layers or kda_layers",
        )
    return [layer + 1 in full for layer in range(num_layers)]


def delta_attention(fields: ConfigFields, hidden: int, *, is_k3: bool) -> Mixer:
    """Return KDA: three projections with short convs, a low-rank decay, a state per head."""
    given = _linear_config(fields)
    heads = fields.integer("linear_num_heads", given.get("num_heads", 32))
    dim = fields.integer("linear_head_dim", given.get("head_dim", 128))
    kernel = fields.integer("linear_conv_kernel_dim", given.get("short_conv_kernel_size", 4))
    width, root = heads * dim, "self_attn"
    gate = f"{root}.forget_gate"
    # K3 stores one A_log per head channel, the published class one per head
    decay = (dim,) if is_k3 else (heads,)
    modules: tuple[ModuleSpec, ...] = (
        *(linear(f"{root}.{name}_proj", hidden, width) for name in ("q", "k", "v")),
        conv(f"{root}.conv1d", (3 * width, 1, kernel)),
        linear(f"{gate}.f_a_proj", hidden, dim),
        linear(f"{gate}.f_b_proj", dim, width),
        parameter(gate, (width,), decay),
        linear(f"{root}.b_proj", hidden, heads),
        norm(f"{root}.o_norm", dim),
        linear(f"{root}.o_proj", width, hidden),
    )
    if given.get("use_full_rank_gate") is True and is_k3:
        modules += (linear(f"{root}.g_proj", hidden, width),)
    else:
        modules += (
            linear(f"{root}.g_a_proj", hidden, dim),
            linear(f"{root}.g_b_proj", dim, width),
        )
    spec = MixerSpec(
        kind=MixerKind.LINEAR,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=dim,
        gated_output=True,
        state_shapes=((3 * width, kernel - 1), (heads, dim, dim)),
        # the delta rule's state is kept in fp32 by every implementation
        state_fp32=True,
        inner_dim=width,
        key_dim=width,
        conv_kernel=kernel,
    )
    return spec, modules


def _latent_attention(fields: ConfigFields, hidden: int, *, is_k3: bool) -> Mixer:
    mixer = mla_mixer(fields)
    modules = mla_modules(mixer, hidden)
    if is_k3 and fields.flag("mla_use_output_gate", False):
        gate = linear("self_attn.g_proj", hidden, mixer.num_heads * mixer.v_head_dim)
        return replace(mixer, gated_output=True), (*modules, gate)
    return mixer, modules


def _experts(fields: ConfigFields, hidden: int) -> MlpPart:
    width, number = fields.integer("moe_intermediate_size"), fields.integer("num_local_experts")
    shared = width * (fields.optional("n_shared_experts", least=0) or 0)
    latent = fields.optional("routed_expert_hidden_size", None)
    modules: tuple[ModuleSpec, ...] = (
        fused_experts("mlp.experts", number, latent or hidden, width),
        parameter("mlp.gate", (number, hidden)),
        buffer("mlp.gate.e_score_correction_bias", (number,)),
    )
    if shared:
        modules += gated_mlp(hidden, shared, prefix="mlp.shared_experts")
    if latent:
        modules += (
            linear("mlp.fc1_latent_proj", hidden, latent),
            linear("mlp.fc2_latent_proj", latent, hidden),
        )
        if fields.flag("latent_moe_use_norm", False):
            modules += (norm("mlp.latent_norm", latent),)
    spec = moe_spec(fields, width, number, shared=shared)
    return replace(spec, routing_fp32=True, router_fp32=True), modules


def _residual(name: str, hidden: int) -> tuple[ModuleSpec, ...]:
    return (norm(f"{name}.norm", hidden), linear(f"{name}.proj", hidden, 1))


def text(fields: ConfigFields, *, is_k3: bool) -> ModelSpec:
    """Return the language model."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    types = fields.pattern("mlp_layer_types", num_layers, ("dense", "sparse"))
    dense = fields.integer("first_k_dense_replace", 1, least=0)
    sparse = [layer >= dense for layer in range(num_layers)]
    if types is not None:
        sparse = [kind == "sparse" for kind in types]
    common: tuple[ModuleSpec, ...] = (
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    block = fields.optional("attn_res_block_size", None) if is_k3 else None
    if block:
        common += (*_residual("self_attention_res", hidden), *_residual("mlp_res", hidden))

    def build_layer(key: tuple[bool, bool]) -> LayerSpec:
        is_full, is_sparse = key
        mixer = (_latent_attention if is_full else delta_attention)(fields, hidden, is_k3=is_k3)
        part = _experts(fields, hidden) if is_sparse else dense_part(fields, hidden)
        return LayerSpec(
            count=1,
            mixer=mixer[0],
            mlp=part[0],
            modules=(*mixer[1], *part[1], *common),
            num_norms=4 if block else 2,
        )

    keys = list(zip(layer_kinds(fields, num_layers), sparse, strict=True))
    layers, order = group_layers(keys, build_layer)
    final: tuple[ModuleSpec, ...] = (norm("norm", hidden),)
    if block:
        final += _residual("output_attn_res", hidden)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=final,
        # every block boundary's residual stays alive to the end
        residual_streams=1 + -(-num_layers // block) if block else 1,
    )


def k3_towers(vision: ConfigFields, text_hidden: int) -> Modules:
    """Return K3's bias-free vision tower and projector."""
    hidden, width = vision.integer("vt_hidden_size"), vision.integer("vt_intermediate_size")
    inner, patch = vision.integer("qkv_hidden_size"), vision.integer("patch_size")
    grid = (vision.integer("init_pos_emb_height"), vision.integer("init_pos_emb_width"))
    merge = vision.items("merge_kernel_size") or [1, 1]
    wide = (
        hidden
        * vision.whole("merge_kernel_size", merge[0])
        * vision.whole("merge_kernel_size", merge[-1])
    )
    block = (
        norm("norm0", hidden),
        norm("norm1", hidden),
        linear("wqkv", hidden, 3 * inner),
        linear("wo", inner, hidden),
        linear("mlp.fc0", hidden, width),
        linear("mlp.fc1", width, hidden),
    )
    return (
        conv("vision_tower.patch_embed.proj", (hidden, 3, patch, patch)),
        parameter("vision_tower.patch_embed.pos_emb", (*grid, hidden)),
        *repeated("vision_tower.encoder.blocks.*", vision.integer("vt_num_hidden_layers"), block),
        norm("vision_tower.encoder.final_layernorm", hidden),
        linear("mm_projector.proj.0", wide, wide),
        linear("mm_projector.proj.2", wide, text_hidden),
        norm("mm_projector.post_norm", text_hidden),
    )


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of Kimi Linear, or of Kimi K3 with its tower."""
    if fields.model_type == "kimi_linear":
        return text(fields, is_k3=False)
    inner = fields.sub("text_config", "kimi_linear")
    spec = text(inner, is_k3=True)
    towers: Modules = ()
    if fields.config.get("vision_config") is not None:
        towers = k3_towers(fields.sub("vision_config"), spec.hidden)
    return replace(
        spec,
        model_type=fields.model_type,
        architecture="KimiK3ForConditionalGeneration",
        tied=fields.flag("tie_word_embeddings", False),
        towers=towers,
    )
