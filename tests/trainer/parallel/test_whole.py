"""A parameter made whole again from uneven parts is what it was, on every rank."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.trainer.parallel.gloo import on_ranks
from trainer.parallel.whole import whole

pytestmark = pytest.mark.xdist_group("ranks")


def gathered(ranks, shard):
    torch.manual_seed(0)
    # rows that the ranks divide, that they don't, and fewer than there are ranks
    model = nn.ParameterList([nn.Parameter(torch.randn(rows, 3)) for rows in (6, 7, 1)])
    before = [parameter.detach().clone() for parameter in model]
    mesh = ranks.laid_out(shard=shard, device_type="cpu").mesh
    fully_shard(model, mesh=mesh if shard < ranks.size else mesh["shard"])
    return [torch.equal(whole(each), was) for each, was in zip(model, before, strict=True)]


@pytest.mark.parametrize("shard", [1, 3], ids=["copies", "parts"])
def test_parts_become_whole(shard):
    assert on_ranks(3, gathered, shard) == [[True] * 3] * 3
