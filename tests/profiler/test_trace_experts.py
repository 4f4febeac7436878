"""Plan against trace for mixtures of experts: every total within 1 %, small shapes of each family."""

from typing import Any

import pytest

from planner.models.catalogue import load_catalogue
from profiler.compare import compare
from profiler.subjects.build import shorten
from tests.profiler.test_trace_eager import both, wrong

FAMILIES = (
    "qwen3-30b-a3b",
    "olmoe-1b-7b",
    "gpt-oss-20b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "glm-4.5-air",
    "minimax-m2.5",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"framework": "hf-trainer", "mixed_precision": "bf16", "checkpointing": "none"},
    {"framework": "hf-trainer", "method": "full", "checkpointing": "full"},
    {"framework": "peft-loop", "checkpointing": "full"},
)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=("lora", "full", "loop"))
@pytest.mark.parametrize("name", FAMILIES)
def test_every_phase_agrees(name: str, settings: dict[str, Any]) -> None:
    config = shorten(load_catalogue()[name]["config"], 2)
    assert wrong(compare(*both(config, **settings))) == []


def test_gpt_oss_runs_in_eager_attention_and_says_so() -> None:
    """Its sinks, clamped gate and biases, small; the trace's transformers has no SDPA for it either."""
    config = shorten(load_catalogue()["gpt-oss-20b"]["config"], 2)
    small = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "vocab_size": 2048,
    }
    found = both({**config, **small}, attention="sdpa", checkpointing="none")
    assert wrong(compare(*found)) == []
    assert any("eager" in note for note in found[0].assumptions)


SMALL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"experts_implementation": "eager", "checkpointing": "none"},
        pytest.param({"experts_implementation": "batched_mm"}, marks=pytest.mark.slow),
        pytest.param({"experts_implementation": "eager", "method": "full"}, marks=pytest.mark.slow),
        pytest.param({"lora": {"targets": ("q_proj",), "target_parameters": ("mlp.experts.down_proj",)}}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_implementation_agrees(fields: dict[str, Any]) -> None:
    usual = {"checkpointing": "full", "lora": {"targets": "attention"}}
    assert wrong(compare(*both(SMALL, **{**usual, **fields})), within=0.03) == []
