"""What ranks settle before a run: one plan for all of them, and what the fullest one measured."""

import socket
from dataclasses import replace

from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.run.recipe import Recipe, Task
from planner.units import format_bytes
from profiler.recording import Recording
from trainer.parallel.ranks import Ranks


def smallest_machine(machine: Machine, ranks: Ranks, *, shared: bool) -> Machine:
    """Return the machine that every rank has at least; `shared`: ranks of a host share its memory."""
    if not ranks.several:
        return machine
    hosts = ranks.gather_objects(socket.gethostname())
    share = hosts.count(hosts[ranks.rank]) if shared else 1
    least = int(ranks.min(float(machine.vram_bytes // share)))
    return replace(machine, vram_bytes=least)


def check_prompts(recipe: Recipe, prompts: int, ranks: Ranks) -> None:
    """Raise UsageError where a rank would have no prompt of a GRPO step."""
    if recipe.task is Task.GRPO and prompts < ranks.size:
        raise UsageError(
            f"train.prompts_per_step: {prompts} is less than the {ranks.size} ranks, which each sample "
            "their own prompts",
            hint=f"at least {ranks.size}, best a multiple of it",
        )


def fullest(measured: Recording, ranks: Ranks) -> tuple[Recording, str]:
    """Return the recording of the rank that held most, the same on all ranks, and a line on what each held."""
    if not ranks.several:
        return measured, ""
    peaks = ranks.gather_objects(measured.peak_bytes)
    top = peaks.index(max(peaks))
    found = ranks.broadcast_object(measured, source=top)
    if min(peaks) == peaks[top]:
        return found, f"rank 0 of {ranks.size} (all alike)"
    others = ", ".join(
        f"rank {rank} {format_bytes(peak)}" for rank, peak in enumerate(peaks) if peak != peaks[top]
    )
    return found, (
        f"rank {top} of {ranks.size}, the fullest: {format_bytes(peaks[top])} in {found.peak_phase}; {others}"
    )
