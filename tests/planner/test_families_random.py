"""Random configs of the common families against transformers, module by module.

The hand-picked configs are in test_families_exact.py; these vary every field at once.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.families import model_spec_from_config

pytest.importorskip("transformers")

from profiler.meta_model import build_on_meta


def _exact() -> ModuleType:
    """Return test_families_exact as a module, for its comparison."""
    path = Path(__file__).with_name("test_families_exact.py")
    spec = importlib.util.spec_from_file_location("families_exact", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare = _exact().compare
BOOL = st.booleans()
NARROW = st.sampled_from([8, 12, 16, 20])


@st.composite
def attention(draw: st.DrawFn) -> dict[str, Any]:
    """Return sizes whose heads divide, some keys left to the class."""
    kv_heads, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, each = kv_heads * ratio, draw(NARROW)
    config: dict[str, Any] = {
        "hidden_size": heads * each,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": draw(st.integers(1, 4)),
        "intermediate_size": draw(st.integers(1, 60)),
        "vocab_size": draw(st.integers(9, 70)),
        "head_dim": draw(NARROW),
        "pad_token_id": 0,
    }
    if draw(BOOL):
        config["tie_word_embeddings"] = draw(BOOL)
    if draw(BOOL):
        config["attention_bias"] = draw(BOOL)
    if draw(BOOL):
        config["mlp_bias"] = draw(BOOL)
    return config


@st.composite
def experts(draw: st.DrawFn) -> dict[str, Any]:
    """Return attention and a mixture of experts in the words of every family."""
    number, layers = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    return draw(attention()) | {
        "num_hidden_layers": layers,
        "num_experts": number,
        "num_experts_per_tok": draw(st.integers(1, number)),
        "moe_intermediate_size": draw(st.integers(1, 30)),
        "shared_expert_intermediate_size": draw(st.integers(1, 30)),
        "decoder_sparse_step": draw(st.integers(1, 3)),
        "mlp_only_layers": draw(st.lists(st.integers(0, 4), max_size=2)),
        "qkv_bias": draw(BOOL),
    }


@st.composite
def latent(draw: st.DrawFn) -> dict[str, Any]:
    """Return latent attention with DeepSeek's experts."""
    config = draw(experts())
    number = config.pop("num_experts")
    config.pop("head_dim")
    return config | {
        "num_key_value_heads": config["num_attention_heads"],
        "n_routed_experts": number,
        "n_shared_experts": draw(st.integers(1, 3)),
        "first_k_dense_replace": draw(st.integers(0, 5)),
        "q_lora_rank": draw(st.integers(1, 20)),
        "kv_lora_rank": draw(st.integers(1, 20)),
        "qk_nope_head_dim": draw(NARROW),
        "qk_rope_head_dim": 8,
        "v_head_dim": draw(NARROW),
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": draw(st.integers(1, 3)),
        "index_head_dim": draw(NARROW),
    }


@st.composite
def delta(draw: st.DrawFn) -> dict[str, Any]:
    """Return gated delta net layers between attention layers."""
    key_heads = draw(st.integers(1, 3))
    return draw(experts()) | {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.integers(1, 2)),
        "linear_key_head_dim": draw(NARROW),
        "linear_value_head_dim": draw(NARROW),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "full_attention_interval": draw(st.integers(1, 4)),
    }


