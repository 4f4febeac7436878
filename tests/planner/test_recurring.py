"""Layers that a replay leaves out because they repeat what was played: the same bytes, fewer plays."""

import pytest

from planner.allocator.caching import CachingAllocator
from planner.allocator.pool import Chunk
from planner.machines.machine import make_machine
from planner.models.catalogue import catalogue_model
from planner.replay.recurring import Recurring
from planner.replay.steps import Replayed, replay_run
from planner.run.resolve import resolve
from planner.run.runfile import make_recipe


@pytest.mark.parametrize("model", ["qwen3-0.6b", "gemma-3-1b"])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_what_recurs_is_left_out_and_nothing_changes(
    model: str, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = catalogue_model(model)
    recipe = make_recipe(task=task, method="lora", context=4096, checkpointing="offload")
    resolved = resolve(spec, recipe, make_machine("rtx-4090"))
    plays = 0
    played = CachingAllocator.play

    def counted(self: CachingAllocator, events: object, blocks: object) -> int:
        nonlocal plays
        plays += 1
        return played(self, events, blocks)  # type: ignore[arg-type]

    monkeypatch.setattr(CachingAllocator, "play", counted)

    def run() -> tuple[Replayed, int]:
        before = plays
        found = replay_run(spec, resolved, workspace_bytes=1 << 20)
        return found, plays - before

    short, few = run()
    monkeypatch.setattr(CachingAllocator, "free_state", lambda self: None)
    whole, all_of_them = run()
    assert short == whole
    passes = 2 * (2 if task == "grpo" else 1)
    assert few < all_of_them - passes * spec.num_layers // 2


class Free:
    """A player whose free blocks are given, one state a layer."""

    def __init__(self, *states: int) -> None:
        self.device = self
        self.states = iter(states)

    def free_state(self) -> tuple[tuple[int, ...], ...]:
        """Return the next."""
        return ((next(self.states),),)


def test_layers_are_left_out_in_whole_periods_of_the_same_kinds() -> None:
    local, wide = (catalogue_model("gemma-3-1b").layers[number] for number in (0, 1))
    out = Chunk(512, 0, None)  # type: ignore[arg-type]
    order = [local, local, local, wide, local, local, wide]
    # after the second layer all is as after the first: the third is left out, the wide one is not
    recurring = Recurring(order, Free(1, 1), len(order))  # type: ignore[arg-type]
    assert recurring.after(0, out) == 1
    assert recurring.after(1, out) == 3
    order = 3 * [local, wide] + [local]
    recurring = Recurring(order, Free(1, 2, 1), len(order))  # type: ignore[arg-type]
    assert [recurring.after(place, out) for place in range(3)] == [1, 2, 7]
    # the last two leave more than their output
    recurring = Recurring(order, Free(1, 2, 1), 5)  # type: ignore[arg-type]
    assert [recurring.after(place, out) for place in range(3)] == [1, 2, 5]
    # the output is elsewhere: it is not the same state
    recurring = Recurring(order, Free(1, 1), len(order))  # type: ignore[arg-type]
    assert recurring.after(0, out) == 1
    assert recurring.after(1, Chunk(512, 512, None)) == 2  # type: ignore[arg-type]
