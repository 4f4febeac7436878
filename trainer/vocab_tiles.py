"""The vocabulary in tiles: statistics and gradients of one block of rows, the maths of the head.

Shapes: N rows, R rows of one block, H hidden size, V vocabulary, T vocabulary columns of one tile.
`raw` are the matrix product's logits, z = softcap(logit_scale * raw) / temperature.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from planner.run.framework import pick
from planner.terms.logits import cut

MAX_TILE_ROWS = pick("vramwise").logits["chunked"].tile_rows
"""Rows of one block: W is read once per block, and [R, H] fp32 accumulators stay small."""
HALF = (torch.bfloat16, torch.float16)
_TRACED_DEVICE: ContextVar[str | None] = ContextVar("traced_device", default=None)


@contextmanager
def tiles_as_on(device_type: str) -> Iterator[None]:
    """Cut and compute tiles as on `device_type` inside: to trace a GPU run on fake CPU tensors."""
    token = _TRACED_DEVICE.set(device_type)
    try:
        yield
    finally:
        _TRACED_DEVICE.reset(token)


def device_type_of(tensor: Tensor) -> str:
    """Return the device type that tiles are cut for."""
    return _TRACED_DEVICE.get() or tensor.device.type


@dataclass(frozen=True, slots=True)
class LogitRule:
    """How raw logits become z, and the derivative of that."""

    temperature: float
    softcap: float
    logit_scale: float

    def apply_(self, raw: Tensor) -> Tensor:
        """Turn raw logits into z in place."""
        if self.softcap:
            raw.mul_(self.logit_scale / self.softcap).tanh_()
            return raw.mul_(self.softcap / self.temperature)
        factor = self.logit_scale / self.temperature
        return raw if factor == 1.0 else raw.mul_(factor)

    @property
    def slope(self) -> float:
        """dz/draw without the soft-cap's part."""
        return self.logit_scale / self.temperature

    def cap_slope(self, z: Tensor) -> Tensor | None:
        """Return the soft-cap's part of dz/draw, 1 - tanh^2, as a new tensor; None if it is off."""
        if not self.softcap:
            return None
        return (z * (self.temperature / self.softcap)).square_().neg_().add_(1.0)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How [N, V] is cut, and in which dtypes a tile is computed."""

    num_rows: int
    rows: int
    columns: int
    vocab: int
    accumulate: torch.dtype
    """fp32, or fp64 for fp64 inputs: statistics and accumulators."""
    operand: torch.dtype
    """dtype of the matrix products' operands."""

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, chunk_rows: int) -> "Tiles":
        """Cut [N, V] so that rows * columns <= chunk_rows * V."""
        num_rows, vocab = hidden.shape[0], weight.shape[0]
        rows, columns = cut(num_rows, vocab, chunk_rows, MAX_TILE_ROWS)
        accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # torch.mm(out_dtype=fp32) exists on CUDA only. On a CPU half operands would give logits
        # rounded to 8 bits (+-0.06 at z = 20), so there a tile of W is widened instead.
        device_type = device_type_of(hidden)
        wanted = hidden.dtype
        if torch.is_autocast_enabled(device_type):
            wanted = torch.get_autocast_dtype(device_type)
        operand = wanted if wanted in HALF and device_type == "cuda" else accumulate
        return Tiles(num_rows, rows, columns, vocab, accumulate, operand)

    def row_blocks(self) -> list[slice]:
        """Return the blocks of rows."""
        return slices(self.num_rows, self.rows)

    def column_blocks(self) -> list[slice]:
        """Return the blocks of vocabulary."""
        return slices(self.vocab, self.columns)

    def mm(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left @ right in the accumulate dtype; both in the operand dtype."""
        if self.operand == self.accumulate:
            return left @ right
        return torch.mm(left, right, out_dtype=self.accumulate)

    def logits(
        self, rule: LogitRule, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return z [R, T] of one tile; hidden and weight in the operand dtype."""
        raw = self.mm(hidden, weight.t())
        if bias is not None:
            raw.add_(bias)
        return rule.apply_(raw)


def slices(total: int, step: int) -> list[slice]:
    """Return consecutive slices of at most `step` that cover `total`."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _locate(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return (is the target in this tile [R], its column there [R, 1], anything valid if not)."""
    index = target - columns.start
    width = columns.stop - columns.start
    inside = (index >= 0) & (index < width)
    return inside, index.clamp(0, width - 1).unsqueeze(1)


class BlockScan(NamedTuple):
    """Statistics of one block of rows after all vocabulary tiles; [R] in the accumulate dtype."""

    logp: Tensor
    lse: Tensor
    """logsumexp(z)."""
    entropy: Tensor | None
    grad: Tensor | None
    """U = d logp / d hidden [R, H]."""


class _Running:
    """Online softmax over everything but the target, as far as the tiles have been seen."""

    def __init__(self, operand: Tensor, tiles: Tiles, *, entropy: bool, grad: bool) -> None:
        rows, width = operand.shape
        self.tiles = tiles
        # A target that no tile contains leaves NaN: loud, without a synchronisation.
        self.z_target = operand.new_full((rows,), float("nan"), dtype=tiles.accumulate)
        self.largest = torch.full_like(self.z_target, float("-inf"))
        self.total = torch.zeros_like(self.z_target)
        """sum exp(z - shift)."""
        self.weighted = torch.zeros_like(self.z_target) if entropy else None
        """sum exp(z - shift) z."""
        self.pulled = operand.new_zeros((rows, width), dtype=tiles.accumulate) if grad else None
        """sum exp(z - shift) * cap slope * W [R, H]."""

    @property
    def shift(self) -> Tensor:
        """The largest z so far; 0 for a row that has seen only -inf."""
        return self.largest.masked_fill(self.largest == float("-inf"), 0.0)

    def take_target(self, z: Tensor, target: Tensor, columns: slice) -> None:
        """Move the targets' z out of the tile: what is left are the others."""
        inside, index = _locate(target, columns)
        picked = z.gather(1, index).squeeze(1)
        self.z_target = torch.where(inside, picked, self.z_target)
        z.scatter_(1, index, picked.masked_fill(inside, float("-inf")).unsqueeze(1))

    def add(self, z: Tensor, rule: LogitRule, weight: Tensor) -> None:
        """Add a tile; z is used up."""
        before = self.largest
        self.largest = torch.maximum(before, z.amax(1))
        shift = self.shift
        decay = torch.exp(before - shift)
        cap_slope = rule.cap_slope(z) if self.pulled is not None else None
        e = z.sub_(shift.unsqueeze(1)).exp_()
        mass = e.sum(1)
        self.total = self.total * decay + mass
        if self.pulled is not None:
            # the taken target has z = -inf: slope -inf times weight 0
            source = e if cap_slope is None else cap_slope.nan_to_num_(neginf=0.0).mul_(e)
            part = self.tiles.mm(source.to(self.tiles.operand), weight)
            self.pulled.mul_(decay.unsqueeze(1)).add_(part)
        if self.weighted is not None:
            # sum e z = sum e ln e + shift * sum e, and entr(e) = -e ln e in place: no second tile
            log_mass = torch.special.entr(e, out=e).sum(1).neg_()
            self.weighted = self.weighted * decay + log_mass + shift * mass


def scan_block(
    tiles: Tiles,
    rule: LogitRule,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor],
    *,
    entropy: bool,
    grad: bool,
) -> BlockScan:
    """Walk the vocabulary once for one block: inputs are hidden [R, H], W, bias, target [R].

    With the target apart, logp = -softplus(lse_others - z_t), p_j = exp(z_j - lse) and
    U = slope * ((1 - p_t) W_t - sum over the others of p_j W_j), 1 - p_t = -expm1(logp).
    """
    hidden, weight, bias, target = inputs
    operand = hidden.to(tiles.operand)
    running = _Running(operand, tiles, entropy=entropy, grad=grad)
    for columns in tiles.column_blocks():
        w_tile = weight[columns].to(tiles.operand)
        z = tiles.logits(rule, operand, w_tile, None if bias is None else bias[columns])
        running.take_target(z, target, columns)
        running.add(z, rule, w_tile)
        del z, w_tile  # before the next tile is made, not after

    z_target, shift = running.z_target, running.shift
    lse_others = shift + running.total.log()
    logp = -softplus(lse_others - z_target, threshold=1e9)
    lse = torch.logaddexp(lse_others, z_target)
    scale = torch.exp(shift - lse)
    entropy_values = None
    if running.weighted is not None:
        entropy_values = lse - (running.weighted * scale + logp.exp() * z_target)
    if running.pulled is not None:
        coefficient = -torch.expm1(logp) * rule.slope
        cap_slope = rule.cap_slope(z_target)
        if cap_slope is not None:
            coefficient.mul_(cap_slope)
        running.pulled.mul_((-scale * rule.slope).unsqueeze(1))
        running.pulled.addcmul_(weight[target].to(tiles.accumulate), coefficient.unsqueeze(1))
    return BlockScan(logp, lse, entropy_values, running.pulled)


