"""Multi-head latent attention: DeepSeek-V2/V3/V3.2, Kimi-K2, GLM-4.7-Flash and GLM-5."""

from dataclasses import replace

from planner.families.blocks import gated_mlp, group_layers, linear, norm
from planner.families.decoder import MlpPart, finish
from planner.families.experts import deepseek_moe, mtp_block
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


def mla_mixer(fields: ConfigFields, *, indexer: bool = False) -> MixerSpec:
    """Return the latent attention's shape."""
    heads = fields.integer("num_attention_heads")
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    return MixerSpec(
        kind=MixerKind.MLA,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rope,
        v_head_dim=fields.integer("v_head_dim"),
        q_lora_rank=fields.optional("q_lora_rank") or 0,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_rope_head_dim=rope,
        qk_nope_head_dim=nope,
        bias=fields.flag("attention_bias"),
        index_heads=fields.integer("index_n_heads") if indexer else 0,
        index_head_dim=fields.integer("index_head_dim") if indexer else 0,
    )


def mla_modules(mixer: MixerSpec, hidden: int) -> tuple[ModuleSpec, ...]:
    """Return self_attn: query (direct or low rank), compressed keys and values, output, indexer."""
    query = mixer.num_heads * mixer.head_dim
    rank = mixer.q_lora_rank
    if rank:
        queries: tuple[ModuleSpec, ...] = (
            linear("self_attn.q_a_proj", hidden, rank, bias=mixer.bias),
            norm("self_attn.q_a_layernorm", rank),
            linear("self_attn.q_b_proj", rank, query),
        )
    else:
        queries = (linear("self_attn.q_proj", hidden, query),)
    latent = mixer.kv_lora_rank
    up = mixer.num_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    modules = (
        *queries,
        linear(
            "self_attn.kv_a_proj_with_mqa",
            hidden,
            latent + mixer.qk_rope_head_dim,
            bias=mixer.bias,
        ),
        norm("self_attn.kv_a_layernorm", latent),
        linear("self_attn.kv_b_proj", latent, up),
        linear("self_attn.o_proj", mixer.num_heads * mixer.v_head_dim, hidden, bias=mixer.bias),
    )
    if not mixer.index_heads:
        return modules
    width = mixer.index_head_dim
    return (
        *modules,
        linear("self_attn.indexer.wq_b", rank, mixer.index_heads * width),
        linear("self_attn.indexer.wk", hidden, width),
        norm("self_attn.indexer.k_norm", width, bias=True),
        linear("self_attn.indexer.weights_proj", hidden, mixer.index_heads),
    )


def sparse_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return which layers have experts: mlp_layer_types, else all but the first dense ones."""
    if "mlp_layer_types" in fields.defaults:
        types = fields.pattern("mlp_layer_types", num_layers, ("dense", "sparse"))
        if types is not None:
            return [kind == "sparse" for kind in types]
    # GLM-4.7-Flash's class has no first_k_dense_replace: one dense layer
    dense = (
        fields.integer("first_k_dense_replace", least=0)
        if "first_k_dense_replace" in fields.defaults
        else 1
    )
    return [layer >= dense for layer in range(num_layers)]


def indexed_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return which layers own a sparse indexer (GLM-5.2's other layers reuse an earlier one's)."""
    if fields.model_type == "deepseek_v32":
        return [True] * num_layers
    if fields.model_type != "glm_moe_dsa":
        return [False] * num_layers
    types = fields.pattern("indexer_types", num_layers, ("full", "shared"))
    if types is not None:
        return [kind == "full" for kind in types]
    pattern = fields.raw("index_topk_pattern", None)
    if pattern is not None:
        return _from_pattern(fields, pattern, num_layers)
    frequency = max(fields.integer("index_topk_freq", 1, least=0), 1)
    offset = fields.integer("index_skip_topk_offset", 2, least=0)
    return [max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers)]


def _from_pattern(fields: ConfigFields, pattern: object, num_layers: int) -> list[bool]:
    kinds = list(pattern) if isinstance(pattern, str | list) else []
    if len(kinds) != num_layers or not all(kind in ("F", "S", "full", "shared") for kind in kinds):
        raise fields.error(
            "index_topk_pattern", pattern, f"F or S for every one of the {num_layers} layers"
        )
    return [kind in ("F", "full") for kind in kinds]


def dense_part(fields: ConfigFields, hidden: int) -> MlpPart:
    """Return the dense MLP of the first layers."""
    width = fields.integer("intermediate_size")
    bias = fields.model_type == "deepseek_v2" and fields.flag("mlp_bias")
    spec = MlpSpec(kind=MlpKind.GATED, intermediate=width, activation=fields.text("hidden_act"))
    return spec, gated_mlp(hidden, width, bias=bias)


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of a latent-attention mixture of experts."""
    if fields.model_type == "kimi_k2":
        fields = ConfigFields(fields.config, "deepseek_v3", path=fields.path)
    hidden = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    sparse = sparse_layers(fields, num_layers)
    indexed = indexed_layers(fields, num_layers)
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    has_bias = fields.model_type != "deepseek_v2"

    def build_layer(key: tuple[bool, bool]) -> LayerSpec:
        is_sparse, is_indexed = key
        part = (
            deepseek_moe(fields, hidden, bias=has_bias) if is_sparse else dense_part(fields, hidden)
        )
        mixer = mla_mixer(fields, indexer=is_indexed)
        return LayerSpec(
            count=1,
            mixer=mixer,
            mlp=part[0],
            modules=(*mla_modules(mixer, hidden), *part[1], *norms),
        )

    layers, order = group_layers(list(zip(sparse, indexed, strict=True)), build_layer)
    spec = finish(
        fields, hidden=hidden, layers=layers, layer_order=order, final=(norm("norm", hidden),)
    )
    count = fields.config.get("num_nextn_predict_layers")
    if not count:
        return spec
    # the MTP layer of the DSA models always owns an indexer
    last = build_layer((True, any(indexed))).modules
    copies = fields.model_type != "glm_moe_dsa"
    count = fields.integer("num_nextn_predict_layers", least=0)
    return replace(spec, extra=mtp_block(spec, last, copies=copies, count=count))
