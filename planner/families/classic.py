"""Older decoders: GPT-2, GPT-J, GPT-NeoX, OPT, BLOOM, Falcon, StarCoder (GPTBigCode), StableLM."""

from planner.families.blocks import embedding, gated_mlp, group_layers, linear, norm
from planner.families.decoder import finish, head_shape
from planner.families.fields import ConfigFields
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


def _conv1d(name: str, in_features: int, out_features: int) -> ModuleSpec:
    """Return transformers' Conv1D: weight [in, out] and bias [out]."""
    shapes = ((in_features, out_features), (out_features,))
    return ModuleSpec(name=name, kind=ModuleKind.CONV1D, shapes=shapes)


def _layer_norm(name: str, width: int) -> ModuleSpec:
    return norm(name, width, bias=True)


def _mixer(heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> MixerSpec:
    return MixerSpec(
        kind=MixerKind.FULL,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        bias=bias,
    )


def _plain(fields: ConfigFields, width: int, activation: str = "activation_function") -> MlpSpec:
    return MlpSpec(kind=MlpKind.PLAIN, intermediate=width, activation=fields.text(activation))


def _same_layers(
    fields: ConfigFields, layer: LayerSpec
) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
    return group_layers([0] * fields.integer("num_hidden_layers"), lambda _: layer)


def _heads(fields: ConfigFields, hidden: int) -> tuple[int, int]:
    heads = fields.integer("num_attention_heads")
    return heads, fields.divide("hidden_size", hidden, "num_attention_heads", heads)


def gpt2(fields: ConfigFields) -> ModelSpec:
    """Return GPT-2 or GPTBigCode (multi-query, nn.Linear instead of Conv1D)."""
    hidden = fields.integer("n_embd")
    heads, head_dim = _heads(fields, hidden)
    inner = fields.optional("n_inner") or 4 * hidden
    positions = fields.integer("n_positions")
    if fields.model_type == "gpt2":
        kv_heads = heads
        modules: tuple[ModuleSpec, ...] = (
            _conv1d("attn.c_attn", hidden, 3 * hidden),
            _conv1d("attn.c_proj", hidden, hidden),
            _conv1d("mlp.c_fc", hidden, inner),
            _conv1d("mlp.c_proj", inner, hidden),
        )
    else:
        kv_heads = 1 if fields.flag("multi_query") else heads
        modules = (
            linear("attn.c_attn", hidden, hidden + 2 * kv_heads * head_dim, bias=True),
            linear("attn.c_proj", hidden, hidden, bias=True),
            linear("mlp.c_fc", hidden, inner, bias=True),
            linear("mlp.c_proj", inner, hidden, bias=True),
        )
    layer = LayerSpec(
        count=1,
        mixer=_mixer(heads, kv_heads, head_dim, bias=True),
        mlp=_plain(fields, inner),
        modules=(*modules, _layer_norm("ln_1", hidden), _layer_norm("ln_2", hidden)),
    )
    layers, order = _same_layers(fields, layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        embeddings=(
            embedding("wte", fields.integer("vocab_size"), hidden),
            embedding("wpe", positions, hidden),
        ),
        final=(_layer_norm("ln_f", hidden),),
        norm="layernorm",
        max_position=positions,
        attention_dropout=fields.number("attn_pdrop"),
        hidden_dropout=fields.number("resid_pdrop"),
        embedding_dropout=fields.number("embd_pdrop"),
    )


def gptj(fields: ConfigFields) -> ModelSpec:
    """Return GPT-J: one norm, attention and MLP in parallel, a head with bias."""
    hidden = fields.integer("n_embd")
    heads, head_dim = _heads(fields, hidden)
    inner = fields.optional("n_inner") or 4 * hidden
    layer = LayerSpec(
        count=1,
        mixer=_mixer(heads, heads, head_dim, bias=False),
        mlp=_plain(fields, inner),
        modules=(
            *(linear(f"attn.{name}_proj", hidden, hidden) for name in ("k", "v", "q", "out")),
            linear("mlp.fc_in", hidden, inner, bias=True),
            linear("mlp.fc_out", inner, hidden, bias=True),
            _layer_norm("ln_1", hidden),
        ),
        num_norms=1,
        parallel=True,
    )
    layers, order = _same_layers(fields, layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        embed_name="wte",
        final=(_layer_norm("ln_f", hidden),),
        head_bias=True,
        norm="layernorm",
        max_position=fields.integer("n_positions"),
        attention_dropout=fields.number("attn_pdrop"),
        hidden_dropout=fields.number("resid_pdrop"),
    )


def gpt_neox(fields: ConfigFields) -> ModelSpec:
    """Return GPT-NeoX (Pythia): fused qkv, two norms, parallel residual by a flag."""
    hidden = fields.integer("hidden_size")
    heads, head_dim = _heads(fields, hidden)
    inner, bias = fields.integer("intermediate_size"), fields.flag("attention_bias")
    layer = LayerSpec(
        count=1,
        mixer=_mixer(heads, heads, head_dim, bias=bias),
        mlp=_plain(fields, inner, "hidden_act"),
        modules=(
            linear("attention.query_key_value", hidden, 3 * hidden, bias=bias),
            linear("attention.dense", hidden, hidden, bias=bias),
            linear("mlp.dense_h_to_4h", hidden, inner, bias=True),
            linear("mlp.dense_4h_to_h", inner, hidden, bias=True),
            _layer_norm("input_layernorm", hidden),
            _layer_norm("post_attention_layernorm", hidden),
        ),
        parallel=fields.flag("use_parallel_residual"),
    )
    layers, order = _same_layers(fields, layer)
    vocab = fields.integer("vocab_size")
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        embed_name="embed_in",
        final=(_layer_norm("final_layer_norm", hidden),),
        head=linear("lm_head", hidden, vocab),
        norm="layernorm",
        hidden_dropout=fields.number("hidden_dropout"),
    )


