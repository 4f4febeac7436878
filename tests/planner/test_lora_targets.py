"""LoRA parameter counts against PEFT itself, on models built on the meta device."""

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from planner.errors import UnsupportedError, UsageError
from planner.families import model_spec_from_config
from planner.models.catalogue import catalogue_model, load_catalogue
from planner.models.lora_targets import (
    EXPERT_NAMES,
    NO_MAMBA_OUT,
    _names,
    linear_names,
    lora_counts,
)

pytest.importorskip("peft")

import peft

from profiler.meta_model import build_on_meta

D = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MOE = {**D, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
MLA = {
    **MOE,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
DELTA = {
    **MOE,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": D,
    "qwen2": D,
    "gemma2": D,
    "phi3": {**D, "pad_token_id": 0},
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_neox": {**D, "num_hidden_layers": 2},
    "falcon": {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "opt": {**D, "ffn_dim": 112, "word_embed_proj_dim": 32},
    "mixtral": {**MOE, "num_local_experts": 4},
    "minimax": {**MOE, "num_local_experts": 4},
    "minimax_m2": {**MOE, "num_local_experts": 4},
    "qwen2_moe": {**DELTA, "num_hidden_layers": 3},
    "qwen3_moe": {**MOE, "num_experts": 4, "mlp_only_layers": [0]},
    "olmoe": {**MOE, "num_experts": 4},
    "gpt_oss": {**MOE, "num_local_experts": 4},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": {**MLA, "index_n_heads": 2, "index_head_dim": 16},
    "glm4_moe": {**MLA, "num_key_value_heads": 2},
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": {**MLA, "index_n_heads": 2, "index_head_dim": 16},
    "qwen3_next": DELTA,
    "jamba": {**MOE, "num_hidden_layers": 8, "num_experts": 4},
    "qwen3_vl": {"text_config": D, "vision_config": {"depth": 2}},
    "gemma3": {
        "text_config": D,
        "vision_config": {"num_hidden_layers": 1, "vision_use_head": False},
    },
}


def ask_peft(kind: str, targets: Any, **more: Any) -> int:
    """Return PEFT's trainable parameters."""
    import torch

    model = build_on_meta({**CONFIGS[kind], "model_type": kind})
    with torch.device("meta"):
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, **more))
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def spec_of(kind: str) -> Any:
    return model_spec_from_config({**CONFIGS[kind], "model_type": kind})


@pytest.mark.parametrize("kind", CONFIGS)
def test_all_linear(kind: str) -> None:
    assert lora_counts(spec_of(kind), rank=4).trainable == ask_peft(kind, "all-linear")


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("words", ["attention", "mlp"])
def test_parts_of_the_layers(kind: str, words: str) -> None:
    spec = spec_of(kind)
    names = sorted(_names(spec, words))
    if not names:
        with pytest.raises(UsageError, match="matches no layer"):
            lora_counts(spec, words, rank=4)
        return
    assert lora_counts(spec, words, rank=4).trainable == ask_peft(kind, names)


@pytest.mark.parametrize("kind", CONFIGS)
def test_q_and_v_embeddings_and_head(kind: str) -> None:
    spec = spec_of(kind)
    have = linear_names(spec)
    names = ["q_proj", "v_proj"] if {"q_proj", "v_proj"} <= set(have) else have[:1]
    if names == have[:1] and names[0] in EXPERT_NAMES.get(kind, {}):
        names = ["o_proj"]
    assert lora_counts(spec, names, rank=4).trainable == ask_peft(kind, names)
    table = spec.embeddings[0].leaf
    for extra in (table, "lm_head"):
        wanted = [*names, extra]
        assert lora_counts(spec, wanted, rank=4).trainable == ask_peft(kind, wanted)
    saved = lora_counts(spec, names, rank=4, modules_to_save=[table, "lm_head"])
    assert saved.trainable == ask_peft(kind, names, modules_to_save=[table, "lm_head"])
    assert saved.saved_parameters == 2 * spec.vocab * spec.embeddings[0].shapes[0][1]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "qwen2_moe", "gemma3"])
