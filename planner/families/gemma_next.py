"""Gemma 3n and Gemma 4: per-layer embeddings, layers that reuse keys and values, K = V, experts."""

from collections.abc import Mapping
from dataclasses import replace

from planner.families.blocks import embedding, gated_mlp, group_layers, linear, norm, parameter
from planner.families.decoder import MlpPart, finish
from planner.families.experts import fused_experts
from planner.families.fields import ConfigFields
from planner.families.windows import Mask, from_layer_types
from planner.models.spec import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleKind,
    ModuleSpec,
)

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
Key = tuple[Mask, bool, int, int, int]
"""Mask, reuses keys and values, head_dim, key/value heads, MLP width."""


def shared_from(fields: ConfigFields, num_layers: int) -> int:
    """Return the first layer that reuses an earlier layer's keys and values."""
    shared = fields.integer("num_kv_shared_layers", least=0)
    if shared >= num_layers:
        raise fields.error(
            "num_kv_shared_layers", shared, f"fewer than the {num_layers} layers there are"
        )
    return num_layers - shared


def _mixer(fields: ConfigFields, key: Key, *, k_is_v: bool) -> MixerSpec:
    (kind, window), shared, head_dim, kv_heads, _ = key
    return MixerSpec(
        kind=kind,
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        window=window,
        qk_norm=True,
        bias=fields.flag("attention_bias"),
        kv_shared=shared,
        k_is_v=k_is_v,
    )


def _attention(mixer: MixerSpec, hidden: int, *, stored: bool = False) -> tuple[ModuleSpec, ...]:
    """Return self_attn; `stored` keeps the unused key and value weights of the sharing layers.

    Gemma 3n's checkpoints hold them and engines load them; transformers 5.19 leaves them out.
    """
    query, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    modules: tuple[ModuleSpec, ...] = (
        linear("self_attn.q_proj", hidden, query, bias=mixer.bias),
        linear("self_attn.o_proj", query, hidden, bias=mixer.bias),
        norm("self_attn.q_norm", mixer.head_dim),
    )
    if mixer.kv_shared and not stored:
        return modules
    own: tuple[ModuleSpec, ...] = (
        linear("self_attn.k_proj", hidden, keys, bias=mixer.bias),
        norm("self_attn.k_norm", mixer.head_dim),
    )
    if not mixer.k_is_v:
        own += (linear("self_attn.v_proj", hidden, keys, bias=mixer.bias),)
    if mixer.kv_shared:
        own = tuple(replace(module, kind=ModuleKind.BUFFER) for module in own)
    return (*modules, *own)


def _dense(fields: ConfigFields, hidden: int, width: int) -> MlpPart:
    activation = fields.text("hidden_activation")
    spec = MlpSpec(kind=MlpKind.GATED, intermediate=width, activation=activation)
    return spec, gated_mlp(hidden, width)


def _per_layer_input(hidden: int, width: int) -> tuple[ModuleSpec, ...]:
    return (
        linear("per_layer_input_gate", hidden, width),
        linear("per_layer_projection", width, hidden),
        norm("post_per_layer_input_norm", hidden),
    )


def _embeddings(
    fields: ConfigFields, hidden: int, num_layers: int, width: int
) -> tuple[ModuleSpec, ...]:
    table: tuple[ModuleSpec, ...] = (
        embedding("embed_tokens", fields.integer("vocab_size"), hidden),
    )
    if not width:
        return table
    rows = fields.integer("vocab_size_per_layer_input")
    return (
        *table,
        embedding("embed_tokens_per_layer", rows, num_layers * width),
        linear("per_layer_model_projection", hidden, num_layers * width),
        norm("per_layer_projection_norm", width),
    )


def _altup_and_laurel(hidden: int, inputs: int, rank: int) -> tuple[ModuleSpec, ...]:
    """Return what Gemma 3n adds to a layer: mixing of residual copies, a low-rank side path."""
    return (
        *(norm(name, hidden) for name in NORMS),
        parameter("altup", (hidden,)),
        linear("altup.correction_coefs", inputs, inputs),
        linear("altup.prediction_coefs", inputs, inputs**2),
        linear("altup.modality_router", hidden, inputs),
        norm("altup.router_norm", hidden),
        linear("laurel.linear_left", hidden, rank),
        linear("laurel.linear_right", rank, hidden),
        norm("laurel.post_laurel_norm", hidden),
    )


