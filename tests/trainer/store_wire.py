"""vLLM's NCCL weight transfer with its own TCP store for a wire: all of it but the card runs, on both sides.

PyNcclCommunicator is the one class of it that needs a GPU. The group that it is made for can send tensors itself,
by its store.
"""

from typing import Any

import torch


class StoreCommunicator:
    """What vLLM's transfer engines ask of PyNcclCommunicator, over the group's store."""

    disabled = False

    def __init__(self, group: Any, device: Any) -> None:
        self.group = group
        self.sizes: list[int] = []
        """Bytes of every tensor sent or received."""

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        self.sizes.append(tensor.nbytes)
        received = self.group.broadcast(tensor.detach(), src)
        if self.group.rank != src:
            tensor.copy_(received)

    def destroy(self) -> None:
        self.disabled = True


def install(put: Any = setattr) -> None:
    """Use the store in this process, and answer what NCCL's path asks of a card."""
    from vllm.distributed.device_communicators import pynccl

    put(pynccl, "PyNcclCommunicator", StoreCommunicator)
    put(torch.accelerator, "current_device_index", lambda: 0)
    put(torch.accelerator, "synchronize", lambda: None)
    put(torch.cuda, "current_stream", lambda device=None: None)


class Worker:
    """A verb of vLLM's worker: --worker-extension-cls of this name, then collective_rpc."""

    def use_store_wire(self) -> None:
        install()
