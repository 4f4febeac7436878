"""The smallest card that takes a run, by what torch sees of the smallest card of each size."""

from functools import cache

from planner.errors import VramwiseError
from planner.machines.machine import Machine, gpu_catalogue
from planner.models.spec import ModelSpec
from planner.plan import plan
from planner.run.recipe import Recipe

KINDS = ("consumer", "workstation", "datacenter")


@cache
def sizes() -> tuple[tuple[float, int], ...]:
    """Return every size that cards are sold in, in GB, with the least that torch sees of one."""
    least: dict[float, int] = {}
    for gpu in gpu_catalogue().values():
        if gpu.vendor == "nvidia" and gpu.kind in KINDS and gpu.torch_total_bytes:
            seen = least.get(gpu.marketed_gb, gpu.torch_total_bytes)
            least[gpu.marketed_gb] = min(seen, gpu.torch_total_bytes)
    return tuple(sorted(least.items()))


def smallest_gb(model: ModelSpec, recipe: Recipe, machine: Machine) -> float | None:
    """Return the least size of as many cards as the machine has that the run fits; None = none.

    A larger card never fits less, so that halving finds it.
    """

    def fits(seen: int) -> bool:
        card = Machine(
            vram_bytes=seen,
            num_gpus=machine.num_gpus,
            nodes=machine.nodes,
            host_ram_bytes=machine.host_ram_bytes,
        )
        try:
            return plan(model, recipe, card).fits
        except VramwiseError:
            return False

    known = sizes()
    low, high = 0, len(known)
    while low < high:
        middle = (low + high) // 2
        if fits(known[middle][1]):
            high = middle
        else:
            low = middle + 1
    return known[low][0] if low < len(known) else None
