"""Checkpointing whose inputs wait on the host: the reference form, double buffered.

Non-reentrant checkpoints save their input through saved-tensor hooks. The hooks copy it to host
memory and, in backward, bring it back one layer ahead, so two inputs are on the device at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

KEEP_LAYERS = 1
"""The last layers' inputs stay on the device: backward wants them at once."""


class OffloadedCheckpoints:
    """Replaces the checkpoint function of a transformers model's layers."""

    def __init__(self, model: Any, *, keep_layers: int = KEEP_LAYERS) -> None:
        self._layers = [
            module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")
        ]
        stack = [layer for layer in self._layers if layer.__class__.__name__.endswith("Layer")]
        if stack:
            self._layers = stack
        self._resident = max(0, len(self._layers) - keep_layers)
        self._stash: dict[int, torch.Tensor] = {}
        self._staged: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            layer._gradient_checkpointing_func = self._wrap(index)

    def _wrap(self, index: int) -> Callable[..., Any]:
        def run(function: Any, *inputs: Any) -> Any:
            if index >= self._resident:
                return checkpoint(function, *inputs, use_reentrant=False)
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: self._pack(index, tensor), self._unpack
            )
            with hooks:
                return checkpoint(function, *inputs, use_reentrant=False)

        return run

    def _pack(self, index: int, tensor: torch.Tensor) -> Any:
        if tensor.ndim < 3 or not tensor.dtype.is_floating_point:
            return tensor
        self._stash[index] = tensor.to("cpu")
        return index

    def _unpack(self, packed: torch.Tensor | int) -> torch.Tensor:
        if not isinstance(packed, int):
            return packed
        if packed not in self._staged:
            self._fetch(packed)
        self._fetch(packed - 1)
        return self._staged.pop(packed)

    def _fetch(self, index: int) -> None:
        waiting = self._stash.pop(index, None)
        if waiting is not None:
            self._staged[index] = waiting.to("cuda")
