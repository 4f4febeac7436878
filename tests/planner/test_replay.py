"""The replay of a run: hand-worked cases, and agreement with the plan's own tensors."""

import pytest

from planner.allocator.caching import CachingAllocator
from planner.layer.events import forward_events, kept_events, recomputed_events, reentrant_events
from planner.layer.tape import FREED
from planner.machines.machine import make_machine
from planner.models.hub import find_model
from planner.plan import plan
from planner.replay.head import in_order
from planner.replay.player import Player
from planner.replay.steps import Run, replay_run
from planner.replay.tensors import loaded, trained
from planner.run.framework import frameworks
from planner.run.framework_files import common_laws
from planner.run.recipe import Recipe
from planner.run.resolve import resolve
from planner.terms.activations import op_settings
from planner.terms.counts import base_weights
from planner.units import MiB

MODELS = ("llama-3.2-1b", "qwen2.5-0.5b", "gemma-2-2b", "qwen3-0.6b", "phi-3-mini-4k")
SHAPES = (
    {"method": "full", "checkpointing": "full"},
    {"method": "full", "checkpointing": "none"},
    {"method": "lora", "checkpointing": "full"},
    {"method": "lora", "checkpointing": "none"},
    {"method": "qlora", "checkpointing": "full"},
    {"method": "lora", "checkpointing": "offload"},
    {"method": "full", "checkpointing": "full", "gradient_accumulation": 4},
    {"method": "full", "checkpointing": "every-k", "checkpoint_every": 4},
)


def recipe(**changes: object) -> Recipe:
    values = {"task": "sft", "framework": "hf-trainer", "context": 2048, "micro_batch_size": 2}
    return Recipe.model_validate(values | changes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("framework", ["hf-trainer", "vramwise"])
def test_allocated_peak_agrees_with_the_plan(name, shape, framework):
    """Two ways to the same number: terms added up, and every allocation played."""
    model, machine = find_model(name), make_machine("h100")
    planned = plan(model, recipe(framework=framework, **shape), machine)
    workspace = sum(t.bytes for t in planned.phase("loss").terms if t.name == "overhead")
    played = replay_run(model, planned.resolved, workspace_bytes=workspace)
    assert played.allocated_bytes == pytest.approx(planned.peak_bytes, rel=0.025)
    assert played.reserved_bytes >= played.allocated_bytes


@pytest.mark.parametrize("task", ["sft", "grpo", "dpo"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_a_step_gives_everything_back(task, shape):
    """What is alive after the third step was alive after the second: nothing leaks."""
    model = find_model("llama-3.2-1b")
    resolved = resolve(model, recipe(task=task, num_generations=2, **shape), make_machine("h100"))
    run = Run(model, resolved, Player())
    run.load(0, 0)
    alive = []
    for _ in range(3):
        run.step(resolved.seq_tokens)
        alive.append(run.player.device.allocated_bytes)
    assert alive[2] == alive[1]


@pytest.mark.parametrize("make", [forward_events, recomputed_events, reentrant_events])
def test_a_layers_events_free_only_what_is_alive(make):
    model = find_model("llama-3.2-1b")
    settings = op_settings(model, resolve(model, recipe(), make_machine("h100")))
    events = make(model.layers[0], model.hidden, settings)
    alive = {events.x, events.grad_out}
    for event in events.events:
        if event.per_token == FREED:
            alive.remove(event.block)
        else:
            assert event.block not in alive
            alive.add(event.block)
    assert (events.out or events.grad_in) in alive


def test_a_kept_layers_backward_frees_all_that_its_forward_kept():
    model = find_model("llama-3.2-1b")
    settings = op_settings(model, resolve(model, recipe(method="full"), make_machine("h100")))
    both = kept_events(model.layers[0], model.hidden, settings)
    player = Player()
    x, grad = player.take(10 * MiB), player.take(10 * MiB)
    kept = player.play(both.forward, 64, {both.forward.x: x})
    out = kept.pop(both.forward.out)
    left = player.play(both.backward, 64, {**kept, both.backward.grad_out: grad})
    left.pop(both.backward.grad_in)
    weights = sum(module.parameters for module in model.layers[0].modules)
    assert sum(chunk.size for chunk in left.values()) == pytest.approx(2 * weights, rel=0.02)
    player.give(out)


def test_loaded_tensors_are_the_base_weights():
    for method in ("lora", "qlora"):
        model = find_model("llama-3.1-8b")
        resolved = resolve(model, recipe(method=method), make_machine("h100"))
        total = sum(sum(tensor.blocks) for tensor in loaded(model, resolved))
        assert total == base_weights(model, resolved).total


def test_trained_tensors_are_the_trained_parameters():
    model = find_model("llama-3.1-8b")
    full = resolve(model, recipe(method="full"), make_machine("h100"))
    lora = resolve(model, recipe(), make_machine("h100"))
    assert sum(each.elements for each in trained(model, full)) == model.parameters
    assert (
        sum(each.elements for each in trained(model, lora)) == 41_943_040
    )  # rank 16 on all linears, as PEFT prints


def test_every_ordered_law_is_as_large_as_its_sums_say():
    """`order` tells the same tensors as `forward` and `backward`: the largest moments agree."""
    laws = dict(common_laws())
    for framework in frameworks().values():
        laws |= {f"{framework.name}: {key}": law for key, law in framework.logits.items()}
    checked = 0
    for name, law in laws.items():
        if not law.order:
            continue
        checked += 1
        largest = alive_most = 0
        alive: dict[str, int] = {}
        for gone, made, each, _ in (*in_order(law, 2, False)[0], *in_order(law, 2, False)[1]):
            if made and each:
                alive_most = max(alive_most, sum(alive.values()) + each)
                alive.pop(gone, None)
                alive[made] = each
            elif made:
                alive[made] = alive.pop(gone)
            else:
                alive.pop(gone, None)
        widths = {"act": 2, "fp32": 4, "upcast": 4, "half-act": 1, "half-fp32": 2}
        for tensors in (law.forward, law.backward):
            largest = max(largest, sum(widths[dtype] for _, dtype in tensors))
        assert abs(alive_most - largest) <= 2, name
    assert checked >= 8


def test_streams_do_not_share_blocks():
    device = CachingAllocator()
    chunk = device.malloc(64 * MiB, 1)
    assert chunk is not None
    device.free(chunk)
    device.malloc(64 * MiB)
    assert device.reserved_bytes == 128 * MiB
    assert device.malloc(64 * MiB, 1) is not None
    assert device.reserved_bytes == 128 * MiB


def test_fsdp_gathers_beside_the_shards():
    model, machine = find_model("llama-3.1-8b"), make_machine("h100", gpus=8)
    planned = plan(model, recipe(method="full", sharding="fsdp", checkpointing="full"), machine)
    played = replay_run(model, planned.resolved)
    layer = 2 * model.layers[0].parameters
    assert played.allocated_bytes == pytest.approx(planned.peak_bytes, rel=0.1)
    assert played.reserved_bytes > planned.peak_bytes + layer  # the backward's prefetch
