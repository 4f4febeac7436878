"""torchtitan's selective checkpointing by operation, for the trace: what its policy says of every aten call.

torchtitan distributed/activation_checkpoint.py: attention's results and every second aten::mm are kept,
the first one included; all else is computed again. profiler/cuda_attention.py stands in for CUDA's
attention kernels: what they return are its empty tensors.
"""

from collections import Counter
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

ATTENTION = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "new_empty",
    )
    if hasattr(torch.ops.aten, name)
)


def contexts() -> Any:
    """Return the contexts of a checkpoint's forward and of its second run, counting each on its own."""
    matmuls: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        keep = operation in ATTENTION
        if operation is torch.ops.aten.mm.default:
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def keep_whole(model: Any, every: int) -> None:
    """Leave only every layer number `every`, counted from one, checkpointed."""
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing")
        and module.gradient_checkpointing
        and "Layer" in type(module).__name__
    ]
    for number, layer in enumerate(layers, start=1):
        layer.gradient_checkpointing = number % every == 0
