"""Log-probabilities of a micro-batch under the policy, at the sampler's temperature, top-k, top-p and min-p.

Shapes: B rows, T tokens of a row, N scored tokens, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from planner.units import MiB
from trainer.batching import MicroBatch
from trainer.logprob_head import LogProbs, logprob_head
from trainer.model import Head, Policy
from trainer.packing import block_mask
from trainer.sampling import shape_logits
from trainer.shared_prefix import can_share

TRUNCATED_CHUNK_BYTES = 64 * MiB
"""fp32 logits of one chunk in the truncated head."""


def hidden_rows(policy: Policy, batch: MicroBatch) -> Tensor:
    """Return the hidden states [N, H] that predict the batch's scored tokens."""
    return hidden_and_routers(policy, batch)[0]


def hidden_and_routers(
    policy: Policy, batch: MicroBatch, *, routers: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return `hidden_rows`, and the router logits [B * T, experts] of each layer if asked for."""
    inputs: dict[str, Any] = {**_inputs(policy, batch)}
    if routers:
        inputs["output_router_logits"] = True
    if policy.noise is not None:
        policy.noise.aim(batch)
    outputs = policy.backbone(batch.input_ids, **inputs)
    hidden = outputs.last_hidden_state.flatten(0, 1).index_select(0, batch.rows)
    return hidden, tuple(outputs.router_logits) if routers else ()


def log_probs(
    policy: Policy,
    batch: MicroBatch,
    hidden: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    entropy: bool = False,
    chunk_rows: int | None = None,
) -> LogProbs:
    """Return log-probabilities [N] of the batch's scored tokens, penalties and grammars apart.

    hidden [N, H] from `hidden_rows`.
    """
    head = policy.head
    if top_k > 0 or top_p < 1 or min_p > 0:
        shape = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return _truncated_head(
            hidden, batch.targets, head, shape=shape, entropy=entropy, chunk_rows=chunk_rows
        )
    return logprob_head(
        hidden,
        head.weight,
        batch.targets,
        bias=head.bias,
        temperature=temperature,
        softcap=head.softcap or 0.0,
        logit_scale=head.logit_scale,
        chunk_rows=chunk_rows,
        entropy=entropy,
    )


def _inputs(policy: Policy, batch: MicroBatch) -> dict[str, Tensor]:
    """Return what the backbone needs beside the ids.

    Rows padded on the right need nothing: causal layers never look there, and without a mask the
    fused causal attention kernels apply. Packed rows are told apart by their positions (flash attention,
    and models whose layers need masks of their own), else by one mask of four dimensions for all
    layers; so are groups that share a prompt.
    """
    if batch.attention_mask is None:
        if len(batch.indices) < 2:
            return {}
        inputs = {"position_ids": batch.position_ids}
        if can_share(policy.base):
            inputs["attention_mask"] = block_mask(batch.position_ids, dtype=policy.dtype)
        return inputs
    if batch.attention_mask.dim() == 4:
        return {"position_ids": batch.position_ids, "attention_mask": batch.attention_mask}
    return {}


def _truncated_head(
    hidden: Tensor,
    target: Tensor,
    head: Head,
    *,
    shape: dict[str, Any],
    entropy: bool,
    chunk_rows: int | None,
) -> LogProbs:
    """Score on the support that top-k and top-p leave, in chunks recomputed in the backward.

    The fused head sums over the whole vocabulary as it goes; a support is known only after a row's
    logits are, so here one chunk of logits exists at a time.
    """
    rows = chunk_rows or max(1, TRUNCATED_CHUNK_BYTES // (4 * head.weight.shape[0]))

    def chunk(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
        logits = logits * head.logit_scale
        if head.softcap:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        logp = shape_logits(logits, keep=target, **shape).log_softmax(dim=-1)
        with torch.no_grad():
            spread = torch.special.entr(logp.exp()).sum(dim=-1)
        return logp.gather(-1, target[:, None])[:, 0], spread

    parts = [
        checkpoint(chunk, hidden_rows, target_rows, use_reentrant=False)
        for hidden_rows, target_rows in zip(hidden.split(rows), target.split(rows), strict=True)
    ]
    return LogProbs(
        torch.cat([part[0] for part in parts]),
        torch.cat([part[1] for part in parts]).detach() if entropy else None,
    )
