"""Llama 4 (chunked attention, experts) and the text part of Llama 3.2 Vision (cross-attention)."""

from dataclasses import replace

from planner.families.blocks import (
    attention,
    experts,
    gated_mlp,
    group_layers,
    linear,
    norm,
    parameter,
)
from planner.families.decoder import LLAMA, MlpPart, attention_modules, finish, head_shape
from planner.families.experts import moe_spec
from planner.families.fields import ConfigFields
from planner.families.windows import FULL, LAYER_TYPES, Mask
from planner.models.spec import LayerSpec, MixerKind, MixerSpec, MlpKind, MlpSpec, ModelSpec


def _masks(fields: ConfigFields, num_layers: int) -> list[Mask]:
    """Layers with rotary embedding attend in chunks; the others see all tokens."""
    types = fields.pattern("layer_types", num_layers, LAYER_TYPES)
    if types is None:
        rope = fields.items("no_rope_layers", None)
        period = fields.integer("no_rope_layer_interval", 4)
        flags = rope or [int((layer + 1) % period != 0) for layer in range(num_layers)]
        if len(flags) != num_layers:
            raise fields.error(
                "no_rope_layers", flags, f"one entry for each of {num_layers} layers"
            )
        types = ["chunked_attention" if flag else "full_attention" for flag in flags]
    chunk = fields.optional("attention_chunk_size")
    chunked: Mask = (MixerKind.CHUNKED, chunk) if chunk else FULL
    return [chunked if kind == "chunked_attention" else FULL for kind in types]


def _sparse(fields: ConfigFields, num_layers: int) -> list[bool]:
    given = fields.items("moe_layers")
    if given is not None:
        return [layer in given for layer in range(num_layers)]
    step = fields.integer("interleave_moe_layer_step")
    return [layer % step == step - 1 for layer in range(num_layers)]


def llama4(fields: ConfigFields) -> ModelSpec:
    """Return Llama 4: experts with one shared expert, in every or every other layer."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    shape = head_shape(fields, hidden)
    width, number = fields.integer("intermediate_size"), fields.integer("num_local_experts")
    spec = moe_spec(fields, width, number, shared=width)
    routed: MlpPart = (
        spec,
        (
            experts("feed_forward.experts", (number, hidden, 2 * width), (number, width, hidden)),
            linear("feed_forward.router", hidden, number),
            *gated_mlp(hidden, width, prefix="feed_forward.shared_expert"),
        ),
    )
    wide = fields.integer("intermediate_size_mlp")
    dense: MlpPart = (
        MlpSpec(kind=MlpKind.GATED, intermediate=wide, activation=spec.activation),
        gated_mlp(hidden, wide, prefix="feed_forward"),
    )
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    qk_norm = fields.flag("use_qk_norm")

    def build_layer(key: tuple[Mask, bool]) -> LayerSpec:
        (kind, window), is_sparse = key
        part = routed if is_sparse else dense
        mixer = MixerSpec(
            kind=kind,
            num_heads=shape[0],
            num_kv_heads=shape[1],
            head_dim=shape[2],
            v_head_dim=shape[2],
            window=window,
            qk_norm=qk_norm and kind is MixerKind.CHUNKED,
            bias=fields.flag("attention_bias"),
        )
        modules = (*attention_modules(fields, LLAMA, hidden, shape), *part[1], *norms)
        return LayerSpec(count=1, mixer=mixer, mlp=part[0], modules=modules)

    keys = list(zip(_masks(fields, num_layers), _sparse(fields, num_layers), strict=True))
    layers, order = group_layers(keys, build_layer)
    return finish(
        fields, hidden=hidden, layers=layers, layer_order=order, final=(norm("norm", hidden),)
    )


def mllama(fields: ConfigFields) -> ModelSpec:
    """Return Llama 3.2 Vision's text part: some layers attend to the image instead of the text."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    heads, kv_heads, head_dim = head_shape(fields, hidden)
    width = fields.integer("intermediate_size")
    mlp = MlpSpec(kind=MlpKind.GATED, intermediate=width, activation=fields.text("hidden_act"))
    given = fields.items("cross_attention_layers")
    cross = [3, 8, 13, 18, 23, 28, 33, 38] if given is None else given
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))

    def build_layer(is_cross: bool) -> LayerSpec:
        mixer = MixerSpec(
            kind=MixerKind.CROSS if is_cross else MixerKind.FULL,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            qk_norm=is_cross,
        )
        prefix = "cross_attn" if is_cross else "self_attn"
        modules = attention(hidden, heads, kv_heads, head_dim, prefix=prefix)
        if is_cross:
            modules += (
                norm("cross_attn.q_norm", head_dim),
                norm("cross_attn.k_norm", head_dim),
                parameter("", (1,), (1,)),
            )
        modules += (*gated_mlp(hidden, width), *norms)
        return LayerSpec(count=1, mixer=mixer, mlp=mlp, modules=modules)

    layers, order = group_layers([layer in cross for layer in range(num_layers)], build_layer)
    spec = finish(
        fields, hidden=hidden, layers=layers, layer_order=order, final=(norm("norm", hidden),)
    )
    # eight rows more than the head: the image token and its neighbours
    table = spec.embeddings[0]
    return replace(spec, embeddings=(replace(table, shapes=((spec.vocab + 8, hidden),)),))


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of the text part of Llama 4 or Llama 3.2 Vision."""
    return llama4(fields) if fields.model_type == "llama4_text" else mllama(fields)
