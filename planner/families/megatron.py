"""Models that Megatron-LM's arguments describe -> ModelSpec: GPT and BERT as core/models build them."""

from dataclasses import replace
from typing import Any

from planner.errors import UnsupportedError
from planner.families.blocks import embedding, experts, group_layers, linear, norm, parameter
from planner.models.spec import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleSpec,
)

GPT2_VOCABULARY = 50257
"""GPT2BPETokenizer, the test cases' own where they name none."""
BERT_VOCABULARY = 30522
"""bert-large-uncased's, which BertWordPieceLowerCase reads."""
SWIGLU_MULTIPLE = 64
"""training/arguments.py: ffn_hidden_size = int((4 * hidden_size * 2 / 3) / 64) * 64 with swiglu."""
DROPOUT = 0.1
"""training/arguments.py: hidden_dropout and attention_dropout."""
Settings = dict[str, Any]


def gpt_model(name: str, settings: Settings, positions: int) -> ModelSpec:
    """Return the model of a test case's arguments; raises UnsupportedError for what is no GPT of attention.

    `positions`: rows of the table of learned positions.
    """
    for key in (
        "multi-latent-attention",
        "mtp-num-layers",
        "hybrid-override-pattern",
        "is-hybrid-model",
    ):
        if settings.get(key):
            raise UnsupportedError(f"Megatron-LM's {key} is not mapped")
    hidden, heads = int(settings["hidden-size"]), int(settings["num-attention-heads"])
    learned = settings.get("position-embedding-type", "learned_absolute") == "learned_absolute"
    layers, order = group_layers(
        [0] * int(settings["num-layers"]), lambda _: _layer(settings, hidden, heads)
    )
    vocab = int(settings.get("vocab-size", GPT2_VOCABULARY))
    tables = [embedding("embed_tokens", vocab, hidden)]
    tables += [embedding("position_embeddings", positions, hidden)] if learned else []
    dropout = float(settings.get("hidden-dropout", DROPOUT))
    return ModelSpec(
        name=name,
        model_type="gpt2" if learned else "megatron_gpt",
        hidden=hidden,
        vocab=vocab,
        tied=not settings.get("untie-embeddings-and-output-weights"),
        max_position=positions,
        layers=layers,
        layer_order=order,
        embeddings=tuple(tables),
        final=(_norm("final_layernorm", hidden, settings),),
        head=linear("lm_head", hidden, vocab),
        norm="rmsnorm" if settings.get("normalization") == "RMSNorm" else "layernorm",
        attention_dropout=float(settings.get("attention-dropout", DROPOUT)),
        hidden_dropout=dropout,
        embedding_dropout=dropout,
        source="Megatron-LM arguments",
    )


def bert_model(name: str, settings: Settings, positions: int) -> ModelSpec:
    """Return BERT as core/models/bert builds it: token types, a pooler, two heads, the vocabulary's tied."""
    words = {"vocab-size": BERT_VOCABULARY, **settings}
    model = gpt_model(name, words, positions)
    hidden = model.hidden
    return replace(
        model,
        embeddings=(*model.embeddings, embedding("tokentype_embeddings", 2, hidden)),
        final=(
            *model.final,
            linear("lm_head.dense", hidden, hidden, bias=True),
            _norm("lm_head.layer_norm", hidden, settings),
            linear("pooler.dense", hidden, hidden, bias=True),
            linear("binary_head", hidden, 2, bias=True),
        ),
        head=linear("lm_head", hidden, model.vocab, bias=True),
    )


def _norm(name: str, width: int, settings: Settings) -> ModuleSpec:
    return norm(name, width, bias=settings.get("normalization") != "RMSNorm")


def _layer(settings: Settings, hidden: int, heads: int) -> LayerSpec:
    width = int(settings.get("kv-channels", hidden // heads))
    groups = int(settings.get("num-query-groups", heads))
    bias = not settings.get("disable-bias-linear")
    together = heads * width + 2 * groups * width
    mlp, inside = _mlp(settings, hidden, bias=bias)
    return LayerSpec(
        count=1,
        mixer=MixerSpec(
            kind=MixerKind.FULL,
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=width,
            v_head_dim=width,
            qk_norm=bool(settings.get("qk-layernorm")),
        ),
        mlp=mlp,
        modules=(
            linear("self_attn.qkv_proj", hidden, together, bias=bias),
            linear("self_attn.o_proj", heads * width, hidden, bias=bias),
            *inside,
            _norm("input_layernorm", hidden, settings),
            _norm("pre_mlp_layernorm", hidden, settings),
        ),
    )


def _mlp(settings: Settings, hidden: int, *, bias: bool) -> tuple[MlpSpec, tuple[ModuleSpec, ...]]:
    gated = bool(settings.get("swiglu"))
    inner = int(settings.get("ffn-hidden-size", 4 * hidden))
    if gated and "ffn-hidden-size" not in settings:
        inner = 8 * hidden // 3 // SWIGLU_MULTIPLE * SWIGLU_MULTIPLE
    into = (2 if gated else 1) * inner
    activation = "silu" if gated else "gelu"
    count = int(settings.get("num-experts", 0))
    if not count:
        kind = MlpKind.GATED if gated else MlpKind.PLAIN
        return MlpSpec(kind=kind, intermediate=inner, activation=activation, fused_gate_up=gated), (
            linear("mlp.up_proj", hidden, into, bias=bias),
            linear("mlp.down_proj", inner, hidden, bias=bias),
        )
    inner = int(settings.get("moe-ffn-hidden-size", inner))
    shared = int(settings.get("moe-shared-expert-intermediate-size", 0))
    into = (2 if gated else 1) * inner
    biases = [(count, into), (count, hidden)] if bias else []
    modules = [
        experts("mlp.experts", (count, into, hidden), (count, hidden, inner), *biases),
        parameter("mlp.router", (count, hidden)),
    ]
    if shared:
        modules += [
            linear("mlp.shared_experts.up_proj", hidden, (2 if gated else 1) * shared),
            linear("mlp.shared_experts.down_proj", shared, hidden),
        ]
    spec = MlpSpec(
        kind=MlpKind.MOE,
        intermediate=inner,
        activation=activation,
        num_experts=count,
        top_k=int(settings.get("moe-router-topk", 2)),
        shared_intermediate=shared,
        expert_gated=gated,
        fused_gate_up=gated,
    )
    return spec, tuple(modules)
