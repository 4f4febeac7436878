"""Dense decoders: Llama, Mistral, Qwen, Gemma, Phi, Granite, OLMo, SmolLM3, StarCoder2, GLM-4."""

from dataclasses import replace

from planner.families import windows
from planner.families.decoder import LLAMA, Traits, build_decoder
from planner.families.fields import ConfigFields
from planner.models.spec import ModelSpec

MISTRAL = Traits(masks=windows.window_everywhere)
QWEN2 = Traits(qkv_bias=True, masks=windows.window_after)
QWEN3 = Traits(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="head",
    masks=windows.window_after,
)
GEMMA = Traits(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norm="rmsnorm_gemma",
    scaled_embedding=True,
)
GEMMA2 = replace(
    GEMMA,
    masks=windows.window_even,
    activation="hidden_activation",
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)
GEMMA3 = replace(GEMMA2, masks=windows.window_pattern, qk_norm="head")
OLMO = Traits(qkv_bias="attention_bias", out_bias="attention_bias", norm="bare")
OLMO2 = Traits(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norm="rmsnorm_gemma",  # scales in fp32, then casts, as Gemma does
    qk_norm="full",
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
GLM = Traits(qkv_bias="attention_bias", mlp="fused")

TRAITS = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral3": MISTRAL,
    "ministral": Traits(masks=windows.window_everywhere_or_types),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2_vl_text": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen3_vl_text": replace(QWEN3, masks=windows.full_everywhere),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "phi": Traits(
        qkv_bias=True,
        out_bias=True,
        out_name="dense",
        qk_norm="qk_layernorm",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        mlp="fc1 fc2",
        mlp_bias=True,
        norms=("input_layernorm",),
        norm="layernorm",
        final_norm="final_layernorm",
        head_bias=True,
        parallel=True,
    ),
    "phi3": Traits(fused_qkv=True, mlp="fused", masks=windows.window_everywhere),
    "starcoder2": Traits(
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp="c_fc c_proj",
        mlp_bias="use_bias",
        norm="layernorm",
        masks=windows.window_everywhere,
    ),
    "granite": LLAMA,
    "smollm3": replace(LLAMA, masks=windows.window_without_rope),
    "olmo": OLMO,
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, masks=windows.window_three_of_four),
    "glm": GLM,
    "glm4": replace(
        GLM,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "seed_oss": replace(LLAMA, out_bias="attention_out_bias"),
}


DROPOUTS = {
    "starcoder2": ("residual_dropout", "embedding_dropout"),
    "phi": ("resid_pdrop", "embd_pdrop"),
}
"""Dense families whose blocks and embeddings drop out: the config's fields."""


def build(fields: ConfigFields) -> ModelSpec:
    """Return the ModelSpec of a dense decoder."""
    traits = TRAITS[fields.model_type]
    spec = build_decoder(fields, traits)
    if fields.model_type == "granite":
        return replace(
            spec,
            logit_scale=fields.number("logits_scaling"),
            embedding_scale_copy=fields.number("embedding_multiplier") != 1.0,
        )
    if fields.model_type in DROPOUTS:
        residual, embedding = DROPOUTS[fields.model_type]
        return replace(
            spec,
            hidden_dropout=fields.number(residual, 0.0),
            embedding_dropout=fields.number(embedding, 0.0),
        )
    return spec
