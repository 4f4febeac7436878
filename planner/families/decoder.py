"""The common decoder: pre- or post-norm layers of grouped-query attention and an MLP or experts.

A family of this shape is a `Traits` value; `build_decoder` reads the config's fields by it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.families.blocks import (
    attention,
    embedding,
    gated_mlp,
    group_layers,
    linear,
    norm,
    parameter,
)
from planner.families.fields import ConfigFields
from planner.families.windows import Mask, full_everywhere, idle_window
from planner.models.spec import (
    LayerSpec,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleSpec,
)

Flag = bool | str
"""A fixed answer, or the name of the config's flag that gives it."""
MlpPart = tuple[MlpSpec, tuple[ModuleSpec, ...]]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a family of plain decoders does differently."""

    qkv_bias: Flag = False
    out_bias: Flag = False
    fused_qkv: bool = False
    out_name: str = "o_proj"
    qk_norm: str = ""
    """"" none, "head" over one head, "full" over all heads, "hidden" over hidden_size
    whatever head_dim says (OLMoE), or a flag's name for "head"."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    sinks: bool = False
    masks: Callable[[ConfigFields, int], list[Mask]] = full_everywhere
    mlp: str = "gated"
    """gated, fused (gate_up_proj in one linear) or the two names of a plain MLP: "fc1 fc2"."""
    mlp_bias: Flag = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: str = "rmsnorm"
    """rmsnorm, rmsnorm_gemma, layernorm (with bias) or "bare" (no parameters: OLMo)."""
    final_norm: str = "norm"
    activation: str = "hidden_act"
    head_bias: Flag = False
    parallel: bool = False
    scaled_embedding: bool = False


LLAMA = Traits(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")


def resolve(fields: ConfigFields, flag: Flag) -> bool:
    """Return a fixed flag, or read the config's."""
    return fields.flag(flag) if isinstance(flag, str) else flag


def head_shape(fields: ConfigFields, hidden: int) -> tuple[int, int, int]:
    """Return heads, key/value heads and head_dim, with the defaults transformers gives."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads", fields.defaults.get("num_key_value_heads"))
    kv_heads = heads if kv_heads is None else kv_heads
    fields.divide("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    explicit = fields.optional("head_dim", fields.defaults.get("head_dim"))
    head_dim = explicit or fields.divide("hidden_size", hidden, "num_attention_heads", heads)
    return heads, kv_heads, head_dim


def attention_modules(
    fields: ConfigFields, traits: Traits, hidden: int, shape: tuple[int, int, int]
) -> tuple[ModuleSpec, ...]:
    """Return the modules of self_attn for `shape` = (heads, key/value heads, head_dim)."""
    heads, kv_heads, head_dim = shape
    bias, out_bias = resolve(fields, traits.qkv_bias), resolve(fields, traits.out_bias)
    if traits.fused_qkv:
        modules: tuple[ModuleSpec, ...] = (
            linear("self_attn.qkv_proj", hidden, (heads + 2 * kv_heads) * head_dim, bias=bias),
            linear(f"self_attn.{traits.out_name}", heads * head_dim, hidden, bias=out_bias),
        )
    else:
        modules = attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            bias=bias,
            out_bias=out_bias,
            out_name=traits.out_name,
        )
    kind = qk_norm_kind(fields, traits)
    if kind:
        each = hidden // heads if kind == "hidden" else head_dim
        widths = (head_dim, head_dim) if kind == "head" else (heads * each, kv_heads * each)
        with_bias = traits.norm == "layernorm"
        modules += tuple(
            norm(f"self_attn.{name}", width, bias=with_bias)
            for name, width in zip(traits.qk_norm_names, widths, strict=True)
        )
    if traits.sinks:
        modules += (parameter("self_attn", (heads,)),)
    return modules


def qk_norm_kind(fields: ConfigFields, traits: Traits) -> str:
    """Return "", "head", "full" or "hidden"."""
    if traits.qk_norm in ("", "head", "full", "hidden"):
        return traits.qk_norm
    return "head" if fields.flag(traits.qk_norm) else ""


def dense_mlp(fields: ConfigFields, traits: Traits, hidden: int, intermediate: int) -> MlpPart:
    """Return a dense MLP of the family's form."""
    bias = resolve(fields, traits.mlp_bias)
    activation = fields.text(traits.activation)
    if traits.mlp == "gated":
        spec = MlpSpec(kind=MlpKind.GATED, intermediate=intermediate, activation=activation)
        return spec, gated_mlp(hidden, intermediate, bias=bias)
    if traits.mlp == "fused":
        spec = MlpSpec(
            kind=MlpKind.GATED,
            intermediate=intermediate,
            activation=activation,
            fused_gate_up=True,
        )
        return spec, (
            linear("mlp.gate_up_proj", hidden, 2 * intermediate, bias=bias),
            linear("mlp.down_proj", intermediate, hidden, bias=bias),
        )
    up, down = traits.mlp.split()
    spec = MlpSpec(kind=MlpKind.PLAIN, intermediate=intermediate, activation=activation)
    return spec, (
        linear(f"mlp.{up}", hidden, intermediate, bias=bias),
        linear(f"mlp.{down}", intermediate, hidden, bias=bias),
    )


def build_decoder(
    fields: ConfigFields,
    traits: Traits,
    *,
    moe: MlpPart | None = None,
    sparse: Sequence[bool] | None = None,
    extra: tuple[ModuleSpec, ...] = (),
) -> ModelSpec:
    """Return the ModelSpec of a plain decoder; layers where `sparse` is true have `moe` as MLP."""
    hidden = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    shape = head_shape(fields, hidden)
    attn = attention_modules(fields, traits, hidden, shape)
    has_dense = moe is None or (sparse is not None and not all(sparse))
    dense = (
        dense_mlp(fields, traits, hidden, fields.integer("intermediate_size")) if has_dense else moe
    )
    flags = [moe is not None] * num_layers if sparse is None else list(sparse)
    norms = layer_norms(traits, hidden)

    def build(key: tuple[Mask, bool]) -> LayerSpec:
        mask, is_sparse = key
        mlp, modules = moe if is_sparse and moe is not None else dense  # type: ignore[misc]
        return LayerSpec(
            count=1,
            mixer=attention_mixer(fields, traits, shape, mask),
            mlp=mlp,
            modules=(*attn, *modules, *norms),
            num_norms=len(traits.norms),
            parallel=traits.parallel,
        )

    layers, order = group_layers(
        list(zip(traits.masks(fields, num_layers), flags, strict=True)), build
    )
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=final_norm(traits, hidden),
        head_bias=resolve(fields, traits.head_bias),
        norm="layernorm" if traits.norm == "bare" else traits.norm,
        embedding_scale_copy=traits.scaled_embedding,
        extra=extra,
    )


