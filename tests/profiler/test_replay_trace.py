"""The planner's replay against the trace's own events, through the same allocator."""

from dataclasses import replace

import pytest

from planner.families import model_spec_from_config
from planner.machines.machine import Machine
from planner.models.catalogue import load_catalogue
from planner.replay.steps import replay_run
from planner.run.recipe import Recipe
from planner.run.resolve import resolve
from planner.units import GiB
from profiler.subjects.build import shorten
from profiler.subjects.from_recipe import step_options
from profiler.subjects.hf_sft import HfSft
from profiler.trace import trace

LAYERS = 4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama-3.2-1b", {"method": "lora", "checkpointing": "full"}),
        ("llama-3.2-1b", {"method": "full", "checkpointing": "full"}),
        ("qwen2.5-0.5b", {"method": "lora", "checkpointing": "none"}),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else value,
)
def test_the_replay_reserves_what_the_traces_events_reserve(family, changes):
    config = shorten(load_catalogue()[family]["config"], LAYERS)
    model = model_spec_from_config(config, name=family, source="test")
    recipe = Recipe(framework="hf-trainer", micro_batch_size=2, context=1024, **changes)
    resolved = resolve(model, recipe, Machine(vram_bytes=1024 * GiB))
    options = replace(step_options(resolved, config, steps=2), max_grad_norm=0.0)
    subject = HfSft(options)
    recording = trace(subject)
    played = replay_run(model, resolved, workspace_bytes=sum(subject.standing_bytes))
    assert played.allocated_bytes == pytest.approx(recording.peak_bytes, rel=0.02)
    assert played.reserved_bytes == pytest.approx(recording.peak_reserved_bytes, rel=0.06)
