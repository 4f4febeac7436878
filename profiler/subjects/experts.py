"""Experts that a trace cannot run as they are: what they do depends on values. Tensor by tensor, rows given.

`loop` follows the forward of an experts class (modeling_mixtral.py, modeling_gpt_oss.py, transformers 5.19) and
`fallback` integrations/moe.py, _grouped_mm_fallback, which torch's grouped matmul gives way to before Ampere.
"""

from collections.abc import Callable
from typing import Any

import torch

from planner.layer.experts import loads
from planner.models.spec import ModelSpec

LOOP, FALLBACK = "vramwise_loop", "vramwise_fallback"
_F = torch.nn.functional
Forward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def register(model: ModelSpec, *, imbalance: bool, capacity: float) -> None:
    """Make both implementations known to transformers, for the experts of `model`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    mlp = next(layer.mlp for layer in model.layers if layer.mlp.num_experts)
    shares = loads(mlp, imbalance=imbalance, capacity=capacity)
    ALL_EXPERTS_FUNCTIONS.register(LOOP, loop(shares))

    def fallen_back(self: Any, *arguments: torch.Tensor) -> torch.Tensor:
        from transformers.integrations import moe

        usual = moe._grouped_mm
        moe._grouped_mm = _fallback
        try:
            return grouped_mm_experts_forward(self, *arguments)
        finally:
            moe._grouped_mm = usual

    ALL_EXPERTS_FUNCTIONS.register(FALLBACK, fallen_back)


def loop(shares: tuple[float, ...]) -> Forward:
    """Return the loop over experts of which each gets its share of the tokens."""

    def forward(
        self: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        final = torch.zeros_like(hidden_states)
        with torch.no_grad():
            mask = _F.one_hot(chosen, num_classes=self.num_experts + 1).permute(2, 1, 0)
        for expert, share in enumerate(shares):
            found = torch.zeros((round(share * hidden_states.shape[0]), 2), dtype=torch.long)
            place, token = found.unbind(1)
            current = hidden_states[token]
            gate_up = _matmul(self, current, "gate_up_proj", expert)
            if getattr(self, "has_bias", False):
                gated = self._apply_gate(gate_up)
                result = _matmul(self, gated, "down_proj", expert)
                weighted = result * weights[token, place, None]
                final.index_add_(0, token, weighted.to(hidden_states.dtype))
                continue
            gate, up = gate_up.chunk(2, dim=-1)
            del gate_up
            inside = self.act_fn(gate) * up
            inside = _matmul(self, inside, "down_proj", expert)
            inside = inside * weights[token, place, None]
            final.index_add_(0, token, inside.to(final.dtype))
        del mask
        return final

    return forward


def _matmul(self: Any, rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
    weight = getattr(self, name)[expert]
    if not self.is_transposed:
        return _F.linear(rows, weight)
    made: torch.Tensor = rows @ weight + getattr(self, f"{name}_bias")[expert]
    return made


def _fallback(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Fallback.apply(input.to(weight.dtype), weight)  # type: ignore[no-untyped-call]
    return result


class _Fallback(torch.autograd.Function):
    """input [S, in], weight [E, in, out] -> [S, out]; both gradients are made, wanted or not."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return input.new_zeros(input.shape[0], weight.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        input, weight = ctx.saved_tensors
        return torch.zeros_like(input), torch.zeros_like(weight)
