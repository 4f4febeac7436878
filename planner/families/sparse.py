"""Newer sparse attention: DeepSeek-V4 (compressed caches, hyper-connections) and MiniMax-M3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.families.blocks import buffer, gated_mlp, group_layers, linear, norm, parameter
from planner.families.decoder import MlpPart, Traits, attention_modules, finish
from planner.families.experts import fused_experts, moe_spec
from planner.families.fields import ConfigFields
from planner.models.spec import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleSpec,
)

_SLIDING, _CSA, _HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_RATIO = {0: _SLIDING, 4: _CSA, 128: _HCA}


def _v4_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return each layer's attention: layer_types, old compress_ratios, or the class's pattern."""
    types = fields.items("layer_types")
    ratios = fields.items("compress_ratios", None)
    if types is None and ratios is not None:
        for ratio in ratios:
            if ratio not in _RATIO or isinstance(ratio, bool):
                raise fields.error("compress_ratios", ratio, "0, 4 or 128 for every layer")
        types = [_RATIO[ratio] for ratio in ratios]
    if types is None:
        types = [_HCA] * min(num_layers, 2)
        types += [_CSA if layer % 2 else _HCA for layer in range(max(num_layers - 2, 0))]
    if len(types) < num_layers:
        raise fields.error("layer_types", len(types), f"one entry for each of {num_layers} layers")
    for kind in types:
        if kind not in _RATIO.values():
            raise fields.error("layer_types", kind, ", ".join(_RATIO.values()))
    return types[:num_layers]


def _v4_rates(fields: ConfigFields) -> dict[str, int]:
    """Return how many tokens one compressed entry stands for."""
    rates = {_SLIDING: 0, _CSA: 4, _HCA: 128}
    given = fields.raw("compress_rates")
    if isinstance(given, Mapping):
        rates |= {str(kind): fields.whole("compress_rates", rate) for kind, rate in given.items()}
    rates[_CSA] = fields.integer("compress_rate_csa", rates[_CSA])
    rates[_HCA] = fields.integer("compress_rate_hca", rates[_HCA])
    return rates


def _v4_attention(
    fields: ConfigFields, hidden: int, kind: str
) -> tuple[MixerSpec, tuple[ModuleSpec, ...]]:
    heads, width = fields.integer("num_attention_heads"), fields.integer("head_dim")
    rank, groups = fields.integer("q_lora_rank"), fields.integer("o_groups")
    out = groups * fields.integer("o_lora_rank")
    rate = _v4_rates(fields)[kind]
    index_heads, index_dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    has_index = kind == _CSA
    mixer = MixerSpec(
        kind=MixerKind.SLIDING,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=width,
        v_head_dim=width,
        window=fields.integer("sliding_window"),
        qk_norm=True,
        k_is_v=True,
        shares_storage=True,
        q_lora_rank=rank,
        compress_ratio=rate,
        index_heads=index_heads if has_index else 0,
        index_head_dim=index_dim if has_index else 0,
    )
    each = fields.divide("num_attention_heads * head_dim", heads * width, "o_groups", groups)
    root = "self_attn"
    modules: tuple[ModuleSpec, ...] = (
        parameter(root, (heads,)),
        linear(f"{root}.q_a_proj", hidden, rank),
        norm(f"{root}.q_a_norm", rank),
        linear(f"{root}.q_b_proj", rank, heads * width),
        linear(f"{root}.kv_proj", hidden, width),
        norm(f"{root}.kv_norm", width),
        linear(f"{root}.o_a_proj", each, out),
        linear(f"{root}.o_b_proj", out, hidden),
    )
    if rate:
        # the sparse compressor keeps two overlapping series
        modules += _compressor(f"{root}.compressor", hidden, width, rate, 2 if has_index else 1)
    if has_index:
        index = f"{root}.compressor.indexer"
        modules += (
            *_compressor(index, hidden, index_dim, rate, 2),
            linear(f"{index}.q_b_proj", rank, index_heads * index_dim),
            linear(f"{index}.scorer.weights_proj", hidden, index_heads),
        )
    return mixer, modules


def _compressor(
    name: str, hidden: int, width: int, rate: int, series: int
) -> tuple[ModuleSpec, ...]:
    return (
        parameter(name, (rate, series * width)),
        linear(f"{name}.kv_proj", hidden, series * width),
        linear(f"{name}.gate_proj", hidden, series * width),
        norm(f"{name}.kv_norm", width),
    )


