"""The words attention, mlp and all-linear mean the same modules in plan, trace and training."""

import warnings
from typing import Any

import pytest
import torch

from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.models.lora_targets import lora_counts
from planner.run.recipe import LoraSection, Method, Recipe, Task
from planner.run.resolve import resolve
from profiler.subjects.build import build, transformers_config
from profiler.subjects.from_recipe import step_options
from trainer.adapters import add_adapters

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
EXPERTS = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "gemma2": SIZES,
    "phi3": SIZES,
    "glm4": SIZES,
    "olmo2": SIZES,
    "starcoder2": SIZES,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {k: SIZES[k] for k in SIZES if k not in ("head_dim", "num_key_value_heads")},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "gpt_oss": {**EXPERTS, "num_local_experts": 4},
    "deepseek_v3": LATENT,
    "qwen3_next": {
        **EXPERTS,
        **DELTA,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {**SIZES, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
}


def trained(model: Any) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("word", ["attention", "mlp", "all-linear"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_word_means_the_same_modules_everywhere(kind: str, word: str) -> None:
    from transformers import AutoModelForCausalLM

    config = {**CONFIGS[kind], "model_type": kind}
    spec = model_spec_from_config(config)
    try:
        planned = lora_counts(spec, word, rank=4).trainable
    except Exception as error:  # the word matches nothing here: all three say so
        planned, refused = 0, type(error)
    recipe = Recipe(
        task=Task.SFT, method=Method.LORA, dtype="fp32", lora=LoraSection(rank=4, targets=word)
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_config(transformers_config(config))
        resolved = resolve(spec, recipe, make_machine("h100"))
        if not planned:
            with pytest.raises(refused):
                add_adapters(
                    base,
                    recipe.lora,
                    dtype=torch.float32,
                    device=torch.device("cpu"),
                    seed=0,
                    alpha=None,
                )
            with pytest.raises(refused):
                step_options(resolved, config)
            return
        base.requires_grad_(False)
        ours = add_adapters(
            base, recipe.lora, dtype=torch.float32, device=torch.device("cpu"), seed=0, alpha=None
        )
        traced = build(step_options(resolved, config))
    assert planned == trained(ours) == trained(traced)


def test_attention_of_phi_3_is_its_fused_projection_and_its_output() -> None:
    # rank 4: qkv_proj 4 x (32 + 64), o_proj 4 x (32 + 32), two layers
    spec = model_spec_from_config({**SIZES, "model_type": "phi3"})
    counts = lora_counts(spec, "attention", rank=4)
    assert {module.name.rsplit(".", 1)[-1] for module in counts.adapted} == {"qkv_proj", "o_proj"}
    assert counts.trainable == 2 * (4 * 96 + 4 * 64)
