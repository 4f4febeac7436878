"""load: what reading a model takes beside what stays of it, on the device and on the host.

`loads` says how ranks get their shards. full: each reads all of it in its own host memory and has it whole
on its GPU until it is divided (DeepSpeed engine.py: module.to(device) without zero.Init; litgpt). rank0: the
first reads it, the others get it by broadcast, a unit or a tensor at a time (torch FSDP sync_module_states,
set_model_state_dict with broadcast_from_rank0). sharded: made on meta and filled shard by shard (zero.Init
gathers a module at a time; torch.distributed.checkpoint nothing).
"""

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.quant.table import BITSANDBYTES
from planner.run.recipe import Method
from planner.run.resolved import Resolved
from planner.terms.activations import dequantized
from planner.terms.adapters import pissa_work
from planner.terms.counts import base_weights
from planner.terms.host import node_ranks, of_node
from planner.terms.term import Term
from planner.terms.weights import flat_units, gathered
from planner.terms.window import gathered_module

FULL, RANK0, SHARDED = "full", "rank0", "sharded"
SOURCE = "transformers from_pretrained; torch FSDP sync_module_states; DeepSpeed zero.Init"


def loading(model: ModelSpec, r: Resolved, base: Term) -> tuple[Term, ...]:
    """Return what loading needs beside the model; BLAS workspaces come with the first product."""
    here = r.placement
    if here.loads_whole:
        size = base.bytes * here.weight_shards + gathered(model, r, here.gathered_layers).bytes
        return (_whole(size, here.weight_shards),)
    if here.weight_shards > 1 and r.loads == FULL:
        return (_whole(base_weights(model, r).total, here.weight_shards),)
    if here.flat_buffers and r.switches.fsdp2_first_pass_loads:
        return _first_pass(model, r, base)
    return _broadcast(model, r), _made(model, r)


def _first_pass(model: ModelSpec, r: Resolved, base: Term) -> tuple[Term, ...]:
    """Return the root unit, whole and in its flat buffer; or the packed base until it is divided."""
    root, source = gathered(model, r, 0), "trainer/parallel/sharding.py: Sharded.__init__"
    flat = root.bytes if r.placement.weight_shards > 1 else 0
    if r.quantization:
        packed = base_weights(model, r).total - base.bytes + dequantized(model, r)
        if packed > root.bytes + flat:
            text = "packed on each GPU until it is divided {0:,} B more"
            return (Term("overhead", packed, text, (packed,), "trainer/model.py: load_policy"),)
    text = "the buffer that the root unit came through {0:,} B"
    return root, Term("communication", flat, text, (flat,), source)


def _whole(size: int, ranks: int) -> Term:
    return Term(
        "overhead",
        size,
        "the whole model on each GPU until it is sharded over {1} ranks {0:,} B",
        (size, ranks),
        "litgpt finetune/lora.py: load_checkpoint before FSDP; DeepSpeed engine.py without zero.Init",
    )


def _broadcast(model: ModelSpec, r: Resolved) -> Term:
    """Return what is whole for a moment while shards are made."""
    ranks, width = r.placement.weight_shards, element_bytes(r.dtype)
    if ranks == 1 or not r.loads:
        return Term("communication", 0)
    if r.placement.window or (r.loads == RANK0 and r.placement.flat_buffers):
        size = gathered_module(model) * width
        what = "the largest module"
    elif r.loads == RANK0:
        # its tensors are there until the one that they are joined in is cut
        size, what = 2 * max(flat_units(model)) * width, "the largest unit, twice,"
    else:
        return Term("communication", 0)
    text = "{0} whole on each of {1} ranks {2:,} B"
    return Term("communication", size, text, (what, ranks, size), SOURCE)


def _made(model: ModelSpec, r: Resolved) -> Term:
    """Return what is computed while tensors are loaded."""
    if r.lora_init.startswith("pissa") and r.method is not Method.FULL:
        return pissa_work(model, r)
    if r.quantization not in BITSANDBYTES:
        return Term("overhead", 0)
    size = dequantized(model, r)
    return Term(
        "overhead",
        size,
        "one 16-bit weight while it is quantised {0:,} B",
        (size,),
        "bitsandbytes quantize_4bit",
    )


def loading_host(model: ModelSpec, r: Resolved) -> Term:
    """Return a node's host memory while the model is read; nothing where the recipe does not say how."""
    if r.placement.weight_shards == 1 or r.loads not in (FULL, RANK0):
        return Term("weights", 0)
    size = base_weights(model, r).total
    read = Term("weights", size, "read: {0:,} B of weights", (size,), SOURCE)
    return of_node(read, node_ranks(r) if r.loads == FULL else 1)
