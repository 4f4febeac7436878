"""Packing: several samples end to end in a row of the recipe's length, kept apart.

Positions begin anew at each sample, and attention is block-diagonal: flash attention reads the positions;
SDPA and eager attention get a mask, one for all layers. So a sample's gradient is what it is by itself.
Rows are filled best fit, longest first, from WINDOW samples of the epoch's order at a time (TRL 1.16
packs its data set by that rule in the same windows).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from planner.errors import UnsupportedError
from planner.mixers.registry import mixer_of
from planner.models.spec import ModelSpec
from trainer.batching import fill_rows
from trainer.data import Order
from trainer.shared_prefix import MASKED, padded

WINDOW = 1000
"""Samples that are packed together."""


@dataclass
class PackedOrder(Order):
    """An order of rows: `take` returns the samples of the next rows; positions count rows.

    `size` is the number of samples; `rows` the rows of the first epoch.
    """

    lengths: Sequence[int] = ()
    row_tokens: int = 0

    def __post_init__(self) -> None:
        self._rows: list[list[int]] = []
        self.rows = len(self._packed(0))

    def take(self, count: int) -> list[int]:
        """Return the samples of the next `count` rows, row by row."""
        taken: list[int] = []
        for _ in range(count):
            if not self._rows:
                self._rows = self._packed(self.epoch)
            taken += self._rows[self.position]
            self.position += 1
            if self.position >= len(self._rows):
                self.epoch, self.position, self._rows = self.epoch + 1, 0, []
        return taken

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        names = ("size", "seed", "shuffle", "epoch", "position")
        return {name: getattr(self, name) for name in names} | {"row_tokens": self.row_tokens}

    def restore(self, state: Any) -> None:
        """Continue where `state` was taken; refuses another data set or row length."""
        if state.get("row_tokens", 0) != self.row_tokens:
            raise UnsupportedError(
                f"recipe.packing: rows of {self.row_tokens} tokens, the checkpoint was made with "
                f"{state.get('row_tokens') or 'none'}",
                hint="resume with the recipe it was made with",
            )
        super().restore(state)
        self._rows = []

    def _packed(self, epoch: int) -> list[list[int]]:
        order = Order(size=self.size, seed=self.seed, shuffle=self.shuffle, epoch=epoch)
        samples = order.take(self.size)
        return [row for window in _windows(samples) for row in self._fill(window)]

    def _fill(self, window: Sequence[int]) -> list[list[int]]:
        rows = fill_rows([self.lengths[index] for index in window], self.row_tokens)
        return [[window[place] for place in row] for row in rows]


def _windows(samples: Sequence[int]) -> Iterator[Sequence[int]]:
    bounds = [*range(0, len(samples), WINDOW), len(samples)]
    for low, high in pairwise(bounds):
        yield samples[low:high]


def block_mask(position_ids: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, T, T] of rows whose samples begin at position 0, on their device.

    A token sees its own sample up to itself. In memory rows are padded as SDPA's kernels want them.
    """
    owner = (position_ids == 0).cumsum(-1)
    rows, width = position_ids.shape
    mask = torch.full(
        (rows, 1, width, padded(width)), MASKED, dtype=dtype, device=position_ids.device
    )
    for row in range(rows):  # one row's comparison at a time: it is as large as the row's mask
        seen = (owner[row, :, None] == owner[row, None, :]).tril_()
        mask[row, 0, :, :width].masked_fill_(seen, 0.0)
    return mask[..., :width]


def keeps_apart(spec: ModelSpec) -> bool:
    """Return whether samples of one row can be kept apart in every layer."""
    return all(mixer_of(mixer).keeps_apart for layer in spec.layers for mixer in layer.mixers)


def refuse_mixing(spec: ModelSpec, *, asked: str) -> None:
    """Raise UnsupportedError where a state would run from one sample into the next."""
    if not keeps_apart(spec):
        kinds = {mixer.kind.value for layer in spec.layers for mixer in layer.mixers}
        raise UnsupportedError(
            f"{asked}: true, but {spec.model_type}'s {', '.join(sorted(kinds))} layers would carry one "
            "sample into the next",
            hint=f"{asked}: false",
        )
