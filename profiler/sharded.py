"""One rank of a run on many GPUs, without the others: FSDP2 on a process group that sends nothing.

torch's "fake" group has any world size and moves no data; on fake tensors nothing is read, so rank r
allocates what it would beside N - 1 real ones. N = 512 costs what N = 8 does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from planner.errors import UnsupportedError
from profiler.dtensors import is_wrapper, local
from profiler.materialise import allocate_state, term_of_parameter
from profiler.storages import StorageTracker

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """How a model is divided, and which of the ranks is traced."""

    ranks: int
    """Processes of the run."""
    rank: int = 0
    replicate: int = 0
    """Groups that hold the same shards and add up their gradients (HSDP); 0 = the mesh has no such side."""
    tensor: int = 1
    """Ranks that share every layer by transformers' tp_plan; all of them then, and nothing else is divided."""
    param_dtype: str = ""
    """MixedPrecisionPolicy.param_dtype: what gathered parameters are cast to; "" = as stored."""
    reduce_dtype: str = ""
    """In which gradients travel; "" = as they are."""
    reshard_after_forward: bool | int | None = True
    """Layers are divided again after their forward; the root unit stays whole, as in torch."""
    syncs_each: bool = True
    """Gradients are reduced after every micro-batch, not only after the last."""
    offload: bool = False
    """Shards, their gradients and the optimizer's states are in host memory (CPUOffloadPolicy)."""


@contextmanager
def process_group(shard: Shard) -> Iterator[None]:
    """Have a process group of the shard's size while active: the caller's own, or a fake one."""
    import torch.distributed as dist

    if dist.is_initialized():
        if dist.get_world_size() != shard.ranks:
            raise UnsupportedError(
                f"this process is one of {dist.get_world_size()}; a trace of {shard.ranks} ranks "
                "needs a process of its own"
            )
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=shard.rank, world_size=shard.ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def divide(model: torch.nn.Module, layers: list[torch.nn.Module], shard: Shard) -> None:
    """Make every layer a unit of FSDP2 and what is left the root unit, on the meta device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if shard.replicate:
        sizes, names = (shard.replicate, shard.ranks // shard.replicate), ("replicate", "shard")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", (shard.ranks,))
    common: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[shard.param_dtype] if shard.param_dtype else None,
            reduce_dtype=DTYPES[shard.reduce_dtype] if shard.reduce_dtype else None,
        ),
    }
    if shard.offload:  # a build without CUDA cannot pin; the place is the same
        common["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=shard.reshard_after_forward, **common)
    fully_shard(model, **common)


def share_layers(model: Any, shard: Shard) -> None:
    """Divide matrices as transformers' own tp_plan says, as DTensors on the meta device.

    Embedding and head, made apart here, are tied again as from_pretrained does once weights are loaded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(
        model, init_device_mesh("cpu", (shard.tensor,), mesh_dim_names=("tp",))
    )
    model.tie_weights(recompute_mapping=False)


def by_kind(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Return DTensors and plain parameters apart: torch's foreach kernels refuse them in one list."""
    found = [
        [each for each in parameters if is_wrapper(type(each.data)) == divided]
        for divided in (True, False)
    ]
    return [each for each in found if each]


def allocate(model: torch.nn.Module, tracker: StorageTracker, shard: Shard) -> None:
    """Give every parameter's shard and every buffer memory under the caller's modes."""
    with tracker.unseen():
        model.to_empty(device="cpu")

    def adopt(path: str, tensor: torch.Tensor) -> None:
        module = path.rpartition(".")[0]
        tracker.adopt(local(tensor), term=term_of_parameter(path), module=module, op="load")

    with on_host(tracker, shard):
        for path, parameter in model.named_parameters():
            adopt(path, parameter)
    for path, buffer in model.named_buffers():
        adopt(path, buffer)
    for path, part in model.named_modules():
        state = getattr(part, "quant_state", None)
        if state is not None:  # a 4-bit weight is divided, its constants are whole on every rank
            allocate_state(state, f"{path}.weight", tracker)


@contextmanager
def on_host(tracker: StorageTracker, shard: Shard | None) -> Iterator[None]:
    """Where the shard and its optimizer step are: in host memory when it is offloaded."""
    if shard is None or not shard.offload:
        yield
        return
    with tracker.on_host():
        yield


def synced(model: Any, shard: Shard | None, *, last: bool) -> None:
    """Say whether this micro-batch's gradients are reduced, as accelerate's no_sync does."""
    if shard is not None and not shard.syncs_each:
        model.set_requires_gradient_sync(last)
