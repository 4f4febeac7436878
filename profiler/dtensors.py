"""What FSDP2 and DTensor hide from a dispatch mode, made visible to a StorageTracker.

A DTensor's operator comes back as that of its local part; while DTensor works out shapes nothing is
allocated; FSDP2 makes and frees gathered parameters by resizing storages, which no operator shows;
and a collective's wait returns its argument. Sources: torch 2.13, distributed/fsdp/_fully_shard/
{_fsdp_param,_fsdp_collectives}.py, distributed/tensor/_sharding_prop.py.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from profiler.storages import StorageTracker

_WRAPPERS: dict[type, bool] = {}
COMMUNICATION = "communication"


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of this type are DTensors, whose storage is their local part's."""
    known = _WRAPPERS.get(kind)
    if known is None:
        names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
        known = _WRAPPERS[kind] = "torch.distributed.tensor.DTensor" in names
    return known


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of `tensor`."""
    if not is_wrapper(type(tensor)):
        return tensor
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return part


@contextmanager
def visible(tracker: "StorageTracker") -> Iterator[None]:
    """Let `tracker` see what sharded modules allocate while active."""
    import torch.distributed.fsdp._fully_shard._fsdp_init as setup
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def quietly(original: Callable[..., Any]) -> Callable[..., Any]:
        def propagate(*args: Any, **kwargs: Any) -> Any:
            with tracker.unseen():
                return original(*args, **kwargs)

        return propagate

    def laying(original: Callable[..., Any]) -> Callable[..., Any]:
        def lay_out(*args: Any, **kwargs: Any) -> None:
            with tracker.unseen(), unset_fake_temporarily():  # a mesh reads its ranks' numbers
                original(*args, **kwargs)

        return lay_out

    def resizing(original: Callable[..., Any]) -> Callable[..., Any]:
        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            tracker.resized(storage, size, term="weights")
            return result

        return resize

    def communicating(original: Callable[..., Any]) -> Callable[..., Any]:
        def communicate(*args: Any, **kwargs: Any) -> Any:
            with tracker.allocating(COMMUNICATION):
                return original(*args, **kwargs)

        return communicate

    def reducing(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(params: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            for gradient in gradients:  # whole ones, until they are copied into the flat input
                tracker.adopt(gradient, term="gradients", module=tracker.where(), op="backward")
            gradient = None  # or the last would outlive its copy
            with tracker.allocating(COMMUNICATION), tracker.moving(to_host=True):
                return original(params, gradients, *args, **kwargs)

        return reduce

    def fetching(original: Any) -> Any:
        def fetch(param: Any) -> Any:
            with tracker.moving(to_host=False):
                return original.fget(param)

        return property(fetch)

    def fetched(parameters: Any, buffers: Any, *_: Any) -> None:
        for tensor in (*parameters, *buffers):
            if tracker.is_on_host(tensor):  # a unit that is divided comes to the device whole
                tensor.data = tensor.detach().clone()

    def gathering(original: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*args: Any, **kwargs: Any) -> Any:
            with tracker.allocating("weights"):
                return original(*args, **kwargs)

        return gather

    with ExitStack() as stack:
        for owner, name, change in (
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", quietly),
            (setup, "_move_states_to_device", lambda _: fetched),
            (DeviceMesh, "__init__", laying),
            (torch.UntypedStorage, "resize_", resizing),
            (FSDPParam, "all_gather_inputs", fetching),
            (FSDPParam, "init_all_gather_outputs", gathering),
            (groups, "foreach_all_gather", communicating),
            (groups, "foreach_reduce", reducing),
        ):
            original = getattr(owner, name)
            setattr(owner, name, change(original))
            stack.callback(setattr, owner, name, original)
        yield


@contextmanager
def states_found() -> Iterator[None]:
    """Let a 4-bit linear find its constants on gathered fake weights while active.

    FSDP2 gathers into a plain parameter; bitsandbytes wraps that in its own class without a copy
    (nn/modules.py, fix_4bit_weight_quant_state_from_module), which loses that the tensor is fake.
    """
    modules: Any = sys.modules.get("bitsandbytes.nn.modules")
    if modules is None:
        yield
        return
    original = modules.fix_4bit_weight_quant_state_from_module

    def find(linear: Any) -> None:
        if getattr(linear.weight, "quant_state", None) is None:
            linear.weight.quant_state = linear.quant_state

    modules.fix_4bit_weight_quant_state_from_module = find
    try:
        yield
    finally:
        modules.fix_4bit_weight_quant_state_from_module = original
