"""Optimizer states in pinned host memory, streamed on CUDA's side streams: as states on the device step."""

import pytest
import torch
from torch import nn

from planner.run.recipe import Optimizer
from trainer.optim import make_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPES = 40 * ((16, 4096), (4096, 16)) + ((3_000, 2_048), (33,))
"""Adapters of several bundles, and a tensor that lies in three."""


def _stepped(kind: Optimizer, *, offload: bool, masters: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        nn.Parameter(torch.randn(shape, generator=generator).to("cuda", torch.bfloat16))
        for shape in SHAPES
    ]
    named = [(str(number), tensor) for number, tensor in enumerate(tensors)]
    optimizer = make_optimizer(named, kind=kind, lr=1e-2, master_weights=masters, offload=offload)
    for _ in range(4):
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=generator).to("cuda", torch.bfloat16)
        optimizer.step()
    states = [
        value
        for tensor in tensors
        for value in optimizer.state[tensor].values()
        if torch.is_tensor(value)
    ]
    assert all(value.is_cuda is not offload for value in states)
    return [value.cpu() for value in (*tensors, *states)]


@pytest.mark.parametrize("kind", [Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.LION])
def test_streamed_states_step_as_resident_ones(kind: Optimizer) -> None:
    here = _stepped(kind, offload=False, masters=True)
    there = _stepped(kind, offload=True, masters=True)
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
