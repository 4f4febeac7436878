"""Hybrids of attention and Mamba: Jamba, Falcon-H1, Granite 4."""

from planner.families.blocks import (
    attention,
    gated_mlp,
    group_layers,
    linear,
    norm,
)
from planner.families.decoder import LLAMA, MlpPart, attention_modules, finish, head_shape
from planner.families.experts import fused_experts, granite_moe, moe_spec
from planner.families.fields import ConfigFields
from planner.families.mamba import Mamba2Shape, Mixer, mamba1, mamba2
from planner.models.spec import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
)

LEGACY_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def full_attention(
    fields: ConfigFields, shape: tuple[int, int, int], *, bias: bool = False
) -> MixerSpec:
    """Return plain attention over all tokens."""
    heads, kv_heads, head_dim = shape
    return MixerSpec(
        kind=MixerKind.FULL,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        bias=bias,
    )


def _dense(fields: ConfigFields, hidden: int, prefix: str, *, bias: bool = False) -> MlpPart:
    width = fields.integer("intermediate_size")
    spec = MlpSpec(kind=MlpKind.GATED, intermediate=width, activation=fields.text("hidden_act"))
    return spec, gated_mlp(hidden, width, bias=bias, prefix=prefix)


def jamba(fields: ConfigFields) -> ModelSpec:
    """Return Jamba: Mamba layers, attention every attn_layer_period, experts every other layer."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    shape = head_shape(fields, hidden)
    attn = attention(hidden, *shape)
    number = fields.integer("num_experts")
    bias, conv_bias = fields.flag("mamba_proj_bias"), fields.flag("mamba_conv_bias")
    state = mamba1(
        "mamba",
        hidden,
        inner=fields.integer("mamba_expand") * hidden,
        state=fields.integer("mamba_d_state"),
        kernel=fields.integer("mamba_d_conv"),
        rank=fields.auto("mamba_dt_rank", -(-hidden // 16)),
        bias=bias,
        conv_bias=conv_bias,
        norms=True,
    )
    norms = (norm("input_layernorm", hidden), norm("pre_ff_layernorm", hidden))

    def every(kind: str) -> list[bool]:
        period = fields.integer(f"{kind}_layer_period")
        offset = fields.integer(f"{kind}_layer_offset", least=0)
        return [layer % period == offset for layer in range(num_layers)]

    def build_layer(key: tuple[bool, bool]) -> LayerSpec:
        is_attention, is_sparse = key
        mixer: Mixer = (full_attention(fields, shape), attn) if is_attention else state
        part = (
            _jamba_experts(fields, hidden) if is_sparse else _dense(fields, hidden, "feed_forward")
        )
        return LayerSpec(
            count=1, mixer=mixer[0], mlp=part[0], modules=(*mixer[1], *part[1], *norms)
        )

    sparse = [flag and number > 1 for flag in every("expert")]
    layers, order = group_layers(list(zip(every("attn"), sparse, strict=True)), build_layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("final_layernorm", hidden),),
    )


def _jamba_experts(fields: ConfigFields, hidden: int) -> MlpPart:
    width, number = fields.integer("intermediate_size"), fields.integer("num_experts")
    return moe_spec(fields, width, number), (
        linear("feed_forward.router", hidden, number),
        fused_experts("feed_forward.experts", number, hidden, width),
    )


def falcon_h1(fields: ConfigFields) -> ModelSpec:
    """Return Falcon-H1: every layer runs attention and Mamba2 side by side."""
    hidden = fields.integer("hidden_size")
    shape = head_shape(fields, hidden)
    given = fields.optional("mamba_d_ssm")
    state = _mamba2(
        fields,
        hidden,
        fields.integer("mamba_expand") * hidden if given is None else given,
        out_bias=fields.flag("projectors_bias"),
        gated_norm=fields.flag("mamba_rms_norm"),
    )
    part = _dense(fields, hidden, "feed_forward", bias=fields.flag("mlp_bias"))
    layer = LayerSpec(
        count=1,
        mixer=full_attention(fields, shape, bias=fields.flag("attention_bias")),
        side_mixer=state[0],
        mlp=part[0],
        modules=(
            *attention_modules(fields, LLAMA, hidden, shape),
            *state[1],
            *part[1],
            norm("input_layernorm", hidden),
            norm("pre_ff_layernorm", hidden),
        ),
    )
    layers, order = group_layers([0] * fields.integer("num_hidden_layers"), lambda _: layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("final_layernorm", hidden),),
        embedding_scale_copy=fields.number("embedding_multiplier") != 1.0,
    )


def granite_hybrid(fields: ConfigFields) -> ModelSpec:
    """Return Granite 4: attention or Mamba2, then shared MLP beside optional experts."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    types = layer_kinds(fields, num_layers) or ["linear_attention"] * num_layers
    shape = head_shape(fields, hidden)
    shared = fields.integer("shared_intermediate_size")
    shared_modules = (
        linear("shared_mlp.input_linear", hidden, 2 * shared),
        linear("shared_mlp.output_linear", shared, hidden),
    )
    if fields.integer("num_local_experts", least=0):
        part = granite_moe(fields, hidden)
    else:
        spec = MlpSpec(
            kind=MlpKind.GATED,
            intermediate=shared,
            activation=fields.text("hidden_act"),
            fused_gate_up=True,
        )
        part = (spec, shared_modules)
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))

    def build_layer(kind: str) -> LayerSpec:
        if kind == "full_attention":
            bias = fields.flag("attention_bias")
            mixer: Mixer = (
                full_attention(fields, shape, bias=bias),
                attention_modules(fields, LLAMA, hidden, shape),
            )
        else:
            inner = fields.integer("mamba_expand") * hidden
            mixer = _mamba2(fields, hidden, inner, out_bias=fields.flag("mamba_proj_bias"))
        return LayerSpec(
            count=1, mixer=mixer[0], mlp=part[0], modules=(*mixer[1], *part[1], *norms)
        )

    layers, order = group_layers(types, build_layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("norm", hidden),),
        logit_scale=fields.number("logits_scaling"),
        embedding_scale_copy=fields.number("embedding_multiplier") != 1.0,
    )


