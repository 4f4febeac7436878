"""One row per group: the prompt once, then all its completions, kept apart by a mask.

P + G*R tokens run instead of G*(P + R). Completions restart at the prompt's end in position; the
prompt's last token predicts the first token of every completion, so its hidden state is scored G times.
Shapes: B groups, T tokens of a row, N scored tokens, S sequences.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.batching import MicroBatch, ScoredSequence

MAX_SHARED_TOKENS = 8192
"""A row's mask has T^2 bytes: 64 MiB at this length."""


def can_share(model: Any) -> bool:
    """Return whether a mask alone keeps completions apart in this transformers model."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    has_state = any(
        hasattr(config, name) for name in ("ssm_state_size", "mamba_d_state", "state_size")
    )
    masked = model.config._attn_implementation in ("sdpa", "eager")
    return kinds == {"full_attention"} and not windowed and not has_state and masked


def worth_sharing(group: Sequence[ScoredSequence]) -> bool:
    """Return whether the shared row is cheaper than separate rows.

    Fewer tokens always run; but the mask makes attention dense: T^2 pairs instead of
    sum (P + R)^2 / 2. Separate rows win once the prompt is short beside its completions.
    """
    shared = shared_tokens(group)
    separate = sum(len(sequence.token_ids) ** 2 for sequence in group) / 2
    return len(group) > 1 and shared <= MAX_SHARED_TOKENS and shared**2 <= 2 * separate


def prompt_tokens(sequence: ScoredSequence) -> int:
    """Return the tokens before the completion: a completion is everything from the first scored one."""
    return sequence.scored.index(True)


def shared_tokens(group: Sequence[ScoredSequence]) -> int:
    """Return the tokens of a group's row; a completion's last token predicts nothing and stays out."""
    prompt = prompt_tokens(group[0])
    return prompt + sum(len(sequence.token_ids) - prompt - 1 for sequence in group)


def collate_shared(
    groups: Sequence[Sequence[ScoredSequence]],
    indices: Sequence[int],
    *,
    pad_id: int,
    float_mask: torch.dtype | None = None,
) -> MicroBatch:
    """Return the micro-batch of `groups`; `indices` names its sequences in order.

    `float_mask`: eager attention adds its mask, so it wants 0 / lowest in this dtype; None = boolean.
    """
    width = max(shared_tokens(group) for group in groups)
    ids = torch.full((len(groups), width), pad_id)
    positions = torch.zeros_like(ids)
    # segment 0 = prompt, 1.. = completions, -1 = padding (sees itself: softmax of nothing is NaN)
    segments = torch.full_like(ids, -1)
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    owner = 0
    for row, group in enumerate(groups):
        prompt = prompt_tokens(group[0])
        cursor = prompt
        ids[row, :prompt] = torch.tensor(group[0].token_ids[:prompt])
        positions[row, :prompt] = torch.arange(prompt)
        segments[row, :prompt] = 0
        for number, sequence in enumerate(group, 1):
            completion = sequence.token_ids[prompt:]
            span = slice(cursor, cursor + len(completion) - 1)
            ids[row, span] = torch.tensor(completion[:-1], dtype=ids.dtype)
            positions[row, span] = prompt + torch.arange(len(completion) - 1)
            segments[row, span] = number
            for offset, token in enumerate(completion):
                if sequence.scored[prompt + offset]:
                    before = prompt - 1 if offset == 0 else cursor + offset - 1
                    rows.append(row * width + before)
                    targets.append(token)
                    owners.append(owner)
            cursor = span.stop
            owner += 1
    return MicroBatch(
        indices=tuple(indices),
        input_ids=ids,
        position_ids=positions,
        attention_mask=_mask(segments, float_mask),
        rows=torch.tensor(rows, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        sequence_ids=torch.tensor(owners, dtype=torch.long),
        cu_seqlens=torch.zeros(1, dtype=torch.int32),
        max_length=width,
    )


def _mask(segments: Tensor, float_mask: torch.dtype | None) -> Tensor:
    """Return [B, 1, T, T]: earlier tokens of the prompt or of the own completion are visible."""
    same = segments[:, :, None] == segments[:, None, :]
    prompt = (segments == 0)[:, None, :] & (segments >= 0)[:, :, None]
    causal = torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool).tril()
    visible = ((same | prompt) & causal)[:, None]
    if float_mask is None:
        return visible
    lowest = torch.finfo(float_mask).min
    return torch.zeros(visible.shape, dtype=float_mask).masked_fill(~visible, lowest)
