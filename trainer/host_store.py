"""A host slab for checkpointed layer inputs: out on one side stream, back a layer ahead on another.

A checkpointed decoder layer keeps its input alone: 2 * M * H bytes for M tokens in bf16, times L
layers. Here that input goes to one exact, pinned host slab while the layer runs, and comes back
one layer ahead of its use, so the device holds the layer at work, the one in flight and the last
layer (whose backward comes first, so it never leaves).

No record_stream: a tensor that is being copied is referenced until the compute stream has waited
for the copy, and staging buffers are allocated and freed in compute-stream order.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.units import format_bytes
from trainer.say import Say, silent


class Copies(Protocol):
    """Moves bytes between a device and the host slab; events order the moves."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a host slab [num_bytes] uint8, pinned where that helps."""
        ...

    def release(self, slab: Tensor) -> None:
        """Undo allocate."""
        ...

    def to_host(self, source: Tensor, target: Tensor) -> Any:
        """Start copying source into target; return an event that is set once it is there."""
        ...

    def to_device(self, source: Tensor, after: Any, device: torch.device) -> tuple[Tensor, Any]:
        """Start copying source back once `after` is set; return the new tensor and its event."""
        ...

    def wait(self, event: Any) -> None:
        """Make what is computed from here on come after the event."""
        ...


