"""Models whose code is in their own repository, not in transformers: InternLM2 and Baichuan."""

from planner.families.blocks import embedding, gated_mlp, group_layers, linear, norm
from planner.families.decoder import finish, head_shape
from planner.families.fields import ConfigFields
from planner.models.spec import LayerSpec, MixerKind, MixerSpec, MlpKind, MlpSpec, ModelSpec


def internlm2(fields: ConfigFields) -> ModelSpec:
    """Return InternLM2: fused wqkv, w1/w3/w2 MLP, a head called output."""
    hidden = fields.integer("hidden_size")
    heads, kv_heads, head_dim = head_shape(fields, hidden)
    width, bias = fields.integer("intermediate_size"), fields.flag("bias")
    layer = LayerSpec(
        count=1,
        mixer=_mixer(heads, kv_heads, head_dim, bias=bias),
        mlp=MlpSpec(kind=MlpKind.GATED, intermediate=width, activation=fields.text("hidden_act")),
        modules=(
            linear("attention.wqkv", hidden, (heads + 2 * kv_heads) * head_dim, bias=bias),
            linear("attention.wo", heads * head_dim, hidden, bias=bias),
            linear("feed_forward.w1", hidden, width),
            linear("feed_forward.w3", hidden, width),
            linear("feed_forward.w2", width, hidden),
            norm("attention_norm", hidden),
            norm("ffn_norm", hidden),
        ),
    )
    layers, order = group_layers([0] * fields.integer("num_hidden_layers"), lambda _: layer)
    vocab = fields.integer("vocab_size")
    return finish(
        fields,
        hidden=hidden,
        layers=layers,
        layer_order=order,
        embeddings=(embedding("tok_embeddings", vocab, hidden),),
        final=(norm("norm", hidden),),
        head=linear("output", hidden, vocab),
    )


def baichuan(fields: ConfigFields) -> ModelSpec:
    """Return Baichuan: fused W_pack of full multi-head attention, gated MLP."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.divide("hidden_size", hidden, "num_attention_heads", heads)
    width = fields.integer("intermediate_size")
    layer = LayerSpec(
        count=1,
        mixer=_mixer(heads, heads, head_dim, bias=False),
        mlp=MlpSpec(kind=MlpKind.GATED, intermediate=width, activation=fields.text("hidden_act")),
        modules=(
            linear("self_attn.W_pack", hidden, 3 * hidden),
            linear("self_attn.o_proj", hidden, hidden),
            *gated_mlp(hidden, width),
            norm("input_layernorm", hidden),
            norm("post_attention_layernorm", hidden),
        ),
    )
    layers, order = group_layers([0] * fields.integer("num_hidden_layers"), lambda _: layer)
    return finish(
        fields, hidden=hidden, layers=layers, layer_order=order, final=(norm("norm", hidden),)
    )


def _mixer(heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> MixerSpec:
    return MixerSpec(
        kind=MixerKind.FULL,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        bias=bias,
    )


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of InternLM2 or Baichuan."""
    return internlm2(fields) if fields.model_type == "internlm2" else baichuan(fields)
