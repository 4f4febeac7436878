"""Plan against trace where scores, masks and outputs are whole: eager attention, padded rows, plain loops.

Every phase within 1 %: a small Llama with grouped keys, two steps with the optimizer's states made.
"""

from dataclasses import replace
from typing import Any

import pytest

from planner.families import model_spec_from_config
from planner.machines.machine import Machine
from planner.models.catalogue import load_catalogue
from planner.plan import Plan, plan
from planner.run.runfile import make_recipe
from planner.units import GiB
from profiler.compare import Comparison, compare
from profiler.recording import Recording
from profiler.subjects.build import shorten
from profiler.subjects.from_recipe import step_options
from profiler.subjects.hf_sft import HfSft
from profiler.trace import trace

WITHIN = 0.01
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}


def both(config: dict[str, Any], **fields: Any) -> tuple[Plan, Recording]:
    """Return plan and trace of one recipe, 1,024 tokens a micro-batch."""
    usual = {"method": "lora", "framework": "peft-loop", "dtype": "bf16", "mixed_precision": "none"}
    fields = {**usual, "optimizer": "adamw", **fields}
    fields["context"] = 1024 // fields.setdefault("micro_batch_size", 1)
    planned = plan(
        model_spec_from_config(config), make_recipe(**fields), Machine(vram_bytes=1024 * GiB)
    )
    options = step_options(planned.resolved, config, steps=2)
    return planned, trace(HfSft(replace(options, warm_optimizer=True)))


def wrong(found: Comparison, *, within: float = WITHIN) -> list[str]:
    """Return the totals that are off; loading is compared elsewhere."""
    cells = [cell for cell in (*found.totals, found.peak) if cell.phase != "load"]
    return [
        f"{cell.phase}: planned {cell.planned_bytes} traced {cell.measured_bytes}"
        for cell in cells
        if cell.error is None or abs(cell.error) > within
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"attention": "eager", "dtype": "fp16", "micro_batch_size": 2, "checkpointing": "full"},
        {"attention": "eager", "checkpointing": "none"},
        {"attention": "eager", "method": "full", "micro_batch_size": 2, "checkpointing": "none"},
        {"attention": "eager", "dtype": "fp32", "mixed_precision": "bf16", "checkpointing": "none"},
        {"attention": "eager", "method": "qlora", "micro_batch_size": 2, "checkpointing": "none"},
        {
            "attention": "eager",
            "method": "qlora",
            "mixed_precision": "bf16",
            "framework": "hf-trainer",
            "checkpointing": "full",
        },
        {"attention": "sdpa", "method": "qlora", "dtype": "fp16", "checkpointing": "full"},
        {"attention": "sdpa", "micro_batch_size": 2, "checkpointing": "full"},
        {
            "attention": "sdpa",
            "framework": "hf-trainer",
            "mixed_precision": "bf16",
            "micro_batch_size": 2,
            "checkpointing": "none",
        },
        {
            "attention": "sdpa",
            "framework": "peft-loop==4.55",
            "method": "full",
            "checkpointing": "full",
        },
        {
            "attention": "sdpa",
            "framework": "hf-trainer==4.53",
            "method": "full",
            "checkpointing": "none",
        },
        {
            "attention": "sdpa",
            "framework": "peft-loop==4.52",
            "method": "full",
            "checkpointing": "full",
        },
    ],
    ids=lambda fields: "-".join(str(value) for value in fields.values()),
)
def test_every_phase_agrees(fields: dict[str, Any]) -> None:
    assert wrong(compare(*both(SMALL, **fields))) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "qwen3-0.6b", "mistral-7b-v0.1", "gemma-2-2b", "phi-3-mini-4k"]
)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_real_models_agree_in_eager_attention(name: str, method: str) -> None:
    config = shorten(load_catalogue()[name]["config"], 2)
    found = both(config, method=method, attention="eager", checkpointing="full", micro_batch_size=2)
    assert wrong(compare(*found)) == []


def test_transformers_before_454_hands_sdpa_repeated_keys_and_values() -> None:
    """Without a mask, of 8 query heads with 2 key heads 32 wide: 2 layers x 2 tensors x 1,024 tokens x 6 heads more."""
    fields = {"attention": "sdpa", "method": "full", "checkpointing": "none"}
    (old, traced), (new, _) = (
        both(SMALL, framework=f"hf-trainer=={version}", **fields) for version in ("4.53", "4.54")
    )
    more = old.phase("loss").total_bytes - new.phase("loss").total_bytes
    assert more == 2 * 2 * 1024 * 6 * 32 * 2
    assert wrong(compare(new, traced)) != []  # the two are further apart than what a trace may miss


def test_a_sliding_window_brings_a_mask_of_its_own() -> None:
    """SDPA's causal flag cannot say a window; one mask for the windowed layers, none for the others."""
    config = {**SMALL, "model_type": "mistral", "sliding_window": 256}
    found = both(config, attention="sdpa", checkpointing="none")
    assert wrong(compare(*found)) == []
    wide = both({**config, "sliding_window": 2048}, attention="sdpa", checkpointing="none")
    assert wide[0].phase("forward").total_bytes < found[0].phase("forward").total_bytes
