"""The SFT step of the Hugging Face Trainer on samples with images or sounds, at real sizes.

What a tower computes from the images' sizes (positions, windows, lengths) is computed on real
numbers, as its code does, and enters the trace as tensors of the same shape: a tower branches on it.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from profiler.storages import StorageTracker
from profiler.subjects.hf_sft import HfSft
from profiler.subjects.options import StepOptions

FROM_SIZES = (
    "get_vision_position_ids",
    "get_vision_attention_seqlens",
    "get_vision_window_index",
    "get_vision_interpolation_indices_and_weights",
)
"""transformers/vision_utils.py: what Qwen-VL's towers make of the patches' grid."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """A batch's images as their processor hands them over: shapes of floats, and numbers."""

    floats: dict[str, tuple[int, ...]]
    grids: dict[str, list[list[int]]] = field(default_factory=dict)
    """Sizes that the code branches on."""
    ints: dict[str, tuple[int, ...]] = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    """Kinds of attention whose [1, 1, T, T] masks the model makes of its images (Gemma 3), by a function
    that fake tensors cannot run."""


class HfImages(HfSft):
    """Supervised fine-tuning of a multimodal model."""

    name = "hf-images"

    def __init__(self, options: StepOptions, pictures: Pictures) -> None:
        super().__init__(replace(options, multimodal=True))
        self.pictures = pictures
        self.batch: dict[str, Any] = {}
        """Trainer.get_batch_samples holds a step's batches until the step is over."""

    def run(self, model: torch.nn.Module, tracker: StorageTracker) -> None:
        """Run the optimizer steps."""
        with real_sizes(str(self.options.config["model_type"])):
            super().run(model, tracker)

    def inputs(self) -> dict[str, Any]:
        """Return a batch with its images."""
        made = super().inputs()
        for name, shape in self.pictures.floats.items():
            made[name] = torch.zeros(shape)
        for name, shape in self.pictures.ints.items():
            made[name] = torch.zeros(shape, dtype=torch.long)
        self.batch = dict(made)
        if self.pictures.masks:
            rows = (self.options.micro_batch, 1, self.options.length, self.options.length)
            made["attention_mask"] = {
                kind: torch.zeros(rows, dtype=torch.bool) for kind in self.pictures.masks
            }
        import numpy

        return made | {name: numpy.array(grid) for name, grid in self.pictures.grids.items()}


@contextlib.contextmanager
def real_sizes(kind: str) -> Iterator[None]:
    """Let the code of model type `kind` compute on real sizes; its checks of token counts are off."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    before = {name: vars(module)[name] for name in FROM_SIZES if name in vars(module)}
    checks = os.environ.get("TRANSFORMERS_DISABLE_TORCH_CHECK")
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    for name, function in before.items():
        setattr(module, name, _outside(function))
    if kind == "mistral3":
        before["torch"] = vars(module)["torch"]
        vars(module)["torch"] = _SizesAsNumbers()
    text: Any = getattr(module, "Qwen3VLTextModel", None)
    added = None if text is None else text._deepstack_process
    if text is not None:
        text._deepstack_process = _add_to_first_rows
    try:
        yield
    finally:
        if text is not None:
            text._deepstack_process = added
        for name, function in before.items():
            setattr(module, name, function)
        if checks is None:
            del os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"]
        else:
            os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = checks


class _SizesAsNumbers:
    """torch as Mistral 3 sees it: the sizes of images, from which it makes lengths, stay numbers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def as_tensor(sizes: Any, **_where: Any) -> "_Sizes":
        return _Sizes(sizes)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Heights and widths: `//` and `prod(dim=-1)` of an integer tensor."""

    values: Any

    def __floordiv__(self, unit: int) -> "_Sizes":
        return _Sizes(self.values // unit)

    def prod(self, dim: int) -> Any:
        return self.values.prod(axis=dim)


def _add_to_first_rows(
    _self: Any, hidden: torch.Tensor, _mask: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Add Qwen3-VL's deep features to as many rows as its mask would pick, by the same operations."""
    rows = torch.arange(features.shape[0], device=hidden.device)
    copy = hidden.clone()
    copy[0, rows] = copy[0, rows] + features.to(hidden.dtype)
    return copy


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(grid: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            found = function(torch.tensor(grid), *args, **kwargs)
            parts = torch.utils._pytree.tree_map(_described, found)
        return torch.utils._pytree.tree_map_only(_Shape, _Shape.make, parts)

    return run


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor that is made inside the trace."""

    shape: torch.Size
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


def _described(value: Any) -> Any:
    """Return a tensor's shape; lengths, the int32 ones, stay numbers."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.numpy() if value.dtype is torch.int32 else _Shape(value.shape, value.dtype)
