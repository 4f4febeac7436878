"""A parameter in parts made whole, on every rank, for who cannot work on a part."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# torch 2.13 has a new name, and warns of the old one
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@torch.no_grad()
def whole(parameter: Tensor) -> Tensor:
    """Return all of a parameter; all ranks call it. What is here already is not copied.

    FSDP2 cuts along the first dimension, ceil(d / N) rows a rank. DTensor's own full_tensor() makes its
    outputs by functional collectives, which on gloo keep what they have gathered for a while.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    group = _group(parameter)
    local = parameter.to_local().detach()
    parts = group.size()
    if parts == 1:
        return local
    shape = parameter.shape
    rows = -(-shape[0] // parts)
    if len(local) < rows:
        part = local.new_zeros((rows, *shape[1:]))
        part[: len(local)] = local
        local = part
    gathered = local.new_empty((rows * parts, *shape[1:]))
    _gather(gathered, local.contiguous(), group=group)
    return gathered[: shape[0]]


@torch.no_grad()
def gather_into(target: Tensor, parameter: Tensor) -> None:
    """Copy all of a parameter to `target`, of its shape and dtype; all ranks call it.

    Where every rank has as many rows nothing is whole in between.
    """
    if isinstance(parameter, DTensor) and target.is_contiguous():
        group = _group(parameter)
        if group.size() > 1 and parameter.shape[0] % group.size() == 0:
            _gather(target, parameter.to_local().detach().contiguous(), group=group)
            return
    target.copy_(whole(parameter))


def _group(parameter: DTensor) -> Any:
    """Return the ranks that a parameter is divided over."""
    return parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)
