"""What the kernels of linear attention allocate: they run in Triton and CUDA alone, so a trace states them.

transformers 5.19 calls causal-conv1d's causal_conv1d_fn and flash-linear-attention's chunk rules where
those packages are installed, and torch's readable references elsewhere, which keep many times as much.
Shapes and order follow causal_conv1d/causal_conv1d_interface.py (CausalConv1dFn) and flash-linear-attention's
ops/gated_delta_rule/chunk.py and ops/kda/{chunk,chunk_fwd,chunk_bwd}.py of August 2026. Nothing is computed.
"""

import sys
from typing import Any

import torch

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "lfm2")
CHUNK = 64
BLOCK = 16
"""Tokens of a diagonal block of KDA's."""


def replacements() -> list[tuple[Any, str, Any]]:
    """Return (module, name, stand-in) for the modelling code that is loaded."""
    kernels = {
        "causal_conv1d_fn": causal_conv1d,
        "torch_chunk_gated_delta_rule": gated_delta_rule,
        "chunk_kimi_delta_attention": kimi_delta_attention,
    }
    found = []
    for model in MODELS:
        module = sys.modules.get(f"transformers.models.{model}.modeling_{model}")
        found += [
            (module, name, stand_in) for name, stand_in in kernels.items() if hasattr(module, name)
        ]
    return found


def causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """x [B, C, T] -> the convolution's result, activation included."""
    result: torch.Tensor = _Conv.apply(hidden_states, weight, bias)  # type: ignore[no-untyped-call]
    return result


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """q, k [B, T, H, K], v [B, T, H, V], g and beta [B, T, H] -> [B, T, H, V], no state."""
    return _GatedDelta.apply(query, key, value, g, beta), None  # type: ignore[no-untyped-call]


def kimi_delta_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The same with a decay for every channel: g [B, T, H, K]."""
    return _Kimi.apply(query, key, value, g, beta), None  # type: ignore[no-untyped-call]


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dx = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        narrow = dweight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, narrow, dbias if dbias is None else dbias.to(bias.dtype)


def _states(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the state of every chunk."""
    batch, tokens, heads, width = k.shape
    return k.new_empty(batch, -(-tokens // CHUNK), heads, width, v.shape[-1])


def _pairs(k: torch.Tensor, dtype: torch.dtype | None = None, width: int = CHUNK) -> torch.Tensor:
    return torch.empty((*k.shape[:3], width), dtype=dtype or k.dtype)


def _norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: torch.Tensor) -> torch.Tensor:
        q, k, v, g, beta = whole = tuple(x.contiguous() for x in arguments)
        (qn, q_rstd), (kn, k_rstd) = _norm(q), _norm(k)
        summed = torch.empty_like(g, dtype=torch.float32)
        w, u, pairs = torch.empty_like(kn), torch.empty_like(v), _pairs(kn)
        h, v_new = _states(kn, v), torch.empty_like(u)
        o = torch.empty_like(v)
        ctx.save_for_backward(qn, q_rstd, kn, k_rstd, v, summed, beta, pairs)
        del w, h, v_new, whole
        return o

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, _, k, _, v, summed, beta, _ = ctx.saved_tensors
        do = grads[0].contiguous()
        w, u = torch.empty_like(k), torch.empty_like(v)
        h, v_new = _states(k, v), torch.empty_like(u)
        dv = torch.empty_like(do)
        dh, dv = _states(k, v), torch.empty_like(dv)
        dq, dk, dg, dw = (
            torch.empty_like(q), torch.empty_like(k), torch.empty_like(summed), torch.empty_like(w)
        )  # fmt: skip
        dk2, dv, dg2, db = (
            torch.empty_like(k), torch.empty_like(v), torch.empty_like(summed), torch.empty_like(beta)
        )  # fmt: skip
        del w, u, h, v_new, dh, dw, dk2, dg2
        return torch.empty_like(dq), torch.empty_like(dk), dv, dg, db


class _Kimi(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: torch.Tensor) -> torch.Tensor:
        q, k, v, g, beta = whole = tuple(x.contiguous() for x in arguments)
        (qn, q_rstd), (kn, k_rstd) = _norm(q), _norm(k)
        summed = torch.empty_like(g, dtype=torch.float32)
        a_qk, a_kk = _pairs(kn), _pairs(kn)
        diagonal = _pairs(kn, torch.float32, BLOCK)
        w, u, kg = torch.empty_like(kn), torch.empty_like(v), torch.empty_like(kn)
        del diagonal
        h, v_new = _states(kn, v), torch.empty_like(u)
        o = torch.empty_like(v)
        ctx.save_for_backward(qn, q_rstd, kn, k_rstd, v, summed, g, beta, a_qk, a_kk)
        del w, kg, h, v_new, whole
        return o

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, _, k, _, v, summed, _, beta, _, _ = ctx.saved_tensors
        do = grads[0].contiguous()
        w, u, qg, kg = (
            torch.empty_like(k),
            torch.empty_like(v),
            torch.empty_like(k),
            torch.empty_like(k),
        )
        h, v_new = _states(k, v), torch.empty_like(u)
        d_qk, dv = _pairs(k, torch.float32), torch.empty_like(do)
        dh, dv = _states(k, v), torch.empty_like(dv)
        dq, dk, dv2, dg = (
            torch.empty_like(summed), torch.empty_like(summed), torch.empty_like(v), torch.empty_like(summed)
        )  # fmt: skip
        db, d_kk = torch.empty_like(beta, dtype=torch.float32), _pairs(k, torch.float32)
        dv = dv2
        dq, dk, dg = (torch.empty_like(x) for x in (dq, dk, dg))
        dg = torch.empty_like(dg)
        del w, u, qg, kg, h, v_new, dh, d_qk, d_kk, dv2
        dqn, dkn = torch.empty_like(q), torch.empty_like(k)
        return dqn, dkn, dv, dg, db.to(beta.dtype)