def deepseek_v4(fields: ConfigFields) -> ModelSpec:
    """Return DeepSeek-V4: a window, compressed entries beyond it, and hc_mult residual streams."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    width, number = fields.integer("moe_intermediate_size"), fields.integer("n_routed_experts")
    streams = fields.integer("hc_mult")
    mixes = (2 + streams) * streams
    hyper = ((mixes, streams * hidden), (mixes,), (3,))
    # whatever n_shared_experts says, the class builds one shared expert
    mlp = (
        fused_experts("mlp.experts", number, hidden, width),
        parameter("mlp.gate", (number, hidden)),
        *gated_mlp(hidden, width, prefix="mlp.shared_experts", bias=fields.flag("mlp_bias")),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
        parameter("attn_hc", *hyper),
        parameter("ffn_hc", *hyper),
    )
    spec = moe_spec(fields, width, number, shared=width)

    def build_layer(kind: str) -> LayerSpec:
        mixer, modules = _v4_attention(fields, hidden, kind)
        return LayerSpec(count=1, mixer=mixer, mlp=spec, modules=(*modules, *mlp))

    layers, order = group_layers(_v4_kinds(fields, num_layers), build_layer)
    head = parameter("hc_head", (streams, streams * hidden), (streams,), (1,))
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("norm", hidden), head),
        residual_streams=streams,
    )


def minimax_m3(fields: ConfigFields) -> ModelSpec:
    """Return MiniMax-M3's text part: dense and sparse layers, the latter with a block indexer."""
    model_type = fields.model_type
    fields = ConfigFields(fields.config, "minimax_m3_vl_text", path=fields.path)
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    sparse = _by_frequency(
        fields,
        "mlp_layer_types",
        fields.raw("moe_layer_freq", None),
        num_layers,
        ("dense", "sparse"),
        True,
    )
    old = fields.raw("sparse_attention_config", None)
    old = old if isinstance(old, Mapping) else {}
    indexed = _by_frequency(
        fields,
        "layer_types",
        old.get("sparse_attention_freq"),
        num_layers,
        ("full_attention", "minimax_m3_sparse"),
        False,
    )
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))

    def build_layer(key: tuple[bool, bool]) -> LayerSpec:
        is_sparse, is_indexed = key
        part = _m3_experts(fields, hidden) if is_sparse else _m3_dense(fields, hidden)
        mixer, modules = _m3_attention(fields, hidden, old if is_indexed else None)
        return LayerSpec(count=1, mixer=mixer, mlp=part[0], modules=(*modules, *part[1], *norms))

    layers, order = group_layers(list(zip(sparse, indexed, strict=True)), build_layer)
    spec = finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(norm("norm", hidden),),
        norm="rmsnorm_gemma",
    )
    return replace(spec, model_type=model_type)


def _m3_attention(
    fields: ConfigFields, hidden: int, index: Mapping[str, Any] | None
) -> tuple[MixerSpec, tuple[ModuleSpec, ...]]:
    """Return attention, with a block indexer where `index` (the old config's fields) is given."""
    heads = fields.integer("num_attention_heads")
    kv_heads, head_dim = fields.integer("num_key_value_heads"), fields.integer("head_dim")
    fields.divide("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    shape = (heads, kv_heads, head_dim)
    modules = attention_modules(fields, Traits(qk_norm="head"), hidden, shape)
    mixer = MixerSpec(
        kind=MixerKind.FULL,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        qk_norm=True,
    )
    if index is None:
        return mixer, modules
    number = fields.integer("index_n_heads", index.get("sparse_num_index_heads", 4))
    width = fields.integer("index_head_dim", index.get("sparse_index_dim", 128))
    return replace(mixer, index_heads=number, index_head_dim=width), (
        *modules,
        linear("self_attn.indexer.q_proj", hidden, number * width),
        linear("self_attn.indexer.k_proj", hidden, width),
        norm("self_attn.indexer.q_norm", width),
        norm("self_attn.indexer.k_norm", width),
    )


def _m3_dense(fields: ConfigFields, hidden: int) -> MlpPart:
    width = fields.integer("dense_intermediate_size")
    spec = MlpSpec(kind=MlpKind.GATED, intermediate=width, fused_gate_up=True)
    return spec, _fused_mlp("mlp", hidden, width)


def _fused_mlp(prefix: str, hidden: int, width: int) -> tuple[ModuleSpec, ...]:
    return (
        linear(f"{prefix}.gate_up_proj", hidden, 2 * width),
        linear(f"{prefix}.down_proj", width, hidden),
    )


def _m3_experts(fields: ConfigFields, hidden: int) -> MlpPart:
    width, number = fields.integer("intermediate_size"), fields.integer("num_local_experts")
    shared = fields.integer("shared_intermediate_size")
    spec = replace(moe_spec(fields, width, number, shared=shared), fused_gate_up=True)
    return spec, (
        fused_experts("mlp.experts", number, hidden, width),
        parameter("mlp.gate", (number, hidden)),
        buffer("mlp.gate.e_score_correction_bias", (number,)),
        *_fused_mlp("mlp.shared_experts", hidden, shared),
    )


def _by_frequency(
    fields: ConfigFields,
    field: str,
    old: object,
    num_layers: int,
    names: tuple[str, str],
    otherwise: bool,
) -> list[bool]:
    """Return a flag for every layer: new names, old 0/1 list, or the class default."""
    kinds = fields.pattern(field, num_layers, names)
    if kinds is not None:
        return [kind == names[1] for kind in kinds]
    if old is None:
        return [otherwise] * num_layers
    if not isinstance(old, list) or len(old) != num_layers:
        raise fields.error(field, old, f"0 or 1 for each of the {num_layers} layers")
    return [bool(flag) for flag in old]


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of DeepSeek-V4 or MiniMax-M3."""
    return deepseek_v4(fields) if fields.model_type == "deepseek_v4" else minimax_m3(fields)
