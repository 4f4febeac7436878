"""Plan against trace for delta nets, whose kernels a trace states: every total within 3 %."""

from typing import Any

import pytest

from profiler.compare import compare
from tests.planner.test_hand_delta import HEADS, SMALL
from tests.profiler.test_trace_eager import both, wrong

DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}
WIDE = {**SMALL, "hidden_size": 256, "vocab_size": 2048, "max_position_embeddings": 4096}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **WIDE, **HEADS, **DELTA, **EXPERTS, "model_type": "qwen3_next", "intermediate_size": 512,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 128,
    },
    "qwen3_5_text": {
        **WIDE, **HEADS, **DELTA, "model_type": "qwen3_5_text", "intermediate_size": 512,
        "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    },
    "kimi_linear": {
        **WIDE, **EXPERTS, "model_type": "kimi_linear", "pad_token_id": 0, "num_attention_heads": 4, "linear_num_heads": 4,
        "linear_head_dim": 64, "linear_conv_kernel_dim": 4, "kv_lora_rank": 64, "q_lora_rank": None,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 512,
        "num_local_experts": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "checkpointing": "full"},
    "lora": {"checkpointing": "none", "framework": "hf-trainer", "mixed_precision": "bf16",
             "lora": {"targets": "attention"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_5_text", "lora"),
        *(
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind in CONFIGS
            for name in SETTINGS
            if (kind, name) != ("qwen3_5_text", "lora")
        ),
    ],
)
def test_every_phase_agrees(kind: str, name: str) -> None:
    assert wrong(compare(*both(CONFIGS[kind], **SETTINGS[name])), within=0.03) == []
