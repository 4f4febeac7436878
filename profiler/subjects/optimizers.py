"""The optimizers of a recipe, with the implementation CUDA uses by default."""

import copy
from typing import Any

import torch

from planner.errors import UnsupportedError
from planner.run.recipe import Optimizer
from profiler.storages import StorageTracker

PAGED_ELEMENTS = 100_000
"""bitsandbytes pages states of at least this many elements (optim/optimizer.py, get_state_buffer)."""


def make_optimizer(
    kind: Optimizer, groups: list[list[torch.nn.Parameter]], tracker: StorageTracker
) -> torch.optim.Optimizer:
    """Return the optimizer, stepping one group after another; raises UnsupportedError for one that cannot be
    traced."""
    parameters = [{"params": group} for group in groups]
    if kind in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
        fused = kind is Optimizer.ADAMW_FUSED
        return torch.optim.AdamW(parameters, lr=1e-4, foreach=not fused, fused=fused)
    if kind in (Optimizer.SGD, Optimizer.SGD_MOMENTUM):
        momentum = 0.9 if kind is Optimizer.SGD_MOMENTUM else 0.0
        return torch.optim.SGD(parameters, lr=1e-4, momentum=momentum, foreach=True)
    if kind is Optimizer.ADAFACTOR:
        from transformers import Adafactor

        return Adafactor(parameters, scale_parameter=False, relative_step=False, lr=1e-4)
    if kind is Optimizer.MUON:
        raise UnsupportedError(
            "optimizer muon cannot be traced: its parameter split is the trainer's"
        )
    return _bitsandbytes(kind, parameters, tracker)


def _bitsandbytes(
    kind: Optimizer, parameters: list[dict[str, Any]], tracker: StorageTracker
) -> torch.optim.Optimizer:
    import bitsandbytes as bnb

    base: Any = {
        Optimizer.ADAMW_8BIT: bnb.optim.AdamW8bit,
        Optimizer.PAGED_ADAMW_8BIT: bnb.optim.AdamW8bit,
        Optimizer.PAGED_ADAMW: bnb.optim.AdamW,
        Optimizer.LION: bnb.optim.Lion,
        Optimizer.LION_8BIT: bnb.optim.Lion8bit,
    }.get(kind)
    if base is None:
        raise UnsupportedError(f"optimizer {kind} cannot be traced: no subject makes it")
    if kind not in (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT):
        plain: torch.optim.Optimizer = base(parameters, lr=1e-4)
        return plain

    class Paged(base):  # type: ignore[misc]
        """Large states live in managed memory, outside torch's allocator."""

        def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
            if p.numel() < PAGED_ELEMENTS:
                return super().get_state_buffer(p, dtype=dtype)
            with tracker.on_host():
                return super().get_state_buffer(p, dtype=dtype)

    return Paged(parameters, lr=1e-4)


def keep_embeddings_in_32_bit(model: torch.nn.Module, optimizer: Any) -> None:
    """Give embeddings 32-bit state, as the HF Trainer does for 8-bit bitsandbytes optimizers.

    Source: transformers 5.19, trainer.py, create_optimizer: register_module_override(optim_bits=32).
    """
    if getattr(getattr(optimizer, "args", None), "optim_bits", 32) != 8:
        return
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    # bitsandbytes keeps overrides in one manager of the process: this trace gets its own
    manager = copy.copy(optimizer.mng)
    manager.index2config = {
        (group, place): {"optim_bits": 32}
        for group, settings in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(settings["params"])
        if id(parameter) in embeddings
    }
    optimizer.mng = manager


def tag_states(optimizer: torch.optim.Optimizer, tracker: StorageTracker) -> None:
    """Tag the optimizer's state tensors."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                block = tracker.block_of(value)
                if block is not None:
                    block.term = "optimizer"
