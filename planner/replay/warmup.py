"""What transformers asks of the allocator before it loads: modeling_utils.py, caching_allocator_warmup."""

from planner.dtypes import element_bytes
from planner.models.spec import ModelSpec
from planner.run.resolved import Resolved
from planner.terms.counts import base_weights

KEPT_FREE = 1_288_490_188
"""Bytes that the warm-up leaves, 1.2 GiB."""


def warmup_bytes(model: ModelSpec, r: Resolved, capacity_bytes: int) -> int:
    """Return what is taken in one block and given back, so that loading finds it in the cache."""
    if r.switches.warmup == "none":
        return 0
    wanted = model.parameters * element_bytes(r.dtype)
    if r.quantization and r.switches.warmup == "half":
        # as many 16-bit elements as a quarter of the bytes that 16 bits would take
        return 2 * (max(0, min(wanted, capacity_bytes - KEPT_FREE)) // 4)
    if r.quantization:
        base = base_weights(model, r)
        wanted = base.quantized_parameters // 2 + base.rest
    return max(0, min(wanted, capacity_bytes - KEPT_FREE))