def backward_block(
    tiles: Tiles,
    rule: LogitRule,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor],
    row_stats: tuple[Tensor, Tensor, Tensor],
    *,
    needs_hidden: bool,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor | None:
    """Add one block to the gradients of W and bias; return that of hidden [R, H] or None.

    inputs as in scan_block; row_stats are logp, lse and the upstream gradient g, [R] each.
    D = d logp / d z lies in [-1, 1] whatever the loss is scaled by: only D passes through half
    precision, g multiplies in fp32. For dW = D^T (g h), rows are scaled by g / max|g| and the
    product by max|g|.
    """
    hidden, weight, bias, target = inputs
    logp, lse, grad = row_stats
    operand = hidden.to(tiles.operand)
    largest = grad.abs().max().clamp_min(torch.finfo(grad.dtype).tiny)
    scaled_hidden = (hidden * (grad / largest).unsqueeze(1)).to(tiles.operand)
    pulled = operand.new_zeros(hidden.shape, dtype=tiles.accumulate) if needs_hidden else None
    for columns in tiles.column_blocks():
        w_tile = weight[columns].to(tiles.operand)
        z = tiles.logits(rule, operand, w_tile, None if bias is None else bias[columns])
        cap_slope = rule.cap_slope(z)
        d = z.sub_(lse.unsqueeze(1)).exp_().neg_()
        inside, index = _locate(target, columns)
        exact = torch.where(inside, -torch.expm1(logp), d.gather(1, index).squeeze(1))
        d.scatter_(1, index, exact.unsqueeze(1))
        if cap_slope is not None:
            d.mul_(cap_slope)
        if grad_bias is not None:
            grad_bias[columns] += (grad * rule.slope) @ d
        d_operand = d.to(tiles.operand)
        del z, d, cap_slope
        if pulled is not None:
            pulled += tiles.mm(d_operand, w_tile)
        if grad_weight is not None:
            part = tiles.mm(d_operand.t(), scaled_hidden)
            grad_weight[columns] += part.mul_(largest * rule.slope)
            del part
        del d_operand, w_tile
    return None if pulled is None else pulled.mul_((grad * rule.slope).unsqueeze(1))
