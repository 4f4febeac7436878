"""The log-prob head: hidden, W, target -> log-probabilities [N]; the logits [N, V] never exist.

Both passes walk tiles of rows x vocabulary with running (online) softmax statistics, as attention
kernels do, so what is alive is one tile (trainer.vocab_tiles). Departures from the textbook:

* logp = -softplus(logsumexp of the others - z_t). The usual z_t - logsumexp(z) rounds to 0 once
  p_t > 1 - 6e-8, and its gradient 1 - p_t with it; here 1 - p_t = -expm1(logp) stays exact.
* the gradient of a frozen head is made in the forward: U = d logp / d hidden = (onehot - p) W, so
  the backward is one scale per row. The upstream gradient (loss normaliser, loss scale) never
  passes through half precision, and the vocabulary is visited once.
* a trainable head recomputes its tiles in the backward, and adds each tile's gradient straight
  into W.grad: no second [V, H].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.units import MiB
from trainer.vocab_tiles import (
    MAX_TILE_ROWS,
    LogitRule,
    Tiles,
    backward_block,
    device_type_of,
    scan_block,
    slices,
)


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
    [0, V), bias [V]. softcap 0 or None = off. `chunk_rows` C bounds the scratch: a tile has at most
    C * V logits (6 bytes each in half precision); None = chosen from the sizes. `direct_grad`: a
    trainable leaf weight gets its gradient added straight into weight.grad tile by tile (no second
    [V, H]); False, hooks on the weight or torch.autograd.grad return it through autograd (DDP hooks
    where Python can't see it: pass False there).
    Raises ValueError naming the argument for shapes or settings that don't match.
    """
    rule = LogitRule(float(temperature), float(softcap or 0.0), float(logit_scale))
    _check(hidden, weight, target, bias, rule, chunk_rows)
    vocab, width = weight.shape
    if chunk_rows is None:
        chunk_rows = default_chunk_rows(
            vocab=vocab, width=width, device_type=device_type_of(hidden)
        )
    tiles = Tiles.of(hidden, weight, chunk_rows)
    learns = weight.requires_grad or (bias is not None and bias.requires_grad)
    # Tiles.of has read autocast's dtype; inside, it would round the fp32 products.
    with torch.autocast(hidden.device.type, enabled=False):
        if learns and torch.is_grad_enabled():
            logp, values = _TrainableHead.apply(  # type: ignore[no-untyped-call]
                hidden, weight, bias, target, rule, tiles, entropy, direct_grad
            )
        else:
            logp, values = _FrozenHead.apply(  # type: ignore[no-untyped-call]
                hidden, weight, bias, target, rule, tiles, entropy
            )
    return LogProbs(logp, values if entropy else None)


def default_chunk_rows(*, vocab: int, width: int, device_type: str) -> int:
    """Return C such that 6 * C * V bytes is 16-128 MiB: a quarter of the head's own bf16 weight.

    Scratch that is small beside the weight is never what a run dies of, and on a GPU such a tile
    is compute bound already. A CPU takes 16 MiB always: larger tiles only leave its caches.
    """
    largest = 128 * MiB if device_type == "cuda" else 16 * MiB
    budget = min(largest, max(16 * MiB, vocab * width * 2 // 4))
    return max(1, budget // (6 * vocab))


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    rule: LogitRule,
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
    if not rule.temperature > 0:
        raise ValueError(f"temperature {rule.temperature}: must be above 0")
    if rule.softcap < 0:
        raise ValueError(f"softcap {rule.softcap}: must be 0 (off) or above")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows {chunk_rows}: must be at least 1")
    # On CUDA the check would synchronise; there a target outside [0, V) gives NaN, or its own error.
    real_cpu = target.device.type == "cpu" and type(target) is Tensor
    if real_cpu and target.numel():
        low, high = int(target.min()), int(target.max())
        if low < 0 or high >= weight.shape[0]:
            raise ValueError(f"target {low}..{high}: must lie in [0, {weight.shape[0]})")


def _outputs(tiles: Tiles, hidden: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
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
        rule: LogitRule,
        tiles: Tiles,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return logp [N] and entropy [N] or [0]; save U and its rows' exponents."""
        logp, values = _outputs(tiles, hidden, entropy)
        keep = ctx.needs_input_grad[0]
        unit = torch.empty_like(hidden) if keep else None
        exponent = torch.zeros_like(logp) if keep else None
        for rows in tiles.row_blocks():
            inputs = (hidden[rows], weight, bias, target[rows])
            scan = scan_block(tiles, rule, inputs, entropy=entropy, grad=keep)
            logp[rows] = scan.logp
            if scan.entropy is not None:
                values[rows] = scan.entropy
            if unit is not None and exponent is not None and scan.grad is not None:
                if hidden.dtype == torch.float16:
                    # A confident token's U lies below fp16's normal range: keep its exponent apart.
                    power = torch.frexp(scan.grad.abs().amax(1))[1].to(logp.dtype)
                    scan.grad.mul_(torch.exp2(-power).unsqueeze(1))
                    exponent[rows] = power
                unit[rows] = scan.grad
        if unit is not None:
            ctx.save_for_backward(unit, exponent)
        ctx.mark_non_differentiable(values)
        return logp, values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Return d loss / d hidden = g * U."""
        unit, exponent = ctx.saved_tensors
        scale = grad_logp * torch.exp2(exponent)
        grad_hidden = torch.empty_like(unit)
        # In blocks: half * fp32 makes an fp32 [R, H], not [N, H].
        for rows in slices(unit.shape[0], MAX_TILE_ROWS):
            grad_hidden[rows] = unit[rows] * scale[rows].unsqueeze(1)
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
        rule: LogitRule,
        tiles: Tiles,
        entropy: bool,
        direct_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return logp [N] and entropy [N] or [0]; save the inputs and two floats a row."""
        logp, values = _outputs(tiles, hidden, entropy)
        lse = torch.empty_like(logp)
        for rows in tiles.row_blocks():
            inputs = (hidden[rows], weight, bias, target[rows])
            scan = scan_block(tiles, rule, inputs, entropy=entropy, grad=False)
            logp[rows], lse[rows] = scan.logp, scan.lse
            if scan.entropy is not None:
                values[rows] = scan.entropy
        ctx.save_for_backward(hidden, weight, bias, target, logp, lse)
        ctx.rule, ctx.tiles, ctx.direct_grad = rule, tiles, direct_grad
        ctx.mark_non_differentiable(values)
        return logp, values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, W (None if it was added to W.grad here) and bias."""
        hidden, weight, bias, target, logp, lse = ctx.saved_tensors
        tiles: Tiles = ctx.tiles
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        direct = needs_weight and ctx.direct_grad and _may_accumulate(weight)
        if direct and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        grad_weight = weight.grad if direct else torch.zeros_like(weight) if needs_weight else None
        grad_bias = logp.new_zeros((tiles.vocab,)) if needs_bias else None
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        for rows in tiles.row_blocks():
            block = backward_block(
                tiles,
                ctx.rule,
                (hidden[rows], weight, bias, target[rows]),
                (logp[rows], lse[rows], grad_logp[rows]),
                needs_hidden=needs_hidden,
                grad_weight=grad_weight,
                grad_bias=grad_bias,
            )
            if grad_hidden is not None and block is not None:
                grad_hidden[rows] = block
            block = None  # before the next one is made
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, None if direct else grad_weight, grad_bias, *([None] * 5)


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