@st.composite
def mamba(draw: st.DrawFn) -> dict[str, Any]:
    """Return attention, experts and Mamba mixers in the words of every hybrid."""
    config, layers = draw(experts()), draw(st.integers(1, 5))
    heads, each, groups = draw(st.integers(1, 3)), draw(NARROW), draw(st.integers(1, 2))
    number = config["num_experts"]
    return config | {
        "num_hidden_layers": layers,
        "mamba_d_ssm": heads * each,
        "mamba_n_heads": heads,
        "mamba_d_head": each,
        "mamba_n_groups": groups,
        "mamba_d_state": draw(st.integers(1, 9)),
        "mamba_d_conv": draw(st.integers(2, 5)),
        "mamba_rms_norm": draw(BOOL),
        "mamba_proj_bias": draw(BOOL),
        "mamba_conv_bias": draw(BOOL),
        "projectors_bias": draw(BOOL),
        "expert_layer_period": draw(st.integers(2, 3)),
        "attn_layer_period": draw(st.integers(5, 6)),
        "n_routed_experts": number,
        "moe_shared_expert_intermediate_size": draw(st.integers(1, 30)),
        "moe_latent_size": draw(st.none() | st.integers(1, 20)),
        "ssm_state_size": draw(st.integers(1, 9)),
        "mamba_num_heads": heads,
        "mamba_head_dim": each,
        "n_groups": groups,
        "use_bias": draw(BOOL),
        "n_group": 1,
        "topk_group": 1,
        "hybrid_override_pattern": draw(st.text("ME*-", min_size=layers, max_size=layers)),
    }


@st.composite
def newer(draw: st.DrawFn) -> dict[str, Any]:
    """Return what Llama 4 and Gemma 4 vary."""
    config = draw(experts())
    layers = draw(st.integers(2, 8))
    return config | {
        "num_hidden_layers": layers,
        "num_local_experts": config.pop("num_experts"),
        "intermediate_size_mlp": draw(st.integers(1, 40)),
        "interleave_moe_layer_step": draw(st.integers(1, 3)),
        "global_head_dim": draw(NARROW),
        "hidden_size_per_layer_input": draw(st.integers(0, 9)),
        "vocab_size_per_layer_input": draw(st.integers(5, 20)),
        "use_double_wide_mlp": draw(BOOL),
        "attention_k_eq_v": draw(BOOL),
        "enable_moe_block": False,
    }


def check(kind: str, config: dict[str, Any]) -> None:
    config = {**config, "model_type": kind}
    compare(model_spec_from_config(config), build_on_meta(config))


SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DENSE = [
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "glm",
    "glm4",
    "starcoder2",
]


@pytest.mark.parametrize("kind", DENSE)
@SETTINGS
@given(config=attention())
def test_dense(kind: str, config: dict[str, Any]) -> None:
    check(kind, config)


@pytest.mark.parametrize(
    "kind", ["qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "gpt_oss", "minimax_m2"]
)
@SETTINGS
@given(config=experts())
def test_experts(kind: str, config: dict[str, Any]) -> None:
    if kind in ("gpt_oss", "minimax_m2", "mixtral"):
        config["num_local_experts"] = config.pop("num_experts")
    check(kind, config)


@pytest.mark.parametrize(
    "kind", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"]
)
@SETTINGS
@given(config=latent())
def test_latent(kind: str, config: dict[str, Any]) -> None:
    check(kind, config)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@SETTINGS
@given(config=delta())
def test_delta(kind: str, config: dict[str, Any]) -> None:
    check(kind, config)


@pytest.mark.parametrize("kind", ["jamba", "falcon_h1", "nemotron_h", "granitemoehybrid"])
@SETTINGS
@given(config=mamba(), attends=st.lists(BOOL, min_size=5, max_size=5))
def test_hybrids(kind: str, config: dict[str, Any], attends: list[bool]) -> None:
    if kind == "granitemoehybrid":
        config["hidden_size"] = config["mamba_n_heads"] * config["mamba_d_head"] * 2
        config |= {"mamba_d_head": "auto", "num_attention_heads": 2, "num_key_value_heads": 1}
        config["num_local_experts"] = config.pop("num_experts")
        names = {True: "attention", False: "mamba"}
        config["layer_types"] = [names[a] for a in attends[: config["num_hidden_layers"]]]
    check(kind, config)


@pytest.mark.parametrize("kind", ["llama4_text", "gemma4_text"])
@SETTINGS
@given(config=newer())
def test_newer(kind: str, config: dict[str, Any]) -> None:
    check(kind, config)