def attention_mixer(
    fields: ConfigFields, traits: Traits, shape: tuple[int, int, int], mask: Mask
) -> MixerSpec:
    """Return the mixer of `shape` = (heads, key/value heads, head_dim) that sees `mask`."""
    softcap = fields.defaults.get("attn_logit_softcapping")
    return MixerSpec(
        kind=mask[0],
        num_heads=shape[0],
        num_kv_heads=shape[1],
        head_dim=shape[2],
        v_head_dim=shape[2],
        window=mask[1],
        qk_norm=bool(qk_norm_kind(fields, traits)),
        softcap=fields.number("attn_logit_softcapping", softcap),
        bias=resolve(fields, traits.qkv_bias),
    )


def layer_norms(traits: Traits, hidden: int) -> tuple[ModuleSpec, ...]:
    """Return the norms of a layer; OLMo's have no parameters."""
    if traits.norm == "bare":
        return ()
    return tuple(norm(name, hidden, bias=traits.norm == "layernorm") for name in traits.norms)


def final_norm(traits: Traits, hidden: int) -> tuple[ModuleSpec, ...]:
    """Return the norm after the last layer."""
    if traits.norm == "bare":
        return ()
    return (norm(traits.final_norm, hidden, bias=traits.norm == "layernorm"),)


def finish(
    fields: ConfigFields,
    *,
    hidden: int,
    layers: tuple[LayerSpec, ...],
    layer_order: tuple[int, ...],
    final: tuple[ModuleSpec, ...],
    embeddings: tuple[ModuleSpec, ...] | None = None,
    embed_name: str = "embed_tokens",
    head_bias: bool = False,
    **more: Any,
) -> ModelSpec:
    """Return a ModelSpec with what every language model has: vocabulary, embedding and head."""
    vocab = fields.integer("vocab_size")
    tied = fields.flag("tie_word_embeddings", fields.defaults.get("tie_word_embeddings", False))
    softcap = fields.defaults.get("final_logit_softcapping")
    more.setdefault("softcap", fields.number("final_logit_softcapping", softcap))
    more.setdefault("idle_window", idle_window(fields))
    more.setdefault("attention_dropout", fields.number("attention_dropout", 0.0))
    more.setdefault(
        "max_position",
        fields.integer(
            "max_position_embeddings", fields.defaults.get("max_position_embeddings", 0), least=0
        ),
    )
    if "output_router_logits" in fields.defaults:
        own = fields.defaults.get("router_aux_loss_coef", 0.0)
        more.setdefault("router_loss", fields.number("router_aux_loss_coef", own) > 0)
    more.setdefault("head", linear("lm_head", hidden, vocab, bias=head_bias))
    return ModelSpec(
        name="",
        model_type=fields.model_type,
        architecture=fields.architecture,
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        layers=layers,
        layer_order=layer_order,
        embeddings=(embedding(embed_name, vocab, hidden),) if embeddings is None else embeddings,
        final=final,
        **more,
    )