def test_dora(kind: str) -> None:
    ours = lora_counts(spec_of(kind), rank=4, dora=True).trainable
    assert ours == ask_peft(kind, "all-linear", use_dora=True)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_dora_on_fused_experts_is_refused_as_peft_does(kind: str) -> None:
    with pytest.raises(UnsupportedError, match="fused experts"):
        lora_counts(spec_of(kind), rank=4, dora=True)
    with pytest.raises(ValueError, match="use_dora"):
        ask_peft(kind, "all-linear", use_dora=True)
    with pytest.raises(ValueError, match="lora_dropout"):  # planner/terms/adapters.py refuses it
        ask_peft(kind, "all-linear", lora_dropout=0.05)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_fused_experts_by_parameter(kind: str) -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    names = ["q_proj"]
    ours = lora_counts(spec_of(kind), names, rank=4, target_parameters=parameters).trainable
    assert ours == ask_peft(kind, names, target_parameters=parameters)
    assert lora_counts(spec_of(kind), names, rank=4).trainable < ours, "left out by default"


@pytest.mark.parametrize(
    "name", ["mlp.experts.gate_proj", "self_attn.q_proj", "ffn.experts.down_proj", "q_proj"]
)
def test_a_parameter_that_is_no_fused_tensor_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        UsageError, match=f"lora.target_parameters: '{name}' names no fused tensor"
    ) as caught:
        lora_counts(spec_of("qwen3_moe"), ["q_proj"], rank=4, target_parameters=[name])
    assert "mlp.experts.gate_up_proj" in (caught.value.hint or "")
    with pytest.raises(UsageError) as dense:
        lora_counts(spec_of("llama"), ["q_proj"], rank=4, target_parameters=[name])
    assert "none" in (dense.value.hint or "")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3_moe", ["down_proj"]),
        ("olmoe", ["mlp.gate.weight"]),
        ("gpt_oss", ["experts.gate_up_proj", "mlp.router.weight"]),
    ],
)
def test_parts_of_the_experts_and_routers_by_parameter(kind: str, names: list[str]) -> None:
    ours = lora_counts(spec_of(kind), ["q_proj"], rank=4, target_parameters=names).trainable
    assert ours == ask_peft(kind, ["q_proj"], target_parameters=names)


def test_gate_without_up_is_refused_as_peft_does() -> None:
    with pytest.raises(UsageError, match="up_proj without gate_proj"):
        lora_counts(spec_of("deepseek_v3"), ["up_proj", "q_b_proj"], rank=4)
    with pytest.raises(ValueError, match="gate_proj"):
        ask_peft("deepseek_v3", ["up_proj", "q_b_proj"])


@pytest.mark.parametrize("kind", sorted(NO_MAMBA_OUT))
def test_mamba_output_is_refused_as_peft_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"num_hidden_layers": 1} if kind != "nemotron_h" else {}
    monkeypatch.setitem(CONFIGS, kind, small)
    with pytest.raises(UnsupportedError, match="out_proj"):
        lora_counts(spec_of(kind), ["in_proj", "out_proj"], rank=4)
    with pytest.raises(ValueError, match="out_proj"):
        ask_peft(kind, "all-linear")
    # our all-linear is what PEFT adapts when the others are named
    rest = sorted(_names(spec_of(kind), "all-linear"))
    assert lora_counts(spec_of(kind), rank=4).trainable == ask_peft(kind, rest)


def test_names_that_match_nothing() -> None:
    llama = spec_of("llama")
    with pytest.raises(UsageError, match="matches no layer") as caught:
        lora_counts(llama, "query_key_value", rank=4)
    assert "q_proj" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="no module 'wq'"):
        lora_counts(llama, ["q_proj", "wq"], rank=4)
    with pytest.raises(UsageError, match="modules_to_save"):
        lora_counts(llama, ["q_proj"], rank=4, modules_to_save=["score"])
    with pytest.raises(UnsupportedError, match="norm"):
        lora_counts(llama, ["input_layernorm"], rank=4)


def test_figures_of_real_models() -> None:
    """Published trainable-parameter lines: Llama-3.1-8B r=16 all linears, Mistral-7B r=64 q and v."""
    assert lora_counts(catalogue_model("llama-3.1-8b"), rank=16).parameters == 41_943_040
    mistral = catalogue_model("mistral-7b-v0.1")
    assert lora_counts(mistral, "q_proj,v_proj", rank=64).parameters == 27_262_976
    one, two = (lora_counts(mistral, rank=rank).parameters for rank in (8, 16))
    assert two == 2 * one


@pytest.mark.parametrize("name", list(load_catalogue()))
def test_every_catalogue_model_has_attention_targets(name: str) -> None:
    counts = lora_counts(catalogue_model(name), "attention", rank=8)
    assert counts.parameters == sum(m.count * sum(m.tensors) for m in counts.adapted) > 0
