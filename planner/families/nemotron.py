"""Nemotron-H: every layer is one of Mamba2, attention, an MLP or (latent) experts."""

from dataclasses import replace

from planner.families.blocks import (
    attention,
    buffer,
    experts,
    group_layers,
    linear,
    norm,
    parameter,
)
from planner.families.decoder import MlpPart, finish
from planner.families.fields import ConfigFields
from planner.families.hybrid import LEGACY_KINDS, full_attention
from planner.families.mamba import NO_MLP, Mamba2Shape, Mixer, mamba2
from planner.models.spec import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleSpec,
)

_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def build(fields: ConfigFields) -> ModelSpec:
    """Return Nemotron-H: each layer is one of Mamba2, attention, MLP or experts."""
    hidden = fields.integer("hidden_size")
    kinds = _kinds(fields)
    layers, order = group_layers(kinds, lambda kind: _layer(fields, hidden, kind))
    spec = finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("norm_f", hidden),),
        embed_name="embeddings",
    )
    # the class ties nothing, whatever tie_word_embeddings says
    return replace(spec, tied=False)


def _kinds(fields: ConfigFields) -> list[str]:
    pattern = fields.raw("hybrid_override_pattern", None)
    kinds = fields.items("layers_block_type")
    if kinds is None and pattern is not None:
        kinds = [_PATTERN.get(char, char) for char in fields.text("hybrid_override_pattern")]
    if kinds is None:
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    kinds = [LEGACY_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in _PATTERN.values():
            raise fields.error("hybrid_override_pattern", kind, "M, E, * or - for every layer")
    if not kinds or len(kinds) > 10_000:
        raise fields.error("hybrid_override_pattern", len(kinds), "1 to 10000 layers")
    return kinds


def _layer(fields: ConfigFields, hidden: int, kind: str) -> LayerSpec:
    mixer, mlp = MixerSpec(kind=MixerKind.NONE), NO_MLP
    if kind == "linear_attention":
        mixer, modules = _mamba(fields, hidden)
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
        mlp, modules = _moe(fields, hidden)
    return LayerSpec(
        count=1, mixer=mixer, mlp=mlp, modules=(*modules, norm("norm", hidden)), num_norms=1
    )


def _mamba(fields: ConfigFields, hidden: int) -> Mixer:
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


def _moe(fields: ConfigFields, hidden: int) -> MlpPart:
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
