"""The auxiliary loss that keeps a mixture's experts evenly used (Switch Transformer, arXiv 2101.03961).

E * sum over experts of (share of the tokens sent to it) * (mean of its router probability), over the
tokens of all layers, as transformers' load_balancing_loss_func has it; padding is left out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.errors import UsageError
from trainer.batching import MicroBatch

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


def router_coefficient(config: Any, asked: float | None) -> float:
    """Return the weight of the auxiliary loss: as asked, else the model's own; 0 for none.

    Raises UsageError where one is asked for and the model does not give its router logits.
    """
    text = config.get_text_config()
    gives = hasattr(text, "output_router_logits") and _first(text, EXPERTS) and _first(text, CHOSEN)
    if asked and not gives:
        raise UsageError(
            f"train.router_aux_loss_coef: {asked:g}, but {text.model_type} gives no router logits",
            hint="leave it out",
        )
    own = getattr(text, "router_aux_loss_coef", 0.0) if asked is None else asked
    return float(own or 0.0) if gives else 0.0


def balance_loss(routers: Sequence[Tensor], config: Any, batch: MicroBatch) -> Tensor:
    """Return the auxiliary loss of a micro-batch; routers: [B * T, E] a layer."""
    text = config.get_text_config()
    experts, chosen = _first(text, EXPERTS), _first(text, CHOSEN)
    real = real_tokens(batch).to(torch.float32)
    sent: Tensor | float = 0.0
    probability: Tensor | float = 0.0
    for logits in routers:
        weights = logits.reshape(-1, experts).softmax(dim=-1, dtype=torch.float32)
        picks = weights.topk(chosen, dim=-1).indices
        counted = real[:, None].expand_as(picks).reshape(-1)
        sent = sent + weights.new_zeros(experts).scatter_add(0, picks.reshape(-1), counted)
        probability = probability + (weights * real[:, None]).sum(dim=0)
    total = real.sum() * len(routers)
    return experts * ((sent / total) * (probability / total)).sum()


def real_tokens(batch: MicroBatch) -> Tensor:
    """Return [B * T], true where a token is not padding."""
    if batch.attention_mask is not None and batch.attention_mask.dim() == 2:
        return batch.attention_mask.flatten() > 0
    position = batch.position_ids
    # padding on the right repeats position 0; a sample's first token is followed by position 1
    following = torch.cat([position[:, 1:], torch.zeros_like(position[:, :1])], dim=1)
    return ((position > 0) | (following == 1)).flatten()


def _first(config: Any, names: Sequence[str]) -> int:
    return int(next((value for name in names if (value := getattr(config, name, None))), 0))
