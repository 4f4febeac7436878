"""Hybrids of attention and Mamba: Jamba, Nemotron-H, Falcon-H1, Granite 4."""

from planner.families.blocks import (
    attention,
    buffer,
    experts,
    gated_mlp,
    group_layers,
    linear,
    norm,
    parameter,
)
from planner.families.decoder import LLAMA, MlpPart, attention_modules, finish, head_shape
from planner.families.experts import fused_experts, granite_moe, moe_spec
from planner.families.fields import ConfigFields
from planner.families.mamba import NO_MLP, Mamba2Shape, Mixer, mamba1, mamba2
from planner.model import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleSpec,
)

_LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}
_NEMOTRON = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


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
        part = _dense(fields, hidden, "feed_forward")
        if is_sparse:
            width = fields.integer("intermediate_size")
            part = (
                moe_spec(fields, width, number),
                (
                    linear("feed_forward.router", hidden, number),
                    fused_experts("feed_forward.experts", number, hidden, width),
                ),
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


def falcon_h1(fields: ConfigFields) -> ModelSpec:
    """Return Falcon-H1: every layer runs attention and Mamba2 side by side."""
    hidden = fields.integer("hidden_size")
    shape = head_shape(fields, hidden)
    given = fields.optional("mamba_d_ssm")
    inner = fields.integer("mamba_expand") * hidden if given is None else given
    heads = fields.integer("mamba_n_heads")
    each = fields.divide("mamba_d_ssm", inner, "mamba_n_heads", heads)
    if fields.auto("mamba_d_head", each) != each:
        raise fields.error(
            "mamba_d_head", fields.raw("mamba_d_head"), f"mamba_d_ssm / mamba_n_heads = {each}"
        )
    state = mamba2(
        "mamba",
        hidden,
        Mamba2Shape(
            num_heads=heads,
            head_dim=each,
            groups=fields.integer("mamba_n_groups"),
            state=fields.integer("mamba_d_state"),
            kernel=fields.integer("mamba_d_conv"),
            chunk=fields.integer("mamba_chunk_size"),
            bias=fields.flag("mamba_proj_bias"),
            out_bias=fields.flag("projectors_bias"),
            conv_bias=fields.flag("mamba_conv_bias"),
            gated_norm=fields.flag("mamba_rms_norm"),
        ),
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
            mixer = _granite_mamba(fields, hidden)
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


def _granite_mamba(fields: ConfigFields, hidden: int) -> Mixer:
    inner, heads = fields.integer("mamba_expand") * hidden, fields.integer("mamba_n_heads")
    each = fields.divide("mamba_expand * hidden_size", inner, "mamba_n_heads", heads)
    if fields.auto("mamba_d_head", each) != each:
        allowed = f"mamba_expand * hidden_size / mamba_n_heads = {each}"
        raise fields.error("mamba_d_head", fields.raw("mamba_d_head"), allowed)
    bias = fields.flag("mamba_proj_bias")
    return mamba2(
        "mamba",
        hidden,
        Mamba2Shape(
            num_heads=heads,
            head_dim=each,
            groups=fields.integer("mamba_n_groups"),
            state=fields.integer("mamba_d_state"),
            kernel=fields.integer("mamba_d_conv"),
            chunk=fields.integer("mamba_chunk_size"),
            bias=bias,
            out_bias=bias,
            conv_bias=fields.flag("mamba_conv_bias"),
        ),
    )


def layer_kinds(fields: ConfigFields, num_layers: int) -> list[str] | None:
    """Return "full_attention" or "linear_attention" for every layer, in old or new words."""
    kinds = fields.pattern(
        "layer_types",
        num_layers,
        ("full_attention", "linear_attention", "attention", "mamba"),
    )
    return None if kinds is None else [_LEGACY.get(kind, kind) for kind in kinds]


def nemotron_h(fields: ConfigFields) -> ModelSpec:
    """Return Nemotron-H: each layer is one of Mamba2, attention, MLP or experts."""
    hidden = fields.integer("hidden_size")
    kinds = _nemotron_kinds(fields)
    layers, order = group_layers(kinds, lambda kind: _nemotron_layer(fields, hidden, kind))
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("norm_f", hidden),),
        embed_name="embeddings",
    )


