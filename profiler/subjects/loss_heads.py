"""How TRL turns hidden states into log-probabilities: tensor by tensor, for the trace.

`selective_log_softmax`: TRL 0.14-0.17 on full logits (trl/trainer/utils.py): 16-bit logits row by
row through log_softmax, fp32 logits through gather and logsumexp.

`FusedHead`: the law of TRL 1.x's fused head (`add_fused_lm_head`): tiles of 4,096 tokens x 32,768
columns in the compute dtype; forward keeps hidden rows and statistics, backward an fp32 gradient of
the hidden rows and, for a trained head, of the whole head. It allocates and computes nothing.
"""

from typing import Any

import torch

TILE_TOKENS = 4096
TILE_COLUMNS = 32768
STATISTICS = 7
"""fp32 vectors the fused head accumulates: max, sums for the entropy and its relatives, target."""


def selective_log_softmax(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits [B, T, V], targets [B, T] int64 -> log-probabilities [B, T]."""
    index = targets.unsqueeze(-1)
    if logits.dtype == torch.float32:
        chosen = torch.gather(logits, dim=-1, index=index).squeeze(-1)
        normaliser = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        return chosen - normaliser
    rows = []
    for row, labels in zip(logits, index, strict=True):
        rows.append(torch.log_softmax(row, dim=-1).gather(dim=-1, index=labels).squeeze(-1))
    return torch.stack(rows)


class FusedHead(torch.autograd.Function):
    """hidden [N, H], weight [V, H], targets [N] -> log-probabilities [N] and entropy [N], fp32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the statistics and one tile."""
        ctx.set_materialize_grads(False)
        rows = hidden.shape[0]
        ctx.compute = (
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        )
        statistics = [hidden.new_zeros(rows, dtype=torch.float32) for _ in range(STATISTICS)]
        tile = _tile(hidden, ctx.compute)
        part = _head_part(weight, ctx.compute)
        log_z, logp, entropy = (torch.empty_like(statistics[0]) for _ in range(3))
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        del tile, part, statistics
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        """Allocate the fp32 gradients and one tile, then cast."""
        hidden, weight, _, _, _ = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        trains_head = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_head else None
        tile = _tile(hidden, ctx.compute)
        part = _head_part(weight, ctx.compute)
        del part
        result = grad_hidden.to(hidden.dtype)
        trained = None if grad_weight is None else grad_weight.to(weight.dtype)
        del tile  # TRL's buffer lives until its backward returns
        return result, trained, None


def _tile(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return hidden.new_empty((min(hidden.shape[0], TILE_TOKENS), TILE_COLUMNS), dtype=dtype)


def _head_part(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the cast of the columns at hand; none when the head has the compute dtype."""
    return None if weight.dtype == dtype else weight[:TILE_COLUMNS].to(dtype)
