"""What FSDP2 sends during one pass over the model, so that a rank whose pass breaks off can still send it.

Collectives must match: a rank that runs out of memory in layer 7 would leave the others waiting in layer 8.
The order of sends is the same in every pass of a kind, so the broken rank sends what is missing, as zeros; then
all agree that the pass is void, and do it again smaller.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

# torch 2.13 has new names for both, and warns of the old ones
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Send:
    """One collective; shapes are the same on all ranks of its group."""

    kind: str
    """gather, scatter (reduce-scatter) or reduce (all-reduce)."""
    elements: int
    """Of the larger side."""
    dtype: torch.dtype
    device: torch.device
    group: Any

    def zeros(self) -> None:
        """Take part in it with zeros, and drop what comes."""
        whole = torch.zeros(self.elements, dtype=self.dtype, device=self.device)
        if self.kind == "reduce":
            dist.all_reduce(whole, group=self.group)
            return
        part = whole.new_zeros(self.elements // self.group.size())
        if self.kind == "gather":
            _gather(whole, part, group=self.group)
        else:
            _scatter(part, whole, group=self.group)


class Traffic:
    """Notes the sends of the pass under way; knows those of a whole pass of each kind."""

    def __init__(self) -> None:
        self._sent: list[Send] = []
        self._known: dict[str, list[Send]] = {}

    def watch(self, unit: FSDPModule, *, copies: Any) -> None:
        """Note what `unit` sends. `copies`: the group of ranks with the same shards; None without any."""
        unit.set_custom_all_gather(_Gather(self._sent.append))
        unit.set_custom_reduce_scatter(_Scatter(self._sent.append))
        if copies is not None:
            unit.set_all_reduce_hook(
                lambda sums: self._sent.append(_send("reduce", sums, copies))  # behind FSDP2's own
            )

    def begin(self) -> None:
        """Start a pass."""
        self._sent.clear()

    def complete(self, kind: str) -> None:
        """Remember the pass that has ended as what one of this kind sends."""
        if self._sent:
            self._known[kind] = list(self._sent)

    def finish(self, kind: str) -> None:
        """Send what a pass that broke off has not."""
        for send in self._known[kind][len(self._sent) :]:
            send.zeros()


def _send(kind: str, tensor: Tensor, group: Any) -> Send:
    return Send(kind, tensor.numel(), tensor.dtype, tensor.device, group)


class _Allocates:
    """What FSDP2's own collectives allocate their buffers with."""

    def __init__(self, note: Callable[[Send], None]) -> None:
        self._note = note

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocates, AllGather):
    """FSDP2's all-gather, noted."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather."""
        work = _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self._note(_send("gather", output_tensor, group))
        return work


class _Scatter(_Allocates, ReduceScatter):
    """FSDP2's reduce-scatter, noted."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce and scatter."""
        work = _scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._note(_send("scatter", input_tensor, group))
        return work
