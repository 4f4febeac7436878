"""Every family against transformers on the meta device, module by module, to the last parameter.

Small configs vary what other configs of a family vary; {} is the class's own defaults.
"""

import os
import re
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from planner.errors import VramwiseError
from planner.families import model_spec_from_config, supported_model_types
from planner.models.catalogue import catalogue_model, load_catalogue
from planner.models.spec import ModelSpec, ModuleKind

pytest.importorskip("transformers")

from profiler.meta_model import build_on_meta, module_counts

D: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MHA = {key: value for key, value in D.items() if key != "num_key_value_heads"}
MOE = {**D, "num_experts_per_tok": 2}
MLA = {
    **MOE,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {
    **MOE,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
QMOE = {
    **DELTA,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
NEMOTRON = {
    **MOE,
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
}
SMALL: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {},
        MHA,
        {
            **D,
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        {**D, "num_key_value_heads": None, "head_dim": None},
    ],
    "mistral": [
        {},
        {**D, "sliding_window": None},
        {**MHA, "num_key_value_heads": 4, "head_dim": 8},
    ],
    "ministral": [{**D, "head_dim": 24, "layer_types": ["full_attention"] * 3}],
    "ministral3": [{}, {**D, "head_dim": 24}],
    "qwen2": [{}, {**D, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}],
    "qwen3": [
        {},
        {**D, "attention_bias": True},
        {**D, "head_dim": 24, "tie_word_embeddings": True},
    ],
    "gemma": [{}, {**D, "head_dim": 24}, {**D, "head_dim": 16, "attention_bias": True}],
    "gemma2": [{}, {**D, "head_dim": 24}, {**D, "head_dim": 16, "tie_word_embeddings": False}],
    "gemma3_text": [{}, {**D, "head_dim": 24, "sliding_window_pattern": 2}],
    "phi": [{}, D, {**MHA, "qk_layernorm": True}, {**D, "tie_word_embeddings": True}],
    "phi3": [{}, {**D, "pad_token_id": 0}, {**MHA, "pad_token_id": 0, "sliding_window": 8}],
    "starcoder2": [{}, D, {**D, "use_bias": False, "tie_word_embeddings": False}],
    "granite": [{}, {**D, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "smollm3": [{}, {**D, "use_sliding_window": True, "sliding_window": 8, "pad_token_id": 0}],
    "olmo": [{}, {**D, "attention_bias": True}],
    "olmo2": [{}, D],
    "olmo3": [{}, {**D, "attention_bias": True}],
    "glm": [{}, {**D, "head_dim": 16, "attention_bias": False, "pad_token_id": 0}],
    "glm4": [{}, {**D, "head_dim": 24, "attention_bias": True, "pad_token_id": 0}],
    "seed_oss": [{}, {**D, "head_dim": 16, "attention_bias": True, "attention_out_bias": True}],
    "stablelm": [
        {},
        {**D, "qk_layernorm": True, "use_qkv_bias": True},
        {**D, "use_parallel_residual": True},
    ],
    "mixtral": [{}, {**MOE, "num_local_experts": 4}, {**MOE, "num_experts": 3, "head_dim": 24}],
    "qwen2_moe": [
        {},
        {**QMOE, "mlp_only_layers": [1], "decoder_sparse_step": 2},
        {**QMOE, "qkv_bias": False},
    ],
    "qwen3_moe": [
        {},
        {**QMOE, "mlp_only_layers": [0]},
        {**QMOE, "decoder_sparse_step": 3, "attention_bias": True},
    ],
    "olmoe": [{}, {**MOE, "num_experts": 4, "attention_bias": True}],
    "granitemoe": [{}, {**MOE, "num_local_experts": 4}],
    "granitemoeshared": [{}, {**MOE, "num_local_experts": 4, "shared_intermediate_size": 40}],
    "gpt_oss": [
        {},
        {**MOE, "num_local_experts": 4, "head_dim": 24},
        {**MOE, "attention_bias": False},
    ],
    "glm4_moe": [
        {**MLA, "num_key_value_heads": 2, "head_dim": 24, "first_k_dense_replace": 2},
        {**MLA, "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 3},
    ],
    "minimax_m2": [{}, {**MOE, "num_local_experts": 4, "head_dim": 24}],
    "phimoe": [{}, {**MOE, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}],
    "deepseek_v2": [{}, {**MLA, "q_lora_rank": None, "mlp_bias": True, "first_k_dense_replace": 1}],
    "deepseek_v3": [
        {},
        {**MLA, "first_k_dense_replace": 1, "attention_bias": True},
        {**MLA, "first_k_dense_replace": 0, "q_lora_rank": None},
        # the old name wins where a config has both
        {**MLA, "num_local_experts": 5},
    ],
    "deepseek_v32": [
        {},
        {**MLA, "first_k_dense_replace": 2, "index_n_heads": 2, "index_head_dim": 16},
    ],
    "glm4_moe_lite": [{}, {**MLA, "mlp_layer_types": ["sparse", "dense", "sparse"]}],
    "glm_moe_dsa": [
        {},
        {
            **MLA,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "indexer_types": ["full", "shared", "full"],
        },
        {
            **MLA,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk_freq": 2,
            "num_hidden_layers": 6,
        },
    ],
    "deepseek_v4": [
        {},
        {
            **MLA,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "num_hidden_layers": 4,
            "compress_ratios": [0, 4, 128, 4],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "hc_mult": 2,
        },
    ],
    "mamba": [{}, {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "use_bias": True}],
    "falcon_mamba": [{}, {"hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}],
    "minimax": [
        {},
        {**MOE, "num_local_experts": 4, "head_dim": 24, "num_hidden_layers": 5},
        {**MOE, "num_local_experts": 4, "layer_types": ["linear_attention"] * 3},
    ],
    "mamba2": [
        {},
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ],
    "falcon_h1": [
        {},
        {**D, **MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True, "projectors_bias": True},
        {
            **D,
            **MAMBA,
            "mamba_d_ssm": 128,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "head_dim": 24,
        },
    ],
    "granitemoehybrid": [
        {},
        {**MOE, **MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4},
        {**MOE, **MAMBA, "layer_types": ["attention"] * 3, "num_local_experts": 0},
        {**MOE, **MAMBA, "mamba_d_head": "auto", "num_local_experts": 0, "mamba_proj_bias": True},
    ],
    "nemotron_h": [
        {},
        {**NEMOTRON, "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4},
        {**NEMOTRON, "hybrid_override_pattern": "MEM", "moe_latent_size": 20, "mlp_bias": True},
        {**NEMOTRON, "layers_block_type": ["mamba", "attention", "moe"], "use_bias": True},
    ],
    "jamba": [
        {},
        {
            **MOE,
            "num_hidden_layers": 9,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_proj_bias": True,
        },
    ],
    "qwen3_next": [
        {},
        {**QMOE, "mlp_only_layers": [1], "full_attention_interval": 2},
        {**QMOE, "attention_bias": True, "layer_types": ["full_attention"] * 5},
    ],
    "qwen3_5_text": [{}, DELTA, {**DELTA, "tie_word_embeddings": True, "attention_bias": True}],
    "qwen3_5_moe_text": [{}, QMOE],
    "gemma4_text": [
        {},
        {
            **D,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_hidden_layers": 8,
            "vocab_size_per_layer_input": 50,
        },
        {
            **D,
            "head_dim": 16,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        {
            **D,
            "head_dim": 16,
            "num_hidden_layers": 12,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "attention_bias": True,
        },
    ],
    "llama4_text": [
        {},
        {
            **MOE,
            "num_local_experts": 4,
            "head_dim": 24,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
        },
        {**MOE, "num_local_experts": 4, "moe_layers": [2], "attention_bias": True},
    ],
    "kimi_linear": [
        {},
        {
            **MLA,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_hidden_layers": 6,
            "pad_token_id": 0,
            "linear_attn_config": {
                "full_attn_layers": [2, 5],
                "kda_layers": [1, 3, 4, 6],
                "num_heads": 3,
                "head_dim": 16,
                "short_conv_kernel_size": 3,
            },
        },
        {**MLA, "pad_token_id": 0, "linear_num_heads": 2, "linear_head_dim": 16},
    ],
    "minimax_m3_vl_text": [
        {},
        {
            **MOE,
            "num_local_experts": 4,
            "head_dim": 16,
            "dense_intermediate_size": 80,
            "shared_intermediate_size": 24,
            "moe_layer_freq": [0, 1, 1],
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 0, 1],
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
            },
        },
    ],
    "gpt2": [
        {},
        {
            "vocab_size": 96,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 100,
            "n_positions": 32,
        },
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    ],
    "gpt_bigcode": [
        {},
        {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "multi_query": False},
    ],
    "gptj": [{}, {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}],
    "gpt_neox": [{}, {**MHA, "attention_bias": False, "tie_word_embeddings": True}],
    "opt": [
        {},
        {**MHA, "ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        {**MHA, "ffn_dim": 80, "enable_bias": False, "layer_norm_elementwise_affine": False},
    ],
    "bloom": [{}, {"vocab_size": 96, "n_embed": 64, "n_layer": 3, "n_head": 4}],
    "falcon": [
        {},
        {**MHA, "new_decoder_architecture": True, "num_kv_heads": 2},
        {**MHA, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {**MHA, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        {**MHA, "ffn_hidden_size": 100, "tie_word_embeddings": False},
    ],
    "qwen2_vl": [
        {},
        {"text_config": D, "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64}},
    ],
    "qwen2_5_vl": [
        {},
        {
            **D,
            "tie_word_embeddings": True,
            "vision_config": {"depth": 2, "hidden_size": 32, "out_hidden_size": 64},
        },
        {"text_config": {**D, "tie_word_embeddings": True}, "vision_config": {"depth": 1}},
    ],
    "qwen3_vl": [
        {},
        {
            "text_config": {**D, "tie_word_embeddings": True},
            "vision_config": {"depth": 2, "deepstack_visual_indexes": [1]},
        },
        {
            "text_config": D,
            "tie_word_embeddings": True,
            "vision_config": {"depth": 1, "patch_size": 8},
        },
    ],
    "lfm2": [
        {},
        {
            **D,
            "full_attn_idxs": [1],
            "conv_bias": True,
            "block_ff_dim": 100,
            "tie_embedding": False,
        },
        {**D, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ],
    "glm4v_moe": [
        {"text_config": {"head_dim": 128}, "vision_config": {"depth": 2, "attention_bias": True}},
    ],
    "qwen3_vl_moe": [{}, {"text_config": QMOE, "vision_config": {"depth": 2}}],
    "qwen3_5": [
        {},
        {"text_config": DELTA, "tie_word_embeddings": True, "vision_config": {"depth": 2}},
    ],
    "qwen3_5_moe": [{}, {"text_config": QMOE}],
    "gemma3": [
        {},
        {
            "text_config": {**D, "head_dim": 24},
            "vision_config": {"num_hidden_layers": 1, "image_size": 56, "patch_size": 14},
        },
    ],
    "mistral3": [
        {},
        {
            "text_config": {**D, "model_type": "mistral"},
            "multimodal_projector_bias": True,
            "tie_word_embeddings": False,
        },
        {
            "text_config": {**D, "model_type": "ministral3"},
            "vision_config": {"num_hidden_layers": 2, "model_type": "pixtral"},
        },
    ],
    "llama4": [
        {},
        {
            "text_config": {**MOE, "num_local_experts": 4, "tie_word_embeddings": True},
            "vision_config": {"num_hidden_layers": 1, "hidden_size": 32, "image_size": 56},
        },
    ],
    "mllama": [
        {},
        {
            "text_config": {**D, "pad_token_id": 0, "cross_attention_layers": [1]},
            "vision_config": {"num_hidden_layers": 1, "num_global_layers": 2},
        },
    ],
    "kimi_k25": [
        {},
        {
            "text_config": {**MLA, "model_type": "kimi_k2"},
            "vision_config": {"num_hidden_layers": 1},
        },
    ],
    "gemma4": [
        {},
        {
            "text_config": {**D, "head_dim": 16, "vocab_size_per_layer_input": 50},
            "vision_config": {"num_hidden_layers": 1, "attention_bias": True},
            "audio_config": {"num_hidden_layers": 1, "subsampling_conv_channels": [16, 8]},
        },
    ],
    "minimax_m3_vl": [{}, {"text_config": {**MOE, "num_local_experts": 4, "head_dim": 16}}],
    "llava": [
        {},
        {
            "text_config": {**D, "tie_word_embeddings": True},
            "vision_config": {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4},
            "vision_feature_layer": [-2, 1],
            "multimodal_projector_bias": False,
        },
        {
            "text_config": {**D, "model_type": "mistral"},
            "vision_config": {"num_hidden_layers": 1, "model_type": "siglip_vision_model"},
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
    ],
    "llava_next": [
        {},
        {"text_config": {**D, "model_type": "qwen2"}, "vision_config": {"num_hidden_layers": 2}},
    ],
    "llava_onevision": [
        {},
        {
            "text_config": {**D, "tie_word_embeddings": True},
            "vision_config": {"num_hidden_layers": 1, "vision_use_head": False},
        },
    ],
    "internvl": [
        {},
        {
            "text_config": {**D, "model_type": "llama"},
            "vision_config": {
                "num_hidden_layers": 2,
                "hidden_size": 48,
                "num_attention_heads": 4,
                "intermediate_size": 80,
                "attention_bias": True,
                "use_qk_norm": True,
                "norm_type": "rms_norm",
                "use_mask_token": True,
                "use_mean_pooling": False,
                "image_size": [56, 56],
            },
            "tie_word_embeddings": False,
        },
    ],
    "idefics3": [
        {"text_config": {}, "pad_token_id": 0},
        {
            "text_config": {**D, "pad_token_id": 0, "tie_word_embeddings": True},
            "vision_config": {"num_hidden_layers": 2, "patch_size": 14, "image_size": 56},
            "scale_factor": 4,
        },
    ],
    "smolvlm": [
        {
            "text_config": {**D, "pad_token_id": 0},
            "vision_config": {"num_hidden_layers": 1, "hidden_size": 48},
            "tie_word_embeddings": True,
        },
    ],
    "qwen2_audio": [
        {},
        {"text_config": D, "audio_config": {"encoder_layers": 2, "d_model": 40, "num_mel_bins": 8}},
    ],
    "voxtral": [
        {},
        {
            "text_config": {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2},
            "audio_config": {"num_hidden_layers": 1, "hidden_size": 20, "intermediate_size": 80},
        },
    ],
}
CASES = [(kind, index) for kind, configs in SMALL.items() for index in range(len(configs))]
WITHOUT_CLASS = {
    "baichuan",
    "internlm2",
    "kimi_k2",
    "kimi_k3",
    "minimax_m3",
    "RefinedWeb",
    "RefinedWebModel",
    # its tower needs the timm package
    "gemma3n",
}
NO_LANGUAGE_MODEL_CLASS = {
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "glm4v_moe_text",
    "mllama_text_model",
}


def test_every_supported_type_is_covered() -> None:
    covered = set(SMALL) | WITHOUT_CLASS | NO_LANGUAGE_MODEL_CLASS | {"gemma3n_text"}
    assert set(supported_model_types()) <= covered


@pytest.mark.parametrize(("kind", "index"), CASES)
def test_small_configs_are_exact(kind: str, index: int) -> None:
    config = {**SMALL[kind][index], "model_type": kind}
    compare(model_spec_from_config(config), build_on_meta(config))


@pytest.mark.parametrize("name", list(load_catalogue()))
def test_catalogue_models_are_exact(name: str) -> None:
    config = dict(load_catalogue()[name]["config"])
    if config["model_type"] in WITHOUT_CLASS:
        pytest.skip("transformers has no class for it")
    # JSON has no infinity: some configs spell the limit as a string
    config.pop("time_step_limit", None)
    compare(model_spec_from_config(config), build_on_meta(config))


def compare(spec: ModelSpec, model: Any) -> None:
    """Assert equal parameters in every module, and equal buffers where the spec counts them."""
    theirs: dict[str, int] = {}
    for path, count in module_counts(model).items():
        name = _plain(path)
        theirs[name] = theirs.get(name, 0) + count
    ours = _ours(spec)
    assert ours == theirs
    buffers = {name: tensor for name, tensor in model.named_buffers() if name.endswith("_bias")}
    stored = sum(tensor.numel() for name, tensor in buffers.items() if "e_score_correction" in name)
    counted = sum(
        layer.count * module.parameters
        for layer in spec.layers
        for module in layer.modules
        if module.kind is ModuleKind.BUFFER
    )
    if spec.model_type != "deepseek_v4":
        assert counted == stored
    assert spec.parameters == sum(theirs.values()) + counted


def _ours(spec: ModelSpec) -> dict[str, int]:
    counts: dict[str, int] = {}
    held = [(1, "", module) for module in (*spec.embeddings, *spec.final, *spec.towers)]
    held += [(layer.count, "layers.*.", m) for layer in spec.layers for m in layer.modules]
    for number, prefix, module in held:
        if module.kind is not ModuleKind.BUFFER:
            name = _plain(f"{prefix}{module.name}".rstrip("."))
            counts[name] = counts.get(name, 0) + number * module.parameters
    name = spec.head.name if spec.head else ""
    if name in spec.parameters_by_module:
        counts[name] = spec.parameters_by_module[name]
    return counts


def _plain(path: str) -> str:
    """Return a module path without the containers that differ from class to class."""
    path = re.sub(r"^(model|transformer|gpt_neox|backbone|language_model)\.", "", path)
    path = re.sub(r"^(language_model\.model|language_model|text_model|decoder|model)\.", "", path)
    path = re.sub(r"^h\.\*", "layers.*", path)
    # a layer list inside a tower keeps its own numbers, which we write as "*" too
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def test_unknown_architecture_says_what_it_lacks() -> None:
    with pytest.raises(VramwiseError, match=r"'rwkv9'.*lacks hidden_size, num_hidden_layers"):
        model_spec_from_config({"model_type": "rwkv9", "vocab_size": 5})


def test_falcons_first_configs() -> None:
    """The names that tiiuae/falcon-7b and -40b were published under."""
    seven = {"hidden_size": 4544, "n_head": 71, "n_layer": 32, "vocab_size": 65024}
    forty = {"hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60, "vocab_size": 65024}
    spec = model_spec_from_config({**seven, "model_type": "RefinedWebModel", "multi_query": True})
    assert spec.parameters == catalogue_model("falcon-7b").parameters
    spec = model_spec_from_config({**forty, "model_type": "RefinedWeb"})
    assert spec.parameters == catalogue_model("falcon-40b").parameters