class CudaCopies:
    """Copies on two side streams, one each way. `say` is told once when pinning was refused."""

    def __init__(self, device: torch.device, say: Say = silent) -> None:
        self._device = device
        self._say = say
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)
        self._registered: set[int] = set()

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a slab registered with CUDA: exact, where pin_memory rounds to a power of two.

        Where the system refuses to pin that much (WSL, low locked-memory limits) the slab stays
        pageable: slower copies, same results. cudaMemcpyAsync to pageable memory returns when the
        bytes are there, from it when they are staged (CUDA runtime API, "API synchronization
        behavior"): the events still order everything.
        """
        slab = torch.empty(num_bytes, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(slab.data_ptr(), num_bytes, 0)
        if int(status) == 0:
            self._registered.add(slab.data_ptr())
            return slab
        clear_last_error(self._device)
        self._say(
            f"offload: CUDA could not pin {format_bytes(num_bytes)} of host memory "
            f"({runtime.cudaGetErrorString(status)}); copies are slower, results the same"
        )
        self._say = silent
        return slab

    def release(self, slab: Tensor) -> None:
        """Unregister the slab once no copy uses it."""
        if slab.data_ptr() in self._registered:
            torch.cuda.synchronize(self._device)
            status = torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
            self._registered.discard(slab.data_ptr())
            if int(status):
                clear_last_error(self._device)

    def to_host(self, source: Tensor, target: Tensor) -> Any:
        """Copy after what the compute stream has been given so far."""
        return self.send([source], [target])

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Copy after what the compute stream has been given so far."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            return self._out.record_event()

    def to_device(self, source: Tensor, after: Any, device: torch.device) -> tuple[Tensor, Any]:
        """Copy into memory of the compute stream, after its earlier users and after `after`."""
        staged = torch.empty(source.shape, dtype=source.dtype, device=device)
        return staged, self.bring([source], [staged], after)

    def bring(self, sources: Sequence[Tensor], targets: Sequence[Tensor], after: Any = None) -> Any:
        """Copy into memory of the compute stream, after its earlier users and after `after`."""
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._back.wait_event(after)
        with torch.cuda.stream(self._back):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            return self._back.record_event()

    def wait(self, event: Any) -> None:
        """Let the compute stream wait; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """Let the host wait for both streams."""
        self._out.synchronize()
        self._back.synchronize()


def clear_last_error(device: torch.device) -> None:
    """Take CUDA's last error away by meeting it in a kernel launched for that.

    torch hands the status of cudaHostRegister back unchecked (torch/csrc/cuda/shared/cudart.cpp,
    C10_CUDA_ERROR_HANDLED), so CUDA keeps it as this thread's last error, and the check after the next
    launch, whatever kernel that is, raises it: C10_CUDA_KERNEL_LAUNCH_CHECK is
    C10_CUDA_CHECK(cudaGetLastError()), which reads and resets it (torch 2.13 c10/cuda/CUDAException.h).
    An error that stays (a device-side assertion) is raised again by whatever comes next.
    """
    try:
        torch.ones(1, device=device).add_(1)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass


class DirectCopies:
    """Plain copies on any device, CPU included: the same bookkeeping without streams."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def release(self, slab: Tensor) -> None:
        """Do nothing: the slab is freed with its last reference."""

    def to_host(self, source: Tensor, target: Tensor) -> Any:
        """Copy now."""
        target.copy_(source)

    def to_device(self, source: Tensor, after: Any, device: torch.device) -> tuple[Tensor, Any]:
        """Copy now."""
        return source.to(device, copy=True), None

    def wait(self, event: Any) -> None:
        """Do nothing: every copy is done when it returns."""


@dataclass(slots=True)
class OffloadCounts:
    """What the store has done since it was made."""

    offloaded: int = 0
    kept: int = 0
    """Inputs that stayed on the device: the last layers, CPU tensors, or a full slab."""
    fetched: int = 0
    prefetched: int = 0
    """Of `fetched`: those that were on their way before they were asked for."""
    out_bytes: int = 0
    back_bytes: int = 0
    slab_bytes: int = 0
    """Size of the slab now."""
    live_bytes_peak: int = 0
    """Most slab bytes in use at once."""
    staged_peak: int = 0
    """Most inputs on their way back, or back, and not yet taken."""


class Ticket:
    """One layer's input, wherever it is."""

    def __init__(self, store: "HostStore | None", source: Tensor, host: Tensor | None) -> None:
        self._store = store
        self.source: Tensor | None = source
        self.host = host
        self.requires_grad = source.requires_grad
        self.device = source.device
        self.event: Any = None
        self.staged: tuple[Tensor, Any] | None = None

    def take(self) -> Tensor:
        """Return the input: itself while it is here, else a copy from the host."""
        if self.source is not None:
            return self.source
        assert self._store is not None
        return self._store._fetch(self).requires_grad_(self.requires_grad)

    def __del__(self) -> None:
        if self.host is not None and self._store is not None:
            self._store._forget(self)


class HostStore:
    """Keeps layer inputs in one host slab between forward and backward.

    `num_layers` inputs come per forward pass, of which the last `keep_last` stay. The slab has
    exactly the size that one pass needs; it grows (only while empty) when a longer micro-batch
    comes, so `reserve` the longest first. CPU inputs are left alone unless `copies` is given.
    `say` is told when the slab cannot be pinned.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        keep_last: int = 1,
        copies: Copies | None = None,
        say: Say = silent,
    ) -> None:
        self.num_layers = num_layers
        self.keep_last = keep_last
        self.counts = OffloadCounts()
        self._copies = copies
        self._say = say
        self._slab: Tensor | None = None
        self._used_bytes = 0
        # Weak: a ticket lives as long as the graph that may ask for it, and frees its place then.
        self._live: list[weakref.ref[Ticket]] = []
        self._in_flight: tuple[weakref.ref[Ticket], Tensor, Any] | None = None

    def reserve(self, input_bytes: int, device: torch.device) -> None:
        """Make room for inputs of `input_bytes` each: (num_layers - keep_last) * input_bytes."""
        if self._copies is None and device.type == "cuda":
            self._copies = CudaCopies(device, self._say)
        needed = _aligned(input_bytes) * max(0, self.num_layers - self.keep_last)
        if self._copies is None or self._live or self.counts.slab_bytes >= needed:
            return
        self.close()
        self._slab = self._copies.allocate(needed)
        self.counts.slab_bytes = needed

    def close(self) -> None:
        """Give the slab back; registered memory must not be freed while CUDA knows it."""
        if self._slab is not None and self._copies is not None:
            self._copies.release(self._slab)
        self._slab = None
        self.counts.slab_bytes = 0

    def __del__(self) -> None:
        self.close()

    def put(self, index: int, source: Tensor) -> Ticket:
        """Take layer `index`'s input; from here on the ticket stands for it."""
        self._settle()
        if not self._live:
            self._used_bytes = 0
            self.reserve(source.nbytes, source.device)
        host = None
        if index < self.num_layers - self.keep_last and self._copies is not None:
            host = self._space_for(source)
        if host is None or self._copies is None:
            self.counts.kept += 1
            return Ticket(self, source, None)
        ticket = Ticket(self, source, host)
        ticket.event = self._copies.to_host(source.detach(), host)
        reference = weakref.ref(ticket)
        self._in_flight = (reference, source, ticket.event)
        self._live.append(reference)
        self.counts.offloaded += 1
        self.counts.out_bytes += source.nbytes
        self.counts.live_bytes_peak = max(self.counts.live_bytes_peak, self._used_bytes)
        return ticket

    def _space_for(self, source: Tensor) -> Tensor | None:
        start = self._used_bytes
        end = start + _aligned(source.nbytes)
        if self._slab is None or end > self._slab.numel():
            return None
        self._used_bytes = end
        region = self._slab[start : start + source.nbytes]
        return region.view(source.dtype).view(source.shape)

    def _settle(self) -> None:
        """Let go of the input whose copy was started one layer ago."""
        if self._in_flight is None or self._copies is None:
            return
        reference, _source, event = self._in_flight
        self._copies.wait(event)
        ticket = reference()
        if ticket is not None:
            ticket.source = None
        self._in_flight = None

    def _fetch(self, ticket: Ticket) -> Tensor:
        assert self._copies is not None
        self.counts.fetched += 1
        if ticket.staged is None:
            self._start(ticket)
        else:
            self.counts.prefetched += 1
        assert ticket.staged is not None
        tensor, event = ticket.staged
        ticket.staged = None
        self._copies.wait(event)
        live = self._tickets()
        position = live.index(ticket)
        if position > 0:
            self._start(live[position - 1])
        return tensor

    def _tickets(self) -> list[Ticket]:
        return [ticket for reference in self._live if (ticket := reference()) is not None]

    def _start(self, ticket: Ticket) -> None:
        """Start bringing an input back, once."""
        assert self._copies is not None
        if ticket.staged is not None or ticket.source is not None or ticket.host is None:
            return
        ticket.staged = self._copies.to_device(ticket.host, ticket.event, ticket.device)
        self.counts.back_bytes += ticket.host.nbytes
        staged = sum(other.staged is not None for other in self._tickets())
        self.counts.staged_peak = max(self.counts.staged_peak, staged)

    def _forget(self, ticket: Ticket) -> None:
        """Free the place of a ticket whose graph is gone."""
        # weak references to an object still answer inside its __del__
        self._live = [ref for ref in self._live if ref() not in (None, ticket)]
        if self._copies is not None and ticket.staged is not None:
            # Fetched ahead and never taken (a backward that raised): its memory must not be
            # reused before the copy into it has ended.
            self._copies.wait(ticket.staged[1])


def _aligned(num_bytes: int) -> int:
    """Round up to 16: a region can be viewed as any dtype whatever lies before it."""
    return -(-num_bytes // 16) * 16
