"""LFM2: short gated convolutions beside grouped-query attention, an MLP in every layer."""

from dataclasses import replace

from planner.families.blocks import attention, conv, group_layers, linear, norm
from planner.families.decoder import finish, head_shape
from planner.families.fields import ConfigFields
from planner.families.mamba import Mixer
from planner.models.spec import LayerSpec, MixerKind, MixerSpec, MlpKind, MlpSpec, ModelSpec

KINDS = ("conv", "full_attention")


def layer_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return each layer's kind: by layer_types, or full_attn_idxs, which is all of them where absent."""
    kinds = fields.pattern("layer_types", num_layers, KINDS)
    if kinds is not None:
        return kinds
    full = fields.items("full_attn_idxs", None)
    return [KINDS[full is None or layer in full] for layer in range(num_layers)]


def mlp_width(fields: ConfigFields) -> int:
    """Return the MLP's width: two thirds of what the config says, rounded up (modeling_lfm2.py, Lfm2MLP)."""
    width = fields.integer("block_ff_dim", fields.integer("intermediate_size"))
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width = 2 * width // 3
    if fields.raw("block_ffn_dim_multiplier", 1) is None:
        return width
    multiple = fields.integer("block_multiple_of")
    return -(-int(fields.number("block_ffn_dim_multiplier", 1) * width) // multiple) * multiple


def short_convolution(fields: ConfigFields, hidden: int) -> Mixer:
    """Return C * conv(B * x): B, C and x from one projection, a kernel of a few tokens."""
    kernel, bias = fields.integer("conv_L_cache"), fields.flag("conv_bias")
    shapes: tuple[tuple[int, ...], ...] = ((hidden, 1, kernel),)
    spec = MixerSpec(
        kind=MixerKind.MAMBA,
        state_shapes=((hidden, kernel - 1),),
        inner_dim=hidden,
        conv_kernel=kernel,
    )
    return spec, (
        conv("conv.conv", *shapes, *(((hidden,),) if bias else ())),
        linear("conv.in_proj", hidden, 3 * hidden, bias=bias),
        linear("conv.out_proj", hidden, hidden, bias=bias),
    )


def _attention(fields: ConfigFields, hidden: int) -> Mixer:
    heads, kv_heads, head_dim = head_shape(fields, hidden)
    spec = MixerSpec(
        kind=MixerKind.FULL,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        qk_norm=True,
    )
    return spec, (
        *attention(hidden, heads, kv_heads, head_dim, out_name="out_proj"),
        norm("self_attn.q_layernorm", head_dim),
        norm("self_attn.k_layernorm", head_dim),
    )


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of an LFM2."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    width = mlp_width(fields)
    mlp = MlpSpec(kind=MlpKind.GATED, intermediate=width, activation="silu")

    def build_layer(kind: str) -> LayerSpec:
        mixer, modules = (short_convolution if kind == "conv" else _attention)(fields, hidden)
        return LayerSpec(
            count=1,
            mixer=mixer,
            mlp=mlp,
            modules=(
                *modules,
                linear("feed_forward.w1", hidden, width),
                linear("feed_forward.w3", hidden, width),
                linear("feed_forward.w2", width, hidden),
                norm("operator_norm", hidden),
                norm("ffn_norm", hidden),
            ),
        )

    layers, order = group_layers(layer_kinds(fields, num_layers), build_layer)
    spec = finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("embedding_norm", hidden),),
    )
    if fields.raw("tie_embedding", None) is None:
        return spec
    return replace(spec, tied=fields.flag("tie_embedding", True))  # the older spelling
