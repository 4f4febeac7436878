"""What a format is: how one weight is stored, how it is read back, and config.json's block about it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.quant.schemes import Scheme

Tensors = dict[str, Tensor]
"""Tensors of one linear by the end of their names: "weight", "weight.absmax"."""
Factored = tuple[Tensor, Tensor]


class Format(Protocol):
    """One way to write four-bit weights."""

    name: str
    blocks: tuple[int, ...]
    """Columns that may share a scale; the first has the least bytes."""
    readers: str
    """Who loads it, for people."""
    fused: tuple[tuple[str, ...], ...]
    """Linears of one layer that a reader joins, by the last part of their names: they share a block or none."""

    def store(
        self,
        weight: Tensor,
        block: int,
        *,
        moments: Tensor,
        factored: Factored,
        dtype: torch.dtype,
    ) -> tuple[Tensors, Tensor]:
        """Return the tensors of a weight [O, I] with `block` columns a scale, and what they mean, in `dtype`."""
        ...

    def read_back(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the weight [O, I] that readers make of stored tensors."""
        ...

    def scheme(self, block: int) -> Scheme:
        """Return the planner's name for it."""
        ...

    def config(
        self, blocks: Mapping[str, int], left: Sequence[str], dtype: torch.dtype
    ) -> dict[str, Any]:
        """Return config.json's quantization_config: `blocks` by full name, `left` as they were."""
        ...


BLOCKS: tuple[int, ...] = (64, 32)
"""Of both formats that are written."""
