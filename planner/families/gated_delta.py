"""Qwen3-Next and Qwen3.5-3.8: gated delta net layers beside gated attention, dense or experts."""

from dataclasses import replace

from planner.families.blocks import conv, group_layers, linear, norm, parameter
from planner.families.decoder import MlpPart, Traits, dense_mlp, finish, head_shape
from planner.families.experts import qwen_shared, qwen_sparse
from planner.families.fields import ConfigFields
from planner.families.mamba import Mixer
from planner.models.spec import LayerSpec, MixerKind, MixerSpec, ModelSpec, ModuleSpec


def delta_net(fields: ConfigFields, hidden: int) -> Mixer:
    """Return a gated delta net: conv over q, k, v and a state [v heads, k dim, v dim]."""
    k_heads, v_heads = (
        fields.integer("linear_num_key_heads"),
        fields.integer("linear_num_value_heads"),
    )
    k_dim, v_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    fields.divide("linear_num_value_heads", v_heads, "linear_num_key_heads", k_heads)
    keys, values = k_heads * k_dim, v_heads * v_dim
    kernel, channels = fields.integer("linear_conv_kernel_dim"), 2 * keys + values
    if fields.model_type == "qwen3_next":
        inputs: tuple[ModuleSpec, ...] = (
            linear("linear_attn.in_proj_qkvz", hidden, 2 * keys + 2 * values),
            linear("linear_attn.in_proj_ba", hidden, 2 * v_heads),
        )
    else:
        inputs = (
            linear("linear_attn.in_proj_qkv", hidden, channels),
            linear("linear_attn.in_proj_z", hidden, values),
            linear("linear_attn.in_proj_b", hidden, v_heads),
            linear("linear_attn.in_proj_a", hidden, v_heads),
        )
    dtype = fields.raw("mamba_ssm_dtype", fields.raw("mamba_ssm_cache_dtype", None))
    spec = MixerSpec(
        kind=MixerKind.LINEAR,
        num_heads=v_heads,
        num_kv_heads=k_heads,
        head_dim=k_dim,
        v_head_dim=v_dim,
        gated_output=True,
        state_shapes=((channels, kernel - 1), (v_heads, v_dim, k_dim)),
        state_fp32=dtype in ("float32", "torch.float32"),
        inner_dim=values,
        key_dim=keys,
        conv_kernel=kernel,
    )
    return spec, (
        parameter("linear_attn", (v_heads,), (v_heads,)),
        conv("linear_attn.conv1d", (channels, 1, kernel)),
        *inputs,
        norm("linear_attn.norm", v_dim),
        linear("linear_attn.out_proj", values, hidden),
    )


def gated_attention(fields: ConfigFields, hidden: int) -> Mixer:
    """Return attention whose query projection also yields an output gate."""
    heads, kv_heads, head_dim = head_shape(fields, hidden)
    bias = fields.flag("attention_bias")
    spec = MixerSpec(
        kind=MixerKind.FULL,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        qk_norm=True,
        gated_output=True,
        bias=bias,
    )
    return spec, (
        linear("self_attn.q_proj", hidden, 2 * heads * head_dim, bias=bias),
        linear("self_attn.k_proj", hidden, kv_heads * head_dim, bias=bias),
        linear("self_attn.v_proj", hidden, kv_heads * head_dim, bias=bias),
        linear("self_attn.o_proj", heads * head_dim, hidden, bias=bias),
        norm("self_attn.q_norm", head_dim),
        norm("self_attn.k_norm", head_dim),
    )


def layer_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return each layer's kind: full attention every full_attention_interval-th, else linear."""
    kinds = fields.pattern("layer_types", num_layers, ("linear_attention", "full_attention"))
    if kinds is not None:
        return kinds
    interval = fields.integer("full_attention_interval", 4)
    return [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(num_layers)
    ]


def mtp_modules(
    hidden: int, layer: tuple[ModuleSpec, ...], *, count: int
) -> tuple[ModuleSpec, ...]:
    """Return Qwen's multi-token-prediction block: `count` full layers under one projection."""
    if not count:
        return ()
    return (
        linear("mtp.fc", 2 * hidden, hidden),
        norm("mtp.pre_fc_norm_embedding", hidden),
        norm("mtp.pre_fc_norm_hidden", hidden),
        norm("mtp.norm", hidden),
        *(
            replace(module, name=f"mtp.layers.*.{module.name}", count=module.count * count)
            for module in layer
        ),
    )


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of a gated delta net hybrid."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    kinds = layer_kinds(fields, num_layers)
    if fields.model_type == "qwen3_next":
        sparse = qwen_sparse(fields, num_layers)
    else:
        sparse = [fields.model_type == "qwen3_5_moe_text"] * num_layers
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))

    def build_layer(key: tuple[str, bool]) -> LayerSpec:
        kind, is_sparse = key
        mixer = (delta_net if kind == "linear_attention" else gated_attention)(fields, hidden)
        part: MlpPart = (
            qwen_shared(fields, hidden)
            if is_sparse
            else dense_mlp(fields, Traits(), hidden, fields.integer("intermediate_size"))
        )
        return LayerSpec(
            count=1, mixer=mixer[0], mlp=part[0], modules=(*mixer[1], *part[1], *norms)
        )

    layers, order = group_layers(list(zip(kinds, sparse, strict=True)), build_layer)
    count = fields.integer(
        "num_nextn_predict_layers", fields.raw("mtp_num_hidden_layers", 0), least=0
    )
    extra = mtp_modules(hidden, build_layer(("full_attention", sparse[-1])).modules, count=count)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("norm", hidden),),
        norm="rmsnorm_gemma",
        extra=extra,
    )