def _mamba2(
    fields: ConfigFields, hidden: int, inner: int, *, out_bias: bool, gated_norm: bool = True
) -> Mixer:
    """Return a Mamba2 mixer of width `inner` from the mamba_* fields."""
    heads = fields.integer("mamba_n_heads")
    each = fields.divide("mamba_expand * hidden_size", inner, "mamba_n_heads", heads)
    if fields.auto("mamba_d_head", each) != each:
        allowed = f"the mixer's width / mamba_n_heads = {each}"
        raise fields.error("mamba_d_head", fields.raw("mamba_d_head"), allowed)
    shape = Mamba2Shape(
        num_heads=heads,
        head_dim=each,
        groups=fields.integer("mamba_n_groups"),
        state=fields.integer("mamba_d_state"),
        kernel=fields.integer("mamba_d_conv"),
        chunk=fields.integer("mamba_chunk_size"),
        bias=fields.flag("mamba_proj_bias"),
        out_bias=out_bias,
        conv_bias=fields.flag("mamba_conv_bias"),
        gated_norm=gated_norm,
    )
    return mamba2("mamba", hidden, shape)


def layer_kinds(fields: ConfigFields, num_layers: int) -> list[str] | None:
    """Return "full_attention" or "linear_attention" for every layer, in old or new words."""
    kinds = fields.pattern(
        "layer_types",
        num_layers,
        ("full_attention", "linear_attention", "attention", "mamba"),
    )
    return None if kinds is None else [LEGACY_KINDS.get(kind, kind) for kind in kinds]


_BUILDERS = {
    "jamba": jamba,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite_hybrid,
}


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of an attention and Mamba hybrid."""
    return _BUILDERS[fields.model_type](fields)
