"""What ranks tell each other, on real gloo processes, and that one process needs none of it."""

import pytest
import torch
import torch.distributed as dist

from tests.trainer.parallel.gloo import on_ranks
from trainer.parallel.ranks import Ranks, join

pytestmark = pytest.mark.xdist_group("ranks")


def talk(ranks: Ranks) -> dict[str, object]:
    own = torch.tensor([1.0, 10.0 * ranks.rank])
    laid = ranks.laid_out(shard=1, device_type="cpu")
    ranks.barrier()
    return {
        "sum": ranks.sum(0.5 + ranks.rank),
        "max": ranks.max(float(ranks.rank)),
        "min": ranks.min(float(ranks.rank)),
        "tensor": ranks.sum(own).tolist(),
        "own": own.tolist(),
        "any": ranks.any(ranks.rank == 1),
        "all": ranks.all(ranks.rank == 1),
        "broadcast": ranks.broadcast_object({"from": ranks.rank}, source=1),
        "gather": ranks.gather_objects("ab"[ranks.rank]),
        "first": ranks.first,
        "mesh": tuple(laid.mesh.shape),
        "local": ranks.local_rank,
    }


def test_two_ranks_agree():
    first, second = on_ranks(2, talk)
    for key in ("sum", "max", "min", "tensor", "any", "all", "broadcast", "gather", "mesh"):
        assert first[key] == second[key], key
    assert first["sum"] == 2.0
    assert first["tensor"] == [2.0, 10.0]
    assert (first["max"], first["min"]) == (1.0, 0.0)
    assert second["own"] == [1.0, 10.0], "a reduction leaves its argument alone"
    assert first["any"]
    assert not first["all"]
    assert first["broadcast"] == {"from": 1}
    assert first["gather"] == ["a", "b"]
    assert first["first"]
    assert not second["first"]
    assert second["local"] == 1
    assert first["mesh"] == (2, 1)


def test_alone_nothing_is_sent(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = join()
    assert not dist.is_initialized()
    assert ranks == Ranks.alone()
    own = torch.tensor([3.0])
    assert ranks.sum(own) is own
    assert ranks.max(2.5) == 2.5
    assert ranks.min(2.5) == 2.5
    assert ranks.gather_objects("x") == ["x"]
    assert ranks.broadcast_object("x") == "x"
    assert ranks.first
    assert not ranks.several
    ranks.barrier()
