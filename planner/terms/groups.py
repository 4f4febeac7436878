"""Groups of ranks that a run makes, and what their communicators hold outside torch's pool on one GPU.

A communicator is made at a group's first collective, and each takes its own channels' buffers, whatever
its ranks: six groups of one NVLink node took about 6 GB (NVIDIA/nccl#864).
"""

from typing import Any, NamedTuple

from planner.machines.communicators import communicator
from planner.machines.machine import Machine
from planner.machines.vllm_overheads import NOTHING, Measured
from planner.run.parallel import Group
from planner.run.recipe import VLLM, EngineKind
from planner.run.resolved import Resolved


class Communicators(NamedTuple):
    """The groups of one rank, with what each holds."""

    groups: tuple[tuple[Group, Measured], ...]

    @property
    def held(self) -> Measured:
        """All of them."""
        sizes = [size for _, size in self.groups]
        return Measured(*(sum(each) for each in zip(*sizes, strict=True))) if sizes else NOTHING

    def to_list(self) -> list[dict[str, Any]]:
        """Return the JSON form."""
        return [
            {
                "name": group.name,
                "size": group.size,
                "low_bytes": size.low,
                "typical_bytes": size.typical,
                "high_bytes": size.high,
            }
            for group, size in self.groups
        ]


NO_GROUPS = Communicators(())


def communicators(r: Resolved, machine: Machine) -> Communicators:
    """Return the groups that a rank talks in: the run's, and vLLM's own where it runs beside it.

    Without a CUDA context (a CPU, a pretended limit) they talk over gloo, in host memory.
    """
    if not machine.context_bytes:
        return NO_GROUPS
    groups = [*(r.layout.groups if r.trains else ()), *_engine_groups(r)]
    return Communicators(tuple((group, communicator(machine, group.size)) for group in groups))


def _engine_groups(r: Resolved) -> list[Group]:
    """Return vLLM's groups (distributed/parallel_state.py), where its budget does not count them itself."""
    if r.trains and r.engine is EngineKind.VLLM_SERVER and r.transfer == "nccl":
        # the first rank and the server's workers, of which there is one at least
        return [Group("vllm weight transfer", 2)]
    here = r.engine in VLLM and not (r.trains and r.engine is EngineKind.VLLM_SERVER)
    if not here or r.framework.engine.communicators_in_budget:
        return []
    sizes = {
        "vllm tensor": r.tensor_parallel,
        "vllm pipeline": r.pipeline_parallel,
        "vllm data": r.data_parallel,
    }
    return [Group(name, size) for name, size in sizes.items() if size > 1]