def _nemotron_kinds(fields: ConfigFields) -> list[str]:
    pattern = fields.raw("hybrid_override_pattern", None)
    kinds = fields.items("layers_block_type")
    if kinds is None and pattern is not None:
        kinds = [_NEMOTRON.get(char, char) for char in fields.text("hybrid_override_pattern")]
    if kinds is None:
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    kinds = [_LEGACY.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in _NEMOTRON.values():
            raise fields.error("hybrid_override_pattern", kind, "M, E, * or - for every layer")
    if not kinds or len(kinds) > 10_000:
        raise fields.error("hybrid_override_pattern", len(kinds), "1 to 10000 layers")
    return kinds


def _nemotron_layer(fields: ConfigFields, hidden: int, kind: str) -> LayerSpec:
    mixer, mlp = MixerSpec(kind=MixerKind.NONE), NO_MLP
    if kind == "linear_attention":
        mixer, modules = _nemotron_mamba(fields, hidden)
    elif kind == "full_attention":
        heads, kv_heads = (
            fields.integer("num_attention_heads"),
            fields.optional("num_key_value_heads"),
        )
        name = "attention_head_dim" if not fields.has("head_dim") else "head_dim"
        shape = (heads, kv_heads or heads, fields.integer(name, fields.defaults["head_dim"]))
        fields.divide("num_attention_heads", heads, "num_key_value_heads", shape[1])
        mixer = full_attention(fields, shape)
        modules = attention(hidden, *shape, prefix="mixer")
    elif kind == "mlp":
        width, bias = fields.integer("intermediate_size"), fields.flag("mlp_bias")
        mlp = MlpSpec(
            kind=MlpKind.PLAIN, intermediate=width, activation=fields.text("mlp_hidden_act")
        )
        modules = (
            linear("mixer.up_proj", hidden, width, bias=bias),
            linear("mixer.down_proj", width, hidden, bias=bias),
        )
    else:
        mlp, modules = _nemotron_moe(fields, hidden)
    return LayerSpec(
        count=1, mixer=mixer, mlp=mlp, modules=(*modules, norm("norm", hidden)), num_norms=1
    )


def _nemotron_mamba(fields: ConfigFields, hidden: int) -> Mixer:
    bias = fields.flag("use_bias")
    dtype = str(fields.raw("mamba_ssm_cache_dtype"))
    return mamba2(
        "mixer",
        hidden,
        Mamba2Shape(
            num_heads=fields.integer("mamba_num_heads"),
            head_dim=fields.integer("mamba_head_dim"),
            groups=fields.integer("mamba_n_groups", fields.raw("n_groups")),
            state=fields.integer("ssm_state_size"),
            kernel=fields.integer("mamba_d_conv", fields.raw("conv_kernel")),
            chunk=fields.integer("mamba_chunk_size", fields.raw("chunk_size")),
            bias=bias,
            out_bias=bias,
            conv_bias=fields.flag("mamba_conv_bias", fields.raw("use_conv_bias")),
            state_fp32=dtype in ("float32", "torch.float32"),
        ),
    )


def _nemotron_moe(fields: ConfigFields, hidden: int) -> MlpPart:
    width, number = fields.integer("moe_intermediate_size"), fields.integer("n_routed_experts")
    shared = fields.integer("moe_shared_expert_intermediate_size")
    latent = fields.optional("moe_latent_size")
    inner, bias = latent or hidden, fields.flag("mlp_bias")
    top_k = fields.integer("num_experts_per_tok")
    if top_k > number:
        raise fields.error("num_experts_per_tok", top_k, f"at most the {number} experts")
    modules: tuple[ModuleSpec, ...] = (
        experts("mixer.experts", (number, width, inner), (number, inner, width)),
        parameter("mixer.gate", (number, hidden)),
        buffer("mixer.gate.e_score_correction_bias", (number,)),
        linear("mixer.shared_experts.up_proj", hidden, shared, bias=bias),
        linear("mixer.shared_experts.down_proj", shared, hidden, bias=bias),
    )
    if latent:
        modules += (
            linear("mixer.fc1_latent_proj", hidden, latent, bias=bias),
            linear("mixer.fc2_latent_proj", latent, hidden, bias=bias),
        )
    return (
        MlpSpec(
            kind=MlpKind.MOE,
            intermediate=width,
            activation=fields.text("mlp_hidden_act"),
            num_experts=number,
            top_k=top_k,
            shared_intermediate=shared,
            expert_gated=False,
        ),
        modules,
    )


_BUILDERS = {
    "jamba": jamba,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
}


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of an attention and Mamba hybrid."""
    return _BUILDERS[fields.model_type](fields)
