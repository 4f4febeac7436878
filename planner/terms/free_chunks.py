"""A loss that cuts its rows by what is free on the card: unsloth_zoo's fused cross-entropy.

unsloth_zoo 2025.8 to 2026.10 fused_losses/cross_entropy_loss.py: half of torch.cuda.mem_get_info()'s
free bytes, read once when the loss first runs, is the target for one chunk's fp32 logits; since
2026.7 the target is at most 4 GiB. One chunk if all rows stay below it, else a multiple of four.
"""

from dataclasses import replace

from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.run.resolved import Resolved
from planner.terms.adapters import lora
from planner.terms.logits import scored_rows
from planner.terms.weights import weights

STEP = 4
"""More than one chunk are a multiple of this many."""


def with_chunks(model: ModelSpec, r: Resolved, machine: Machine) -> Resolved:
    """Return the recipe with the rows of a chunk, where what is free decides them."""
    if not r.trains or r.loss_chunk_rows or not r.law.free_share:
        return r
    rows = scored_rows(r, r.law)
    return replace(r, loss_chunk_rows=-(-rows // chunks(model, r, machine)))


def chunks(model: ModelSpec, r: Resolved, machine: Machine) -> int:
    """Return into how many chunks the rows are cut."""
    standing = weights(model, r).bytes + lora(model, r).bytes
    free = max(1, machine.vram_bytes - machine.context_bytes - standing)
    target = max(1, int(free * r.law.free_share))
    if r.law.max_chunk_bytes:
        target = min(target, r.law.max_chunk_bytes)
    whole = 4 * scored_rows(r, r.law) * model.vocab
    return 1 if whole <= target else -(-whole // (STEP * target)) * STEP
