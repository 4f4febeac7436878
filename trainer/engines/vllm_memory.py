"""What vLLM will take of the card, and the share of it that vLLM must be told.

vLLM refuses to start unless gpu_memory_utilization x total is free, even when the KV size is given in
bytes and the share decides nothing else (request_memory in v1/worker/utils.py, called by
v1/worker/gpu_worker.py; 0.31 to 0.33). Its default of 0.92 never holds beside a policy that is loaded.
"""

import gc
from collections.abc import Mapping
from typing import Any

import torch

from planner.errors import UsageError
from planner.machines.machine import Machine
from planner.models.hub import find_model
from planner.plan import Plan
from planner.run.recipe import Recipe
from planner.run.resolve import resolve
from planner.terms.engine import copy_bytes, engine_costs
from planner.units import format_bytes
from trainer.model import Policy


def engine_parts(
    policy: Policy, *, recipe: Recipe, plan: Plan | None, kv_bytes: int, total_bytes: int
) -> dict[str, int]:
    """Return what vLLM allocates until it is up: weights, KV cache, and the planner's rest."""
    spec = find_model(policy.source, revision=policy.revision)
    machine = Machine(vram_bytes=total_bytes)
    resolved = plan.resolved if plan is not None else resolve(spec, recipe, machine)
    busy = engine_costs(spec, resolved, machine, 0).work.bytes - copy_bytes(spec, resolved)
    return {
        # shared or its own: vLLM loads them either way, in the policy's dtype
        "weights": -(-spec.parameters // recipe.engine.tensor_parallel) * policy.dtype.itemsize,
        "KV cache": kv_bytes,
        "adapter slot, largest step, graphs and what is outside torch": busy,
    }


def memory_share(
    parts: Mapping[str, int], *, free_bytes: int, total_bytes: int, name: str
) -> float:
    """Return the share of the card that vLLM takes; it is what vLLM's own start-up check gets.

    Raises UsageError with the numbers when less than that is free.
    """
    needed = sum(parts.values())
    if needed >= free_bytes:
        listed = ", ".join(f"{key} {format_bytes(size)}" for key, size in parts.items())
        raise UsageError(
            f"recipe.engine.kind: vLLM needs {format_bytes(needed)} on {name} ({listed}), but "
            f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free",
            hint="close what else uses the card (nvidia-smi lists it), lower engine.kv_bytes or "
            "engine.max_num_seqs, or use engine kind transformers",
        )
    return needed / total_bytes


def free_and_total(device: Any = None) -> tuple[int, int]:
    """Return (free, total) bytes of the card as vLLM's own start-up measures them."""
    from vllm.utils.mem_utils import MemorySnapshot

    gc.collect()
    torch.accelerator.empty_cache()  # vLLM does so too: what torch only keeps in reserve is free
    snapshot = MemorySnapshot(device=device)
    return snapshot.free_memory, snapshot.total_memory
