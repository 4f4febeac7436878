"""A decoder layer over tensor ranks: what DTensor's own parallel styles make autograd keep, beside the tape.

One rank of four runs on torch's fake process group. The layer is torchtitan's (models/llama3/infra/
parallelize.py), with sequence parallelism or with transformers' all-reduced outputs. torch's RMSNorm
keeps other tensors on a CPU than its CUDA kernel, so what the norms keep is left out on both sides.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.families import model_spec_from_config
from planner.layer.costs import kept_costs
from planner.run.ranks import rank_runs
from planner.run.resolve import resolve
from planner.run.runfile import make_recipe
from planner.terms.activations import op_settings
from tests.planner.toys import gpus

pytestmark = pytest.mark.xdist_group("ranks")
RANKS, TOKENS = 4, 64
HIDDEN, INNER, HEADS, GROUPS = 128, 384, 8, 4
WIDTH = HIDDEN // HEADS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k = nn.Linear(HIDDEN, GROUPS * WIDTH, bias=False)
        self.v = nn.Linear(HIDDEN, GROUPS * WIDTH, bias=False)
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.view(1, TOKENS, -1, WIDTH) for part in (self.q(x), self.k(x), self.v(x))]
        q, k, v = (part.transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).reshape(1, TOKENS, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.mix = nn.RMSNorm(HIDDEN), Attention()
        self.middle, self.feed = nn.RMSNorm(HIDDEN), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.before(x))
        return x + self.feed(self.middle(x))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def parallel_block(mesh: DeviceMesh, *, sequence: bool) -> Block:
    block = Block().to(torch.bfloat16)
    out = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    styles = {
        name: ColwiseParallel() for name in ("mix.q", "mix.k", "mix.v", "feed.gate", "feed.up")
    }
    styles |= {"mix.o": out, "feed.down": out}
    if sequence:
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        styles |= {name: SequenceParallel() for name in ("before", "middle")}
        styles |= {name: PrepareModuleInput(**whole) for name in ("mix", "feed")}
    return parallelize_module(block, mesh, styles)


def kept_bytes(block: Block, tokens: int) -> int:
    """Return what autograd holds of a forward on `tokens` local tokens, parameters and norms apart."""
    own = {_local(p).untyped_storage().data_ptr() for p in block.parameters()}
    held: dict[int, torch.Tensor] = {}
    inside = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in own and not inside:
            held[storage.data_ptr()] = tensor
        return tensor

    for norm in (block.before, block.middle):
        norm.register_forward_pre_hook(lambda *_: inside.append(1))
        norm.register_forward_hook(lambda *_: inside.clear())
    x = torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x)
    del out
    return sum(_local(tensor).untyped_storage().nbytes() for tensor in held.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("sequence", [True, False])
def test_the_tape_keeps_what_autograd_keeps_on_a_tensor_rank(
    mesh: DeviceMesh, sequence: bool
) -> None:
    spec = model_spec_from_config(
        {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "num_hidden_layers": 1,
            "vocab_size": 256,
            "tie_word_embeddings": False,
        }
    )
    framework = "torchtitan" if sequence else "hf-trainer"
    recipe = make_recipe(
        task="sft", method="full", framework=framework, sharding="ddp", dtype="bf16",
        mixed_precision="none", context=TOKENS, checkpointing="none", attention="flash",
        parallel={"tensor": RANKS},
    )  # fmt: skip
    (rank,) = rank_runs(spec, resolve(spec, recipe, gpus(RANKS)))
    settings = op_settings(rank.model, rank.resolved)._replace(
        fused=frozenset({"rmsnorm"}), rope=False, repeat_kv=False
    )
    kept = kept_costs(rank.model.layers[0], HIDDEN, settings).kept.at(TOKENS)
    local = TOKENS // RANKS if sequence else TOKENS
    norms = 2 * (local * HIDDEN * 2 + TOKENS * 8)  # inputs and statistics
    assert kept_bytes(parallel_block(mesh, sequence=sequence), local) == kept - norms
