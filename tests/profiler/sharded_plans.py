"""Runs whose plan is put beside the trace of a rank: recipe and config by name."""

from typing import Any

from planner.families import model_spec_from_config
from planner.machines.machine import make_machine
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe
from profiler.compare import Comparison, compare
from profiler.trace import trace
from trainer.dry_run import subject_for

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GEMMA = LLAMA | {"model_type": "gemma2", "head_dim": 64, "tie_word_embeddings": True}
MOE = LLAMA | {
    "model_type": "qwen2_moe",
    "num_key_value_heads": 8,
    "moe_intermediate_size": 352,
    "shared_expert_intermediate_size": 704,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
CONFIGS = {"llama": LLAMA, "gemma2": GEMMA, "qwen2-moe": MOE}


def planned(family: str, ranks: int, **fields: Any) -> Plan:
    """Return the plan of one of `ranks` under fsdp2."""
    spec = model_spec_from_config(CONFIGS[family], name=family)
    return plan(spec, _recipe(**fields), make_machine("h100", gpus=ranks))


def beside(family: str, ranks: int, **fields: Any) -> Comparison:
    """Return plan and trace of one of `ranks` under fsdp2."""
    result = planned(family, ranks, **fields)
    recipe = _recipe(**fields)
    step = subject_for(result.resolved, recipe, CONFIGS[family], gpu=result.machine.gpu)
    return compare(result, trace(step))


def _recipe(**fields: Any) -> Any:
    settled = {
        "framework": "hf-trainer",
        "checkpointing": "full",
        "context": 1024,
        "micro_batch_size": 1,
        **fields,
    }
    return make_recipe(task="sft", sharding="fsdp2", **settled)
