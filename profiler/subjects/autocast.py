"""Autocast and gradient scaling as CUDA runs them, on tensors that say "cpu"."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from profiler.subjects.options import StepOptions


@contextlib.contextmanager
def autocast(options: StepOptions) -> Iterator[None]:
    """Run the forward pass under the options' autocast, if any."""
    if options.autocast == "none":
        yield
        return
    dtype = torch.bfloat16 if options.autocast == "bf16" else torch.float16
    with torch.autocast("cpu", dtype=dtype):
        yield


class FakeScaler(torch.amp.GradScaler):
    """GradScaler whose "did any gradient overflow" is always no: fake tensors have no values."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return optimizer.step(*args, **kwargs)
