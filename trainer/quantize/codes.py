"""Four-bit codes of one weight: a scale a block, the nearest level, and error feedback (GPTQ) between columns.

Shapes: O output rows, I input columns, B columns of a row that share a scale; weights and moments are fp32.
Everything here is arithmetic on a book of levels; what a format stores of it is in bnb.py and compressed.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.01
"""Of the mean second moment, added to each: GPTQ's (arXiv 2210.17323, section 3.3)."""
COLUMNS = 128
"""Columns whose errors are spread at once: the rest of the matrix is touched once for all of them."""
SHRINKS = (0.75, 0.85, 0.95, 1.05)
"""Scales that are tried, in shares of the one at which nothing clips; 13 shares lose 2 % less."""


@dataclass(frozen=True, slots=True)
class Book:
    """The levels of a code, ascending, and what the largest weight of a block is divided by."""

    levels: Tensor
    largest: float

    @property
    def midpoints(self) -> Tensor:
        """Where the nearest level changes."""
        return (self.levels[1:] + self.levels[:-1]) / 2

    @property
    def zero(self) -> int:
        """The code of the level nearest to nothing."""
        return int(self.levels.abs().argmin())


def nearest(scaled: Tensor, book: Book) -> Tensor:
    """Return the codes (uint8) of weights that are divided by their scale.

    As torch.bucketize, which takes four times as long over a matrix.
    """
    codes = torch.zeros(scaled.shape, dtype=torch.uint8, device=scaled.device)
    for middle in book.midpoints.tolist():
        codes += scaled > middle
    return codes


def values(codes: Tensor, scales: Tensor, book: Book) -> Tensor:
    """Return what codes [O, I] mean with scales [O, I / B], in fp32."""
    levels = book.levels.to(codes.device)[codes.int()]
    return (levels.view(*scales.shape, -1) * scales.unsqueeze(-1)).view(codes.shape)


def plain_scales(weight: Tensor, book: Book, block: int) -> Tensor:
    """Return for each block the scale [O, I / B] at which its largest weight just does not clip."""
    return _blocks(weight, block).abs().amax(-1) / book.largest


def searched_scales(weight: Tensor, importance: Tensor, book: Book, block: int) -> Tensor:
    """Return scales [O, I / B] with the least squared error, each column weighted by `importance` [I].

    The shares of SHRINKS, each followed by the scale that is best for the codes it gives.
    """
    blocks = _blocks(weight, block)
    weights = importance.view(-1, block)
    plain = blocks.abs().amax(-1) / book.largest
    levels = book.levels.to(weight.device)
    best, least = plain, torch.full_like(plain, torch.inf)
    for share in SHRINKS:
        scales = plain * share
        hit = levels[nearest(blocks / _divisor(scales).unsqueeze(-1), book).int()]
        weighted = hit * weights
        energy, overlap = (weighted * hit).sum(-1), (weighted * blocks).sum(-1)
        scales = torch.where(energy > 0, overlap / _divisor(energy), scales)
        # sum w (x - s l)^2 without its constant, at the s that is best for these levels
        loss = scales * (scales * energy - 2 * overlap)
        better = loss < least
        best, least = torch.where(better, scales, best), torch.where(better, loss, least)
    return best


def rounded(weight: Tensor, scales: Tensor, book: Book) -> Tensor:
    """Return the nearest codes [O, I] (uint8) of a weight against scales [O, I / B]."""
    blocks = _blocks(weight, weight.shape[1] // scales.shape[1])
    codes = nearest(blocks / _divisor(scales).unsqueeze(-1), book)
    return torch.where(scales.unsqueeze(-1) == 0, book.zero, codes).view(weight.shape)


def factor(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of columns, the weightiest first, and the upper Cholesky factor of the inverse.

    `moments` is E[x x'] [I, I]; inputs that are always zero carry no weight and are damped like the others.
    """
    order = moments.diagonal().argsort(descending=True, stable=True)
    matrix = moments[order][:, order].clone()
    diagonal = matrix.diagonal()
    damping = DAMPING * float(diagonal.mean())
    diagonal += damping if damping > 0 else 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    return order, torch.linalg.cholesky(inverse, upper=True)


def fed_back(weight: Tensor, scales: Tensor, book: Book, factored: tuple[Tensor, Tensor]) -> Tensor:
    """Return codes [O, I] (uint8): each column's error goes to the columns not yet rounded.

    `scales` [O, I / B] are those that a reader will multiply by, so their own rounding is fed back too;
    `factored` is factor(E[x x']).
    """
    order, upper = factored
    columns, block = weight.shape[1], weight.shape[1] // scales.shape[1]
    # a column is a row here: what one step touches lies together in memory
    rest = weight.t()[order].contiguous()
    by_column = scales.t().contiguous()
    home = (order // block).tolist()
    codes = torch.empty(rest.shape, dtype=torch.uint8, device=weight.device)
    levels = book.levels.to(weight.device)
    diagonal = upper.diagonal().tolist()
    for start in range(0, columns, COLUMNS):
        end = min(start + COLUMNS, columns)
        part, errors = rest[start:end], torch.empty_like(rest[start:end])
        for index in range(end - start):
            scale = by_column[home[start + index]]
            code = nearest(part[index] / _divisor(scale), book)
            code = torch.where(scale == 0, book.zero, code)
            codes[start + index] = code
            error = (part[index] - levels[code.int()] * scale) / diagonal[start + index]
            errors[index] = error
            pull = upper[start + index, start + index + 1 : end]
            part[index + 1 :] -= pull.unsqueeze(1) * error
        rest[end:] -= upper[start:end, end:].t() @ errors
    back = torch.empty_like(codes)
    back[order] = codes
    return back.t().contiguous()


def _blocks(weight: Tensor, block: int) -> Tensor:
    return weight.reshape(weight.shape[0], -1, block)


def _divisor(scales: Tensor) -> Tensor:
    """Return scales without zeros, to divide by."""
    return torch.where(scales == 0, 1.0, scales)