def opt(fields: ConfigFields) -> ModelSpec:
    """Return OPT: learned positions with two spare rows, narrower embeddings for OPT-350m."""
    hidden = fields.integer("hidden_size")
    heads, head_dim = _heads(fields, hidden)
    inner, bias = fields.integer("ffn_dim"), fields.flag("enable_bias")
    width = fields.optional("word_embed_proj_dim") or hidden
    affine = fields.flag("layer_norm_elementwise_affine")
    norms = (_layer_norm("self_attn_layer_norm", hidden), _layer_norm("final_layer_norm", hidden))
    layer = LayerSpec(
        count=1,
        mixer=_mixer(heads, heads, head_dim, bias=bias),
        mlp=_plain(fields, inner),
        modules=(
            *(
                linear(f"self_attn.{name}_proj", hidden, hidden, bias=bias)
                for name in ("k", "v", "q", "out")
            ),
            linear("fc1", hidden, inner, bias=bias),
            linear("fc2", inner, hidden, bias=bias),
            *(norms if affine else ()),
        ),
    )
    layers, order = _same_layers(fields, layer)
    vocab, positions = fields.integer("vocab_size"), fields.integer("max_position_embeddings")
    embeddings: tuple[ModuleSpec, ...] = (
        embedding("embed_tokens", vocab, width),
        embedding("embed_positions", positions + 2, hidden),
    )
    final: tuple[ModuleSpec, ...] = ()
    has_final = fields.flag("do_layer_norm_before") and not fields.flag(
        "_remove_final_layer_norm", False
    )
    if has_final and affine:
        final = (_layer_norm("final_layer_norm", hidden),)
    if width != hidden:
        embeddings += (linear("project_in", width, hidden),)
        final += (linear("project_out", hidden, width),)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        embeddings=embeddings,
        final=final,
        head=linear("lm_head", width, vocab),
        norm="layernorm",
        hidden_dropout=fields.number("dropout"),
    )


def bloom(fields: ConfigFields) -> ModelSpec:
    """Return BLOOM: ALiBi, a norm over the embeddings, MLP of four times the width."""
    hidden = fields.integer("n_embed", fields.raw("hidden_size"))
    heads, head_dim = _heads(fields, hidden)
    layer = LayerSpec(
        count=1,
        mixer=_mixer(heads, heads, head_dim, bias=True),
        mlp=MlpSpec(kind=MlpKind.PLAIN, intermediate=4 * hidden, activation="gelu"),
        modules=(
            linear("self_attention.query_key_value", hidden, 3 * hidden, bias=True),
            linear("self_attention.dense", hidden, hidden, bias=True),
            linear("mlp.dense_h_to_4h", hidden, 4 * hidden, bias=True),
            linear("mlp.dense_4h_to_h", 4 * hidden, hidden, bias=True),
            _layer_norm("input_layernorm", hidden),
            _layer_norm("post_attention_layernorm", hidden),
        ),
    )
    layers, order = _same_layers(fields, layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        embeddings=(
            embedding("word_embeddings", fields.integer("vocab_size"), hidden),
            _layer_norm("word_embeddings_layernorm", hidden),
        ),
        final=(_layer_norm("ln_f", hidden),),
        norm="layernorm",
        max_position=fields.integer("seq_length", 2048),
        hidden_dropout=fields.number("hidden_dropout"),
    )


