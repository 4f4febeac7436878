"""What a run holds whatever its batch: weights, adapters, gradients and optimizer states of one GPU."""

from typing import NamedTuple

from planner.models.spec import (
    LayerSpec,
    MixerKind,
    MixerSpec,
    MlpKind,
    MlpSpec,
    ModelSpec,
    ModuleKind,
    ModuleSpec,
)
from planner.run.recipe import VLLM
from planner.run.resolved import Resolved
from planner.terms.adapters import lora
from planner.terms.gradients import gradients
from planner.terms.optimizer import optimizer
from planner.terms.vllm_weights import vllm_weights
from planner.terms.weights import weights


class Standing(NamedTuple):
    """Bytes on one GPU; the step's temporaries are no part of them."""

    weights: int
    adapters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return sum(self)


def standing(model: ModelSpec, r: Resolved) -> Standing:
    """Return the terms of a plan that no batch size or length changes."""
    if not r.trains:
        served = vllm_weights(model, r).total if r.engine in VLLM else weights(model, r).bytes
        return Standing(served, 0, 0, 0)
    base = weights(model, r).bytes
    return Standing(
        base, lora(model, r).bytes, gradients(model, r).bytes, optimizer(model, r).states.bytes
    )


SIDE = 4096
"""Rows and columns of the matrices that stand for a model of which only the size is known."""


def model_of_size(parameters: int) -> ModelSpec:
    """Return a model of which only the number of parameters is known: square matrices of that many.

    Good for `standing`, which counts parameters; not for activations or a cache.
    """
    count, rest = divmod(parameters, SIDE * SIDE)
    modules = [ModuleSpec(name="rest", kind=ModuleKind.PARAMETER, shapes=((rest,),))]
    if count:
        square = ((SIDE, SIDE),)
        matrices = ModuleSpec(name="matrices", kind=ModuleKind.LINEAR, shapes=square, count=count)
        modules.insert(0, matrices)
    layer = LayerSpec(
        count=1,
        mixer=MixerSpec(kind=MixerKind.NONE),
        mlp=MlpSpec(kind=MlpKind.NONE),
        modules=tuple(modules),
    )
    return ModelSpec(
        name=f"a model of {parameters:,} parameters",
        model_type="unknown",
        hidden=0,
        vocab=0,
        tied=True,
        max_position=0,
        layers=(layer,),
        layer_order=(0,),
        embeddings=(),
        final=(),
        head=None,
    )
