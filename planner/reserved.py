"""What torch's caching allocator holds at its largest: the run replayed, allocation by allocation.

planner/replay plays loading and two steps through planner/allocator. Freed blocks serve requests of
other sizes only when those are smaller, so the allocator holds more than is ever alive at once; near
the card's limit it gives unused blocks back first.
"""

from dataclasses import replace
from typing import NamedTuple

from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.phases import Phase
from planner.replay.steps import Replayed, replay_run
from planner.run.resolved import Resolved
from planner.terms.groups import communicators


class Reserved(NamedTuple):
    """torch.cuda.max_memory_reserved of a replay, and what a card must have for it."""

    needed: int
    """The least capacity on which the run's requests all succeed, unused segments given back."""
    on_card: int
    """On this card: unused blocks are given back when it is full."""
    with_room: int
    """On a card with room: nothing is ever given back."""
    loaded: int = 0
    """When the model is there, before the first step: the largest that loading took."""


def reserved(
    model: ModelSpec,
    r: Resolved,
    phases: tuple[Phase, ...],
    capacity_bytes: int,
    lengths: tuple[int, ...] = (),
) -> Reserved:
    """Return what the allocator holds; `lengths`: tokens of a sequence in each step, if they differ."""
    peak = max(phase.total_bytes for phase in phases)
    if not r.trains:  # vLLM stays inside its utilisation
        return Reserved(peak, peak, peak)
    free, workspace, resident = _free(model, r, phases, capacity_bytes, lengths)
    with_room = on_card = max(peak, free.reserved_bytes)
    if with_room > capacity_bytes:
        pressed = _replayed(model, r, workspace, resident, lengths, capacity_bytes, capacity_bytes)
        if not pressed.full:
            on_card = max(peak, pressed.reserved_bytes)
        elif max(peak, free.needed_bytes) <= capacity_bytes:  # it goes through, and fills the card
            on_card = capacity_bytes
    return Reserved(max(peak, free.needed_bytes), on_card, with_room, free.loaded_bytes)


def needed(model: ModelSpec, r: Resolved, phases: tuple[Phase, ...], capacity_bytes: int) -> int:
    """Return the least pool that the run goes through in: `Reserved.needed` without a replay on a full card."""
    peak = max(phase.total_bytes for phase in phases)
    if not r.trains:
        return peak
    return max(peak, _free(model, r, phases, capacity_bytes, ())[0].needed_bytes)


def _free(
    model: ModelSpec,
    r: Resolved,
    phases: tuple[Phase, ...],
    capacity_bytes: int,
    lengths: tuple[int, ...],
) -> tuple[Replayed, int, int]:
    """Return the replay with room for all, and the bytes of workspaces and residents it was made with."""
    peak = max(phase.total_bytes for phase in phases)
    workspace, resident = _bytes(phases, "loss", "overhead"), _bytes(phases, "forward", "engine")
    if r.stage.stages > 1 or r.switches.gradient_buffers:
        # graphs of other micro-batches and buffers, which the replay does not play, only stand there
        alone = _replayed(model, r, workspace, resident, lengths, None, capacity_bytes)
        resident += max(0, peak - alone.allocated_bytes)
    free = _replayed(model, r, workspace, resident, lengths, None, capacity_bytes)
    return free, workspace, resident


_PLAYED: dict[tuple[object, ...], tuple[ModelSpec, Replayed]] = {}
_KEPT = 4096


def _replayed(
    model: ModelSpec,
    r: Resolved,
    workspace: int,
    resident: int,
    lengths: tuple[int, ...],
    capacity: int | None,
    card: int,
) -> Replayed:
    """Return the replay, once for equal runs: the card decides only where it is full or warmed up."""
    card = 0 if r.switches.warmup == "none" else card
    key = (id(model), replace(r, assumptions=()), workspace, resident, lengths, capacity, card)
    if key not in _PLAYED:
        if len(_PLAYED) >= _KEPT:
            _PLAYED.clear()
        played = replay_run(
            model,
            r,
            workspace_bytes=workspace,
            resident_bytes=resident,
            lengths=lengths,
            capacity_bytes=capacity,
            card_bytes=card,
        )
        _PLAYED[key] = (model, played)  # keeps `model` alive, so its id stays its own
    return _PLAYED[key][1]


def forget(model: ModelSpec) -> None:
    """Drop the replays of a model that nobody else may have."""
    for key in [key for key, (owner, _) in list(_PLAYED.items()) if owner.name == model.name]:
        _PLAYED.pop(key, None)


def outside_bytes(r: Resolved, machine: Machine) -> int:
    """Return what the GPU holds of the run outside torch's pool: contexts and communicators.

    auto-gptq and gptqmodel load by device_map "auto": accelerate's get_max_memory puts a tensor on
    every GPU, and with it each process a CUDA context (accelerate 1.0 utils/modeling.py).
    """
    ranks = r.gpus
    everywhere = r.switches.gptq_touches_every_gpu and r.quantization.startswith("gptq")
    contexts = (ranks if everywhere else 1) * machine.context_bytes
    return contexts + communicators(r, machine).held.typical


def _bytes(phases: tuple[Phase, ...], phase: str, term: str) -> int:
    found = next(each for each in phases if each.name == phase)
    return sum(each.bytes for each in found.terms if each.name == term)
