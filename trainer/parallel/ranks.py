"""The processes of one run, and what they tell each other; a process of its own is one rank.

The rest of the trainer asks this object, never torch.distributed. Figures and objects travel over gloo,
between CPUs, on GPUs too: no kernel waits for them.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)
"""Until a rank that waits for another gives up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process's place among those of the run, and the talk between them.

    Every method but `first` and `alone` is collective: all ranks call it, in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the ranks of this host: the GPU's index."""
    mesh: DeviceMesh | None = None
    """("replicate", "shard"): parameters are cut over the second; None: one process, or not laid out yet."""

    @classmethod
    def alone(cls) -> "Ranks":
        """Return the one rank of a run without others: nothing is sent, no process group is needed."""
        return cls()

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1

    @property
    def shards(self) -> int:
        """Ranks that a parameter is cut over; 1 before there is a mesh."""
        return 1 if self.mesh is None else self.mesh.size(1)

    @property
    def copies(self) -> int:
        """Ranks that hold the same part of every parameter."""
        return 1 if self.mesh is None else self.mesh.size(0)

    @property
    def shard_index(self) -> int:
        """Which part of every parameter this rank holds: the same on its copies."""
        return self.rank % self.shards

    def laid_out(self, *, shard: int, device_type: str) -> "Ranks":
        """Return the ranks with a mesh: parameters cut over `shard` neighbours, copied size / shard times."""
        names = ("replicate", "shard")
        mesh = init_device_mesh(device_type, (self.size // shard, shard), mesh_dim_names=names)
        return replace(self, mesh=mesh)

    @overload
    def sum(self, value: float) -> float: ...
    @overload
    def sum(self, value: Tensor) -> Tensor: ...
    def sum(self, value: float | Tensor) -> float | Tensor:
        """Return the sum over the ranks; of a tensor element by element, `value` itself is left alone."""
        return self._reduced(value, dist.ReduceOp.SUM)

    @overload
    def max(self, value: float) -> float: ...
    @overload
    def max(self, value: Tensor) -> Tensor: ...
    def max(self, value: float | Tensor) -> float | Tensor:
        """Return the largest over the ranks."""
        return self._reduced(value, dist.ReduceOp.MAX)

    @overload
    def min(self, value: float) -> float: ...
    @overload
    def min(self, value: Tensor) -> Tensor: ...
    def min(self, value: float | Tensor) -> float | Tensor:
        """Return the smallest over the ranks."""
        return self._reduced(value, dist.ReduceOp.MIN)

    def any(self, value: bool) -> bool:
        """Return whether it is so on any rank."""
        return self.max(float(value)) > 0

    def all(self, value: bool) -> bool:
        """Return whether it is so on every rank."""
        return self.min(float(value)) > 0

    def broadcast_object(self, value: T, *, source: int = 0) -> T:
        """Return the `value` of rank `source`."""
        if not self.several:
            return value
        box = [value if self.rank == source else None]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        received: T = box[0]  # type: ignore[assignment]
        return received

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's `value`, in the order of the ranks, on every rank."""
        if not self.several:
            return [value]
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.sum(0.0)

    def share(self, items: Iterable[T]) -> list[T]:
        """Return this rank's part of `items`: every size-th one, from its own number on."""
        return list(items)[self.rank :: self.size]

    def _reduced(self, value: float | Tensor, op: Any) -> float | Tensor:
        if not self.several:
            return value
        if isinstance(value, Tensor):
            total = value.detach().clone()
            dist.all_reduce(total, op=op)
            return total
        number = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(number, op=op)
        return number.item()


ALONE = Ranks.alone()


def join(*, timeout: timedelta = TIMEOUT) -> Ranks:
    """Return this process's rank, in the process group that torchrun's environment describes.

    NCCL moves what lies on GPUs, gloo the rest; the GPU is the one of LOCAL_RANK. Without WORLD_SIZE, or
    with one of 1, the process is alone. `leave` ends the group.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks.alone()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if on_gpus else "gloo", timeout=timeout)
    return Ranks(rank=dist.get_rank(), size=size, local_rank=local_rank)


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