def _renamed(fields: ConfigFields) -> ConfigFields:
    """Return the fields of Falcon's first configs (RefinedWeb...) under today's names."""
    config = dict(fields.config)
    for old, new in (
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_head_kv", "num_kv_heads"),
    ):
        if old in config:
            config.setdefault(new, config[old])
    if "n_head_kv" in config:
        config.setdefault("new_decoder_architecture", True)
    return ConfigFields(config, "falcon", path=fields.path)


def falcon(fields: ConfigFields) -> ModelSpec:
    """Return Falcon: 7B (multi-query), 40B (grouped, new_decoder_architecture) and RW (full)."""
    fields = _renamed(fields)
    hidden = fields.integer("n_embed", fields.raw("hidden_size"))
    heads, head_dim = _heads(fields, hidden)
    new = bool(fields.raw("new_decoder_architecture"))
    parallel = bool(fields.raw("parallel_attn"))
    given = fields.optional("num_kv_heads") or heads
    multi_query = bool(fields.raw("multi_query")) and not new
    kv_heads = 1 if multi_query else given if new else heads
    fields.divide("num_attention_heads", heads, "num_kv_heads", kv_heads)
    inner = fields.optional("ffn_hidden_size") or 4 * hidden
    bias = fields.flag("bias")
    count = fields.optional("num_ln_in_parallel_attn") or (2 if new else 1)
    names: tuple[str, ...]
    if not parallel:
        names = ("post_attention_layernorm", "input_layernorm")
    else:
        names = ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)
    layer = LayerSpec(
        count=1,
        mixer=_mixer(heads, kv_heads, head_dim, bias=bias),
        mlp=_plain(fields, inner, "activation"),
        modules=(
            linear(
                "self_attention.query_key_value",
                hidden,
                (heads + 2 * kv_heads) * head_dim,
                bias=bias,
            ),
            linear("self_attention.dense", hidden, hidden, bias=bias),
            linear("mlp.dense_h_to_4h", hidden, inner, bias=bias),
            linear("mlp.dense_4h_to_h", inner, hidden, bias=bias),
            *(_layer_norm(name, hidden) for name in names),
        ),
        num_norms=len(names),
        parallel=parallel or new,
    )
    layers, order = _same_layers(fields, layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        embed_name="word_embeddings",
        final=(_layer_norm("ln_f", hidden),),
        norm="layernorm",
        hidden_dropout=fields.number("hidden_dropout"),
    )


def stablelm(fields: ConfigFields) -> ModelSpec:
    """Return StableLM: gated MLP, layer norms, optional per-head query and key norms."""
    hidden = fields.integer("hidden_size")
    heads, kv_heads, _ = head_shape(fields, hidden)
    head_dim = fields.divide("hidden_size", hidden, "num_attention_heads", heads)
    bias, qk_norm = fields.flag("use_qkv_bias"), fields.flag("qk_layernorm")
    parallel = fields.flag("use_parallel_residual")
    width = fields.integer("intermediate_size")
    modules: tuple[ModuleSpec, ...] = (
        linear("self_attn.q_proj", hidden, heads * head_dim, bias=bias),
        linear("self_attn.k_proj", hidden, kv_heads * head_dim, bias=bias),
        linear("self_attn.v_proj", hidden, kv_heads * head_dim, bias=bias),
        linear("self_attn.o_proj", hidden, hidden),
        *gated_mlp(hidden, width),
        _layer_norm("input_layernorm", hidden),
    )
    if qk_norm:
        modules += (
            norm("self_attn.q_layernorm.norms.*", head_dim, count=heads),
            norm("self_attn.k_layernorm.norms.*", head_dim, count=kv_heads),
        )
    if not parallel:
        modules += (_layer_norm("post_attention_layernorm", hidden),)
    layer = LayerSpec(
        count=1,
        mixer=_mixer(heads, kv_heads, head_dim, bias=bias),
        mlp=MlpSpec(kind=MlpKind.GATED, intermediate=width, activation=fields.text("hidden_act")),
        modules=modules,
        num_norms=1 if parallel else 2,
        parallel=parallel,
    )
    layers, order = _same_layers(fields, layer)
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        final=(_layer_norm("norm", hidden),),
        norm="layernorm",
        hidden_dropout=fields.number("hidden_dropout"),
    )


_BUILDERS = {
    "gpt2": gpt2,
    "gpt_bigcode": gpt2,
    "gptj": gptj,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "bloom": bloom,
    "falcon": falcon,
    "RefinedWebModel": falcon,
    "RefinedWeb": falcon,
    "stablelm": stablelm,
}


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of an older decoder."""
    return _BUILDERS[fields.model_type](fields)
