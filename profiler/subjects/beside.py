"""A trained model with a frozen one beside it: a reference or a teacher that stays on the GPU."""

from typing import Any

import torch

from planner.run.recipe import Checkpointing, Method
from profiler.subjects.build import base_model, quantise, quiet
from profiler.subjects.options import StepOptions


class Beside(torch.nn.Module):
    """Two models that are loaded one after the other."""

    def __init__(self, trained: torch.nn.Module, other: torch.nn.Module) -> None:
        super().__init__()
        self.trained = trained
        self.other = other


def frozen(options: StepOptions, **changed: Any) -> torch.nn.Module:
    """Return the plain model of `options`, changed where told, without adapters or gradients."""
    from dataclasses import replace

    fields = {"checkpointing": Checkpointing.NONE, "head": "vocabulary", **changed}
    plain = replace(options, **fields)
    with torch.device("meta"), quiet():
        model: Any = base_model(plain)
        if plain.method is Method.QLORA:
            quantise(model, plain)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    result: torch.nn.Module = model.eval()
    return result
