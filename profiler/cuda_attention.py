"""What CUDA's attention kernels allocate and save, as autograd functions that compute nothing.

Shapes from torch 2.13 (aten/src/ATen/native/transformers/cuda): `attention.cu` and
`attention_backward.cu` with `flash_attn/flash_api.cpp` and `mem_eff_attention`.

* flash (half precision, head_dim <= 256, no mask): saves q, k, v, the output [b, s, h, d] and the
  log-sum-exp [b, h, s] fp32. Backward makes dq, dk, dv; inside the kernel an fp32 accumulator of dq
  [b, h, round128(s), round32(d)] and softmax_d; with grouped queries dk and dv once more at full
  heads, then summed. head_dim not divisible by 8 is padded by copies of q, k and v.
* memory-efficient (any dtype, masks; no grouped queries): saves q, k, v, mask, output and a
  log-sum-exp padded to 32 rows. A boolean mask becomes an additive one in q's dtype, padded to 16
  columns. Backward: dq, dk, dv, delta [b, h, s] fp32, and an fp32 dq accumulator for half inputs.
* math (grouped queries in fp32, or not declared by `enable_gqa`): torch's composite in fp32. On CUDA
  autocast casts q, k and v once and is off inside; the mask is added in place (under a fake tensor
  mode the C++ composite would copy), and the safe softmax holds scores, softmax, a boolean mask and
  its result.

flash-attn's own package (attn_implementation "flash_attention_2") allocates what torch's flash does.
"""

from typing import Any

import torch

from planner.errors import UnsupportedError

MAX_FLASH_HEAD_DIM = 256
_HALF = (torch.bfloat16, torch.float16)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _heads_last(like: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """Return an empty [b, heads, s, width] whose memory is [b, s, heads, width], as CUDA lays it out."""
    batch, _, length, _ = like.shape
    return like.new_empty((batch, length, heads, width)).transpose(1, 2)


class FlashAttention(torch.autograd.Function):
    """q [b, h, s, d], k and v [b, h_kv, s, d] in half precision -> out [b, h, s, d]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Allocate the output and the log-sum-exp; save what the kernel saves."""
        batch, heads, length, _ = q.shape
        out = _heads_last(q, heads, v.shape[-1])
        lse = q.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Allocate the gradients and the kernel's accumulators."""
        q, k, v, _, _ = ctx.saved_tensors
        batch, heads, length, width = q.shape
        dq = _heads_last(q, heads, width)
        dk = _heads_last(k, k.shape[1], width)
        dv = _heads_last(v, v.shape[1], v.shape[-1])
        rows = _round_up(length, 128)
        softmax_d = q.new_empty((batch, heads, rows), dtype=torch.float32)
        accumulator = q.new_empty((batch, heads, rows, _round_up(width, 32)), dtype=torch.float32)
        expanded = (
            (_heads_last(k, heads, width), _heads_last(v, heads, v.shape[-1]))
            if k.shape[1] != heads
            else ()
        )
        del softmax_d, accumulator, expanded
        return dq, dk, dv


class EfficientAttention(torch.autograd.Function):
    """q, k, v [b, h, s, d] and an additive mask or None -> out [b, h, s, d]."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Allocate the output and the padded log-sum-exp; save what the kernel saves."""
        batch, heads, length, _ = q.shape
        out = _heads_last(q, heads, v.shape[-1])
        lse = q.new_empty((batch, heads, _round_up(length, 32)), dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Allocate the gradients, delta and, for half inputs, the fp32 accumulator of dq."""
        q, k, v, _, _, _ = ctx.saved_tensors
        batch, heads, length, width = q.shape
        dq = _heads_last(q, heads, width)
        dk = _heads_last(k, k.shape[1], width)
        dv = _heads_last(v, v.shape[1], v.shape[-1])
        delta = q.new_empty((batch, heads, length), dtype=torch.float32)
        accumulator = (
            q.new_empty((batch, heads, length, width), dtype=torch.float32)
            if q.dtype in _HALF
            else None
        )
        del delta, accumulator
        return dq, dk, dv, None


def additive_mask(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `mask` as the memory-efficient kernel wants it: additive, columns padded to 16."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask.logical_not(), -1.0)
    columns = mask.shape[-1]
    if columns % 16:
        mask = torch.nn.functional.pad(mask, (0, _round_up(columns, 16) - columns))[..., :columns]
    return mask


class SafeSoftmax(torch.autograd.Function):
    """aten::_safe_softmax with the temporaries its kernel has: scores [..., s, s] -> the same."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        """Take the softmax; rows that are masked altogether become zero. The result is saved."""
        out = torch.softmax(scores, -1)
        masked = scores.eq(float("-inf"))
        result = torch.where(masked.all(-1, keepdim=True), 0.0, out)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Allocate one gradient of the scores' size."""
        (result,) = ctx.saved_tensors
        grad: torch.Tensor = torch.ops.aten._softmax_backward_data(
            grads[0], result, -1, result.dtype
        )
        return grad


def math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Run attention [b, h, s, d] as _scaled_dot_product_attention_math does: in fp32, step by step."""
    with torch.autocast("cpu", enabled=False):
        query_acc, key_acc, value_acc = (part.float() for part in (query, key, value))
        factor = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
        scaled = query_acc * factor
        if is_causal:
            mask = query.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf"))
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key_acc = key_acc.repeat_interleave(groups, 1)
            value_acc = value_acc.repeat_interleave(groups, 1)
        weights = scaled @ (key_acc.transpose(-2, -1) * factor)
        if mask is not None:
            weights.add_(mask)
        weights = SafeSoftmax.apply(weights)  # type: ignore[no-untyped-call]
        narrow = weights.to(query.dtype)  # the composite's second result
        out: torch.Tensor = (weights @ value_acc).to(query.dtype)
        del narrow
        return out


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for F.scaled_dot_product_attention with the backend CUDA would pick."""
    if torch.is_autocast_enabled("cpu"):
        target = torch.get_autocast_dtype("cpu")
        query, key, value = (part.to(target) for part in (query, key, value))
        if attn_mask is not None and attn_mask.dtype.is_floating_point:
            attn_mask = attn_mask.to(target)
    grouped = query.shape[1] != key.shape[1]
    fused = enable_gqa or not grouped  # keys that would have to broadcast rule the kernels out
    square = query.shape[-1] == value.shape[-1]
    if (
        fused
        and attn_mask is None
        and query.dtype in _HALF
        and query.shape[-1] <= MAX_FLASH_HEAD_DIM
        and square
    ):
        width = query.shape[-1]
        if width % 8:
            missing = _round_up(width, 8) - width
            query, key, value = (
                torch.nn.functional.pad(part, (0, missing)) for part in (query, key, value)
            )
        flash: torch.Tensor = FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return flash[..., :width]
    if not grouped and query.shape[-1] % 4 == 0:
        mask = None if attn_mask is None else additive_mask(attn_mask, query)
        efficient: torch.Tensor = EfficientAttention.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
        return efficient
    if dropout_p:
        raise UnsupportedError("attention dropout with SDPA's math kernel is not traced")
    return math_attention(
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def flash_attention_2(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over FlashAttention: out is [b, s, h, d]."""
    dtype = query.dtype
    if dtype not in _HALF:
        # transformers' flash wrapper casts fp32 states to the autocast or the weights' dtype.
        target = (
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.bfloat16
        )
        query, key, value = (part.to(target) for part in (query, key, value))
    if value.shape[-1] != query.shape[-1]:
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - value.shape[-1]))
    out = FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), None
