"""The log-prob head: hidden, W, target -> log-probabilities [N]; the logits [N, V] never exist.

Both passes walk tiles of rows x vocabulary with running (online) softmax statistics, as attention
kernels do, so what is alive is one tile. Shapes: N rows, R rows of one block, H hidden size,
V vocabulary, T vocabulary columns of one tile.

Two departures from the textbook, both about precision:

* logp = -softplus(logsumexp of the others - z_t). The usual z_t - logsumexp(z) rounds to 0 once
  p_t > 1 - 6e-8, and its gradient 1 - p_t with it; here 1 - p_t = -expm1(logp) stays exact.
* the gradient of a frozen head is made in the forward: U = d logp / d hidden = (onehot - p) W, so
  the backward is one scale per row. The upstream gradient (loss normaliser, GradScaler) never
  passes through half precision, and the vocabulary is visited once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.units import MiB

MAX_TILE_ROWS = 2048
"""Rows of one block: W is read once per block, and [R, H] fp32 accumulators stay small."""
HALF = (torch.bfloat16, torch.float16)


class LogProbs(NamedTuple):
    """What the head returns."""

    logp: Tensor
    """[N] fp32 (fp64 for fp64 inputs): log p(target)."""
    entropy: Tensor | None
    """[N], without gradient; None unless asked for."""


def logprob_head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = 0.0,
    logit_scale: float = 1.0,
    chunk_rows: int | None = None,
    entropy: bool = False,
    direct_grad: bool = True,
) -> LogProbs:
    """Return log p(target) of softmax(softcap(logit_scale * (hidden W^T + bias)) / temperature).

    hidden [N, H], weight [V, H] (fp32, bf16, fp16; they may differ), target [N] integers in
    [0, V), bias [V]. softcap 0 or None = off. `chunk_rows` C bounds the scratch: a tile has at most C * V
    logits (6 bytes each in half precision); None = chosen from the sizes. `direct_grad`: a
    trainable leaf weight gets its gradient added straight into weight.grad tile by tile (no second
    [V, H]); False, hooks on the weight or torch.autograd.grad return it through autograd.
    Raises ValueError naming the argument for shapes or settings that don't match.
    """
    softcap = softcap or 0.0
    _check(hidden, weight, target, bias, temperature, softcap, chunk_rows)
    if chunk_rows is None:
        chunk_rows = default_chunk_rows(hidden, weight)
    head = _Head(float(temperature), float(softcap), float(logit_scale))
    needs_grad = torch.is_grad_enabled()
    trainable = needs_grad and (weight.requires_grad or (bias is not None and bias.requires_grad))
    if trainable:
        logp, ent = _TrainableHead.apply(
            hidden, weight, bias, target, head, chunk_rows, entropy, direct_grad
        )
    else:
        logp, ent = _FrozenHead.apply(hidden, weight, bias, target, head, chunk_rows, entropy)
    return LogProbs(logp, ent if entropy else None)


def default_chunk_rows(hidden: Tensor, weight: Tensor) -> int:
    """Return C such that 6 * C * V bytes is 16-256 MiB: a quarter of the head's own bf16 weight.

    Scratch that is small beside the weight is never what a run dies of, and a tile above that is
    already compute bound.
    """
    vocab, width = weight.shape
    budget = min(256 * MiB, max(16 * MiB, vocab * width * 2 // 4))
    return max(1, budget // (6 * vocab))


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float,
    chunk_rows: int | None,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: need [N, H] and [V, H]"
        )
    if target.shape != hidden.shape[:1] or target.is_floating_point():
        raise ValueError(
            f"target {tuple(target.shape)} {target.dtype}: need [{hidden.shape[0]}] integers"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}: need [{weight.shape[0]}]")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: must be above 0")
    if softcap < 0:
        raise ValueError(f"softcap {softcap}: must be 0 (off) or above")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows {chunk_rows}: must be at least 1")
    # On CUDA the check would synchronise; there an out-of-range target gives NaN (see _scan).
    if target.device.type == "cpu" and target.numel() and not _is_fake(target):
        low, high = int(target.min()), int(target.max())
        if low < 0 or high >= weight.shape[0]:
            raise ValueError(f"target: {low}..{high} is outside [0, {weight.shape[0]})")


def _is_fake(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor" or tensor.device.type == "meta"


@dataclass(frozen=True, slots=True)
class _Head:
    """z = softcap(logit_scale * raw) / temperature, and its derivative."""

    temperature: float
    softcap: float
    logit_scale: float

    def apply_(self, raw: Tensor) -> Tensor:
        """Turn raw logits into z in place."""
        if self.softcap:
            return (
                raw.mul_(self.logit_scale / self.softcap)
                .tanh_()
                .mul_(self.softcap / self.temperature)
            )
        factor = self.logit_scale / self.temperature
        return raw if factor == 1.0 else raw.mul_(factor)

    @property
    def slope(self) -> float:
        """dz/draw without the soft-cap's part."""
        return self.logit_scale / self.temperature

    def cap_slope(self, z: Tensor) -> Tensor | None:
        """Return 1 - tanh^2 = 1 - (z * temperature / softcap)^2 as a new tensor; None if off."""
        if not self.softcap:
            return None
        return (z * (self.temperature / self.softcap)).square_().neg_().add_(1.0)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How [N, V] is cut, and in which dtypes a tile is computed."""

    num_rows: int
    rows: int
    columns: int
    vocab: int
    accumulate: torch.dtype
    """fp32, or fp64 for fp64 inputs: statistics and accumulators."""
    operand: torch.dtype
    """dtype of the GEMM operands."""

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, chunk_rows: int) -> "_Tiles":
        """Cut so that rows * columns <= chunk_rows * V."""
        num_rows, vocab = hidden.shape[0], weight.shape[0]
        rows = max(1, min(num_rows, MAX_TILE_ROWS))
        columns = max(1, min(vocab, chunk_rows * vocab // rows))
        if columns > 64:
            columns -= columns % 64
        accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # torch.mm(out_dtype=fp32) exists on CUDA only. On a CPU half operands would give logits
        # rounded to 8 bits (+-0.06 at z = 20), so there a tile of W is widened instead.
        half_gemm = hidden.dtype in HALF and hidden.is_cuda
        operand = hidden.dtype if half_gemm else accumulate
        return _Tiles(num_rows, rows, columns, vocab, accumulate, operand)

    def row_blocks(self) -> list[slice]:
        """Return the blocks of rows."""
        return _slices(self.num_rows, self.rows)

    def column_blocks(self) -> list[slice]:
        """Return the blocks of vocabulary."""
        return _slices(self.vocab, self.columns)

    def mm(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left @ right in the accumulate dtype; both in the operand dtype."""
        if self.operand == self.accumulate:
            return left @ right
        return torch.mm(left, right, out_dtype=self.accumulate)


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _logits(
    tiles: _Tiles, head: _Head, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return z [R, T] of one tile; hidden and weight in the operand dtype."""
    raw = tiles.mm(hidden, weight.t())
    if bias is not None:
        raw.add_(bias)
    return head.apply_(raw)


class _Scan(NamedTuple):
    """Statistics of one block of rows after all vocabulary tiles; [R] in the accumulate dtype."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor | None
    grad: Tensor | None
    """U = d logp / d hidden [R, H]."""


def _scan(
    tiles: _Tiles,
    head: _Head,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    entropy: bool,
    grad: bool,
) -> _Scan:
    """Walk the vocabulary once for one block of rows: hidden [R, H], target [R]."""
    rows = hidden.shape[0]
    operand = hidden.to(tiles.operand)
    # A target that no tile contains leaves NaN: loud, without a synchronisation.
    z_target = operand.new_full((rows,), float("nan"), dtype=tiles.accumulate)
    largest = torch.full_like(z_target, float("-inf"))
    total = torch.zeros_like(z_target)
    weighted = torch.zeros_like(z_target) if entropy else None
    pulled = operand.new_zeros((rows, hidden.shape[1]), dtype=tiles.accumulate) if grad else None
    target_slope = torch.ones_like(z_target)
    for columns in tiles.column_blocks():
        w_tile = weight[columns].to(tiles.operand)
        z = _logits(tiles, head, operand, w_tile, None if bias is None else bias[columns])
        index = target - columns.start
        inside = (index >= 0) & (index < z.shape[1])
        index = index.clamp(0, z.shape[1] - 1).unsqueeze(1)
        picked = z.gather(1, index).squeeze(1)
        z_target = torch.where(inside, picked, z_target)
        # The target leaves the tile: what is summed from here on is "the others".
        z.scatter_(1, index, picked.masked_fill(inside, float("-inf")).unsqueeze(1))

        new_largest = torch.maximum(largest, z.amax(1))
        # A row that has seen only -inf has no finite shift.
        shift = new_largest.masked_fill(new_largest == float("-inf"), 0.0)
        decay = torch.exp(largest - shift)
        cap_slope = head.cap_slope(z) if grad else None
        e = z.sub_(shift.unsqueeze(1)).exp_()
        mass = e.sum(1)
        total = total * decay + mass
        if pulled is not None:
            source = e if cap_slope is None else cap_slope.nan_to_num_(0.0, 0.0, 0.0).mul_(e)
            part = tiles.mm(source.to(tiles.operand), w_tile)
            pulled.mul_(decay.unsqueeze(1)).add_(part)
            del source, part, cap_slope
        if weighted is not None:
            # sum e z = sum e ln e + shift * sum e, and entr(e) = -e ln e in place: no second tile.
            log_mass = torch.special.entr(e, out=e).sum(1).neg_()
            weighted = weighted * decay + log_mass + shift * mass
        largest = new_largest
        del z, e

    shift = largest.masked_fill(largest == float("-inf"), 0.0)
    lse_others = shift + total.log()
    logp = -torch.nn.functional.softplus(lse_others - z_target, threshold=1e9)
    lse = torch.logaddexp(lse_others, z_target)
    scale = torch.exp(shift - lse)
    mean_z = None if weighted is None else weighted * scale + logp.exp() * z_target
    if pulled is not None:
        if head.softcap:
            target_slope = 1.0 - (z_target * (head.temperature / head.softcap)).square()
        # U = slope * ((1 - p_t) W_t - sum over the others of p_j W_j)
        coefficient = -torch.expm1(logp) * target_slope * head.slope
        pulled.mul_((-scale * head.slope).unsqueeze(1))
        pulled.addcmul_(weight[target].to(tiles.accumulate), coefficient.unsqueeze(1))
    return _Scan(logp, lse, None if mean_z is None else lse - mean_z, pulled)


def _empty_outputs(tiles: _Tiles, hidden: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    logp = hidden.new_empty((tiles.num_rows,), dtype=tiles.accumulate)
    return logp, torch.empty_like(logp) if entropy else logp.new_empty(0)


class _FrozenHead(torch.autograd.Function):
    """W has no gradient: the forward also makes U [N, H], the backward scales its rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head: _Head,
        chunk_rows: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles.of(hidden, weight, chunk_rows)
        logp, ent = _empty_outputs(tiles, hidden, entropy)
        keep = ctx.needs_input_grad[0]
        pulled = torch.empty_like(hidden) if keep else None
        exponent = torch.zeros_like(logp) if keep else None
        for rows in tiles.row_blocks():
            scan = _scan(
                tiles, head, hidden[rows], weight, bias, target[rows], entropy=entropy, grad=keep
            )
            logp[rows] = scan.logp
            if scan.entropy is not None:
                ent[rows] = scan.entropy
            if pulled is not None and exponent is not None and scan.grad is not None:
                if hidden.dtype == torch.float16:
                    # A confident token's U lies below fp16's normal range: keep its exponent.
                    power = torch.frexp(scan.grad.abs().amax(1))[1].to(logp.dtype)
                    scan.grad.mul_(torch.exp2(-power).unsqueeze(1))
                    exponent[rows] = power
                pulled[rows] = scan.grad
        if pulled is not None:
            ctx.save_for_backward(pulled, exponent)
        ctx.mark_non_differentiable(ent)
        return logp, ent

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        pulled, exponent = ctx.saved_tensors
        scale = grad_logp * torch.exp2(exponent)
        grad_hidden = torch.empty_like(pulled)
        # In blocks: bf16 * fp32 makes an fp32 [R, H], not [N, H].
        for rows in _slices(pulled.shape[0], MAX_TILE_ROWS):
            grad_hidden[rows] = pulled[rows] * scale[rows].unsqueeze(1)
        return grad_hidden, None, None, None, None, None, None


class _TrainableHead(torch.autograd.Function):
    """W learns: the backward makes each tile again, and adds into W.grad tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head: _Head,
        chunk_rows: int,
        entropy: bool,
        direct_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles.of(hidden, weight, chunk_rows)
        logp, ent = _empty_outputs(tiles, hidden, entropy)
        lse = torch.empty_like(logp)
        for rows in tiles.row_blocks():
            scan = _scan(
                tiles, head, hidden[rows], weight, bias, target[rows], entropy=entropy, grad=False
            )
            logp[rows], lse[rows] = scan.logp, scan.lse
            if scan.entropy is not None:
                ent[rows] = scan.entropy
        ctx.save_for_backward(hidden, weight, bias, target, logp, lse)
        ctx.head, ctx.tiles, ctx.direct_grad = head, tiles, direct_grad
        ctx.mark_non_differentiable(ent)
        return logp, ent

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, logp, lse = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        direct = needs_weight and ctx.direct_grad and _may_accumulate(weight)
        if direct and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        grad_weight = weight.grad if direct else torch.zeros_like(weight) if needs_weight else None
        grad_bias = logp.new_zeros((tiles.vocab,)) if needs_bias else None
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        for rows in tiles.row_blocks():
            block = _backward_block(
                ctx.head,
                tiles,
                (hidden[rows], weight, bias, target[rows]),
                (logp[rows], lse[rows], grad_logp[rows]),
                needs_hidden,
                grad_weight,
                grad_bias,
            )
            if grad_hidden is not None and block is not None:
                grad_hidden[rows] = block
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return (
            grad_hidden,
            None if direct else grad_weight,
            grad_bias,
            *([None] * 5),
        )


def _backward_block(
    head: _Head,
    tiles: _Tiles,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor],
    row_stats: tuple[Tensor, Tensor, Tensor],
    needs_hidden: bool,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor | None:
    """Add one block of rows to the gradients of W and bias; return that of hidden [R, H].

    D = d logp / d raw lies in [-1, 1] times the slope whatever the loss is scaled by: only D passes
    through half precision, the upstream gradient g multiplies in fp32. For dW = D^T (g h) the
    rows are scaled by g / max|g| and the result by max|g|.
    """
    hidden, weight, bias, target = inputs
    logp, lse, grad = row_stats
    operand = hidden.to(tiles.operand)
    largest = grad.abs().max().clamp_min(torch.finfo(grad.dtype).tiny)
    scaled_hidden = (hidden * (grad / largest).unsqueeze(1)).to(tiles.operand)
    pulled = operand.new_zeros(hidden.shape, dtype=tiles.accumulate) if needs_hidden else None
    for columns in tiles.column_blocks():
        w_tile = weight[columns].to(tiles.operand)
        z = _logits(tiles, head, operand, w_tile, None if bias is None else bias[columns])
        cap_slope = head.cap_slope(z)
        d = z.sub_(lse.unsqueeze(1)).exp_().neg_()
        index = target - columns.start
        inside = (index >= 0) & (index < d.shape[1])
        index = index.clamp(0, d.shape[1] - 1).unsqueeze(1)
        exact = torch.where(inside, -torch.expm1(logp), d.gather(1, index).squeeze(1))
        d.scatter_(1, index, exact.unsqueeze(1))
        if cap_slope is not None:
            d.mul_(cap_slope)
            del cap_slope
        if grad_bias is not None:
            grad_bias[columns] += (grad * head.slope) @ d
        d_operand = d.to(tiles.operand)
        del z, d
        if pulled is not None:
            pulled += tiles.mm(d_operand, w_tile)
        if grad_weight is not None:
            part = tiles.mm(d_operand.t(), scaled_hidden)
            grad_weight[columns] += part.mul_(largest * head.slope)
    return None if pulled is None else pulled.mul_((grad * head.slope).unsqueeze(1))


def _may_accumulate(weight: Tensor) -> bool:
    """Say whether adding into weight.grad here is what this backward pass would do in the end.

    Not for hooked or non-leaf weights, nor under torch.autograd.grad (which must return the
    gradient, or leave .grad alone when the weight is not among its inputs).
    """
    if not weight.is_leaf or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return False
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        # True for backward(); False if this pass leaves W out; RuntimeError under autograd.grad.
        return torch._C._will_engine_execute_node(node)
    except (AttributeError, RuntimeError):
        return False