def gemma3n(fields: ConfigFields) -> ModelSpec:
    """Return Gemma 3n: AltUp, Laurel and per-layer inputs around ordinary attention."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    masks = from_layer_types(fields, num_layers, lambda layer: (layer + 1) % 5 != 0)
    first = shared_from(fields, num_layers)
    widths = fields.raw("intermediate_size")
    if not isinstance(widths, list):
        widths = [widths] * num_layers
    if len(widths) != num_layers:
        raise fields.error("intermediate_size", widths, f"one width, or {num_layers} of them")
    head_dim, kv_heads = fields.integer("head_dim"), fields.integer("num_key_value_heads")
    heads = fields.integer("num_attention_heads")
    fields.divide("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    inputs = fields.integer("altup_num_inputs")
    per_layer = fields.integer("hidden_size_per_layer_input")
    common = (
        *_altup_and_laurel(hidden, inputs, fields.integer("laurel_rank")),
        *_per_layer_input(hidden, per_layer),
    )
    keys: list[Key] = [
        (mask, 0 < first <= layer, head_dim, kv_heads, fields.whole("intermediate_size", width))
        for layer, (mask, width) in enumerate(zip(masks, widths, strict=True))
    ]

    def build_layer(key: Key) -> LayerSpec:
        mixer = _mixer(fields, key, k_is_v=False)
        part = _dense(fields, hidden, key[4])
        modules = (*_attention(mixer, hidden, stored=True), *part[1], *common)
        return LayerSpec(count=1, mixer=mixer, mlp=part[0], modules=modules, num_norms=4)

    layers, order = group_layers(keys, build_layer)
    projections = tuple(
        ModuleSpec(name=f"{name}.*", kind=module.kind, shapes=module.shapes, count=inputs - 1)
        for name in ("altup_projections", "altup_unembed_projections")
        for module in (linear(name, hidden, hidden),)
        if inputs > 1
    )
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        embeddings=(*_embeddings(fields, hidden, num_layers, per_layer), *projections[:1]),
        final=(*projections[1:], norm("norm", hidden)),
        embedding_scale_copy=True,
        # AltUp carries this many copies of the hidden state
        residual_streams=inputs,
    )


def _overrides(fields: ConfigFields, masks: list[Mask]) -> list[tuple[int, int]]:
    """Return head_dim and key/value heads of every layer; full layers have their own."""
    head_dim, kv_heads = fields.integer("head_dim"), fields.integer("num_key_value_heads")
    given = fields.raw("per_layer_config", None)
    if isinstance(given, Mapping):
        shapes = []
        for layer in range(len(masks)):
            entry = given.get(str(layer), given.get(layer, {}))
            entry = entry if isinstance(entry, Mapping) else {}
            shapes.append(
                (
                    fields.whole("per_layer_config", entry.get("head_dim", head_dim)),
                    fields.whole("per_layer_config", entry.get("num_key_value_heads", kv_heads)),
                )
            )
        return shapes
    full_dim = fields.integer("global_head_dim", 512)
    full_kv = kv_heads
    if fields.flag("attention_k_eq_v"):
        full_kv = fields.optional("num_global_key_value_heads", None) or kv_heads
    return [
        (head_dim, kv_heads) if kind is MixerKind.SLIDING else (full_dim, full_kv)
        for kind, _ in masks
    ]


def gemma4(fields: ConfigFields) -> ModelSpec:
    """Return Gemma 4: wide heads in full layers, shared keys and values, optional experts."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    masks = from_layer_types(fields, num_layers, lambda layer: (layer + 1) % 6 != 0)
    # transformers forces the last layer to full attention
    masks[-1] = (MixerKind.FULL, 0)
    first = shared_from(fields, num_layers)
    heads, width = fields.integer("num_attention_heads"), fields.integer("intermediate_size")
    double, k_is_v = fields.flag("use_double_wide_mlp"), fields.flag("attention_k_eq_v")
    per_layer = fields.optional("hidden_size_per_layer_input", least=0) or 0
    common: tuple[ModuleSpec, ...] = tuple(norm(name, hidden) for name in NORMS)
    if per_layer:
        common += _per_layer_input(hidden, per_layer)
    routed = _experts(fields, hidden, width) if fields.flag("enable_moe_block") else None
    keys: list[Key] = []
    for layer, (mask, shape) in enumerate(zip(masks, _overrides(fields, masks), strict=True)):
        fields.divide("num_attention_heads", heads, "num_key_value_heads", shape[1])
        shared = layer >= first
        keys.append((mask, shared, *shape, width * (2 if double and shared and first else 1)))

    def build_layer(key: Key) -> LayerSpec:
        is_full = key[0][0] is not MixerKind.SLIDING
        mixer = _mixer(fields, key, k_is_v=k_is_v and is_full)
        part = _dense(fields, hidden, key[4])
        modules = (*_attention(mixer, hidden), *part[1], *common)
        mlp = part[0]
        if routed is not None:
            mlp, modules = routed[0], (*modules, *routed[1])
        return LayerSpec(
            count=1, mixer=mixer, mlp=mlp, modules=modules, num_norms=7 if routed else 4
        )

    layers, order = group_layers(keys, build_layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        embeddings=_embeddings(fields, hidden, num_layers, per_layer),
        final=(norm("norm", hidden),),
        embedding_scale_copy=True,
    )


def _experts(fields: ConfigFields, hidden: int, dense_width: int) -> MlpPart:
    """Return the experts that run beside the dense MLP, which counts as the shared one."""
    number, width = fields.integer("num_experts"), fields.integer("moe_intermediate_size")
    top_k = fields.integer("top_k_experts")
    if top_k > number:
        raise fields.error("top_k_experts", top_k, f"at most the {number} experts")
    spec = MlpSpec(
        kind=MlpKind.MOE,
        intermediate=width,
        activation=fields.text("hidden_activation"),
        num_experts=number,
        top_k=top_k,
        shared_intermediate=dense_width,
    )
    return spec, (
        parameter("router", (hidden,), (number,)),
        linear("router.proj", hidden, number),
        fused_experts("experts", number, hidden, width),
        norm("post_feedforward_layernorm_1", hidden),
        norm("post_feedforward_layernorm_2", hidden),
        norm("pre_feedforward_layernorm_2", hidden),
    )


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of the text part of Gemma 3n or Gemma 4."""
    return gemma3n(fields) if fields.model_type == "gemma3n_text" else gemma4(fields)
