"""Turns a model on the meta device into one on fake (or real, zero) tensors. Tied weights stay tied."""

from typing import Any

import torch

from profiler.storages import StorageTracker

ADAPTER_MARKS = ("lora_", "modules_to_save", "trainable_tokens")


def materialise(model: torch.nn.Module, tracker: StorageTracker) -> None:
    """Allocate every parameter, buffer and quantisation state of `model` in place.

    Runs under the caller's modes: fake tensors inside a FakeTensorMode, real ones outside.
    """
    made: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                if id(tensor) not in made:
                    made[id(tensor)] = _allocate(tensor, path, tracker)
                tensors[name] = made[id(tensor)]


def term_of_parameter(path: str) -> str:
    """Return "adapters" or "weights"."""
    return "adapters" if any(mark in path for mark in ADAPTER_MARKS) else "weights"


def _allocate(tensor: torch.Tensor, path: str, tracker: StorageTracker) -> torch.Tensor:
    data = _empty(tensor, path, tracker)
    if not isinstance(tensor, torch.nn.Parameter):
        return data
    parameter = torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        allocate_state(state, path, tracker)
        _copy_attributes(tensor, parameter, state)
        # transformers moves the 16-bit weight to the device, then quantises it there.
        tracker.temporary([state.shape.numel() * state.dtype.itemsize], op="quantize_4bit")
    return parameter


def allocate_state(state: Any, path: str, tracker: StorageTracker) -> None:
    """Allocate a 4-bit weight's constants: block maxima and codes, of both levels when nested."""
    for part in (state, state.state2):
        if part is not None:
            part.absmax = _empty(part.absmax, path, tracker)
            part.code = _empty(part.code, path, tracker)
    if getattr(state, "offset", None) is not None:
        state.offset = _empty(state.offset, path, tracker)


def _copy_attributes(source: Any, target: Any, state: Any) -> None:
    """Keep what bitsandbytes and PEFT look for on a 4-bit parameter."""
    target.quant_state = state
    target.bnb_quantized = True
    for name in ("quant_type", "quant_storage", "blocksize", "compress_statistics"):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


def _empty(tensor: torch.Tensor, path: str, tracker: StorageTracker) -> torch.Tensor:
    data = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    tracker.adopt(data, term=term_of_parameter(path), module=path.rpartition(".")[0], op="load")
    return data
