"""One row per group: the prompt once, then all its completions, kept apart by a mask.

P + G*R tokens run instead of G*(P + R). Completions restart at the prompt's end in position; the
prompt's last token predicts the first token of every completion, so its hidden state is scored G times.
Shapes: B groups, T tokens of a row, N scored tokens, S sequences.

The mask is what SDPA's kernels on CUDA take as it is, so that all layers share one: torch 2.13 turns a
boolean mask into an additive one in every layer, and copies one whose rows don't begin at multiples of 16
elements (aten/src/ATen/native/transformers/attention.cpp: convert_boolean_attn_mask, preprocess_mask,
pad_bias); autograd would then keep a copy a layer. Only the flash kernel takes none at all
(cuda/sdp_utils.cpp, check_for_attn_mask): `RowCost.masked` is what that costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from planner.terms.activations import MASK_ALIGNMENT
from trainer.batching import MicroBatch, ScoredSequence

MAX_SHARED_TOKENS = 8192
"""A row's mask has 2 T^2 bytes in half precision: 128 MiB at this length."""
MASKED = -65504.0
"""Added where a token must not look; fp16's lowest. torch takes it for cuDNN's kernel, which has trouble
with -inf (attention.cpp, convert_boolean_attn_mask_cudnn); its exponential is 0 all the same."""
MEMORY_EFFICIENT_SLOWDOWN = 2.3
"""Time of SDPA's memory-efficient kernel over its flash kernel, a pair of tokens: 84.4 and 36.4 TFLOPS at
8,192 tokens, 76.4 and 33.9 at 2,048 (NVIDIA/TileGym pull request 49, fp16, head_dim 128, causal); 1.9 on an
A100 (facebookresearch/xformers issue 924, forward, the same two kernels)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCost:
    """What a step of the model costs, in FLOPs of its fastest attention kernel."""

    token: float
    """Each token: the decoder layers' matrix products."""
    pair: float
    """Each pair of tokens that attention visits."""
    masked: float = 1.0
    """A pair under a mask, over one in the causal kernel that needs none."""

    def shared(self, tokens: int) -> float:
        """Return the cost of one shared row: a mask is no reason to skip a tile, so all pairs count."""
        return tokens * self.token + tokens**2 * self.pair * self.masked

    def separate(self, lengths: Sequence[int]) -> float:
        """Return the cost of rows of their own: the causal kernel skips half of the pairs."""
        return sum(length * self.token + length**2 / 2 * self.pair for length in lengths)


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


def worth_sharing(group: Sequence[ScoredSequence], cost: RowCost) -> bool:
    """Return whether the shared row is cheaper than separate rows.

    Fewer tokens always run; but attention visits all T^2 pairs, in a slower kernel, instead of
    sum (P + R)^2 / 2 in the fastest. Separate rows win once the prompt is short beside its completions,
    and for longer prompts the smaller the model is.
    """
    shared = shared_tokens(group)
    if len(group) < 2 or shared > MAX_SHARED_TOKENS:
        return False
    return cost.shared(shared) < cost.separate([len(sequence.token_ids) for sequence in group])


def prompt_tokens(sequence: ScoredSequence) -> int:
    """Return the tokens before the completion: a completion is everything from the first scored one."""
    return sequence.scored.index(True)


def shared_tokens(group: Sequence[ScoredSequence]) -> int:
    """Return the tokens of a group's row; a completion's last token predicts nothing and stays out."""
    return part_ends(group)[-1]


def part_ends(group: Sequence[ScoredSequence]) -> list[int]:
    """Return where the parts of a group's row end: the prompt, then each completion."""
    prompt = prompt_tokens(group[0])
    parts = (len(sequence.token_ids) - prompt - 1 for sequence in group)
    return list(accumulate(parts, initial=prompt))


def collate_shared(
    groups: Sequence[Sequence[ScoredSequence]],
    indices: Sequence[int],
    *,
    pad_id: int,
    dtype: torch.dtype,
    device: torch.device,
) -> MicroBatch:
    """Return the micro-batch of `groups` on `device`; `indices` names its sequences in order.

    `dtype`: the model's; an additive mask must have its queries'.
    """
    ends = [part_ends(group) for group in groups]
    width = max(row[-1] for row in ends)
    ids = torch.full((len(groups), width), pad_id)
    positions = torch.zeros_like(ids)
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    owner = 0
    for row, group in enumerate(groups):
        prompt = ends[row][0]
        ids[row, :prompt] = torch.tensor(group[0].token_ids[:prompt])
        positions[row, :prompt] = torch.arange(prompt)
        for sequence, (start, end) in zip(group, pairwise(ends[row]), strict=True):
            completion = sequence.token_ids[prompt:]
            ids[row, start:end] = torch.tensor(completion[:-1], dtype=ids.dtype)
            positions[row, start:end] = prompt + torch.arange(end - start)
            for offset, token in enumerate(completion):
                if sequence.scored[prompt + offset]:
                    before = prompt - 1 if offset == 0 else start + offset - 1
                    rows.append(row * width + before)
                    targets.append(token)
                    owners.append(owner)
            owner += 1
    batch = MicroBatch(
        indices=tuple(indices),
        input_ids=ids,
        position_ids=positions,
        attention_mask=None,
        rows=torch.tensor(rows, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        sequence_ids=torch.tensor(owners, dtype=torch.long),
        cu_seqlens=torch.zeros(1, dtype=torch.int32),
        max_length=width,
    )
    mask = shared_mask(ends, dtype=dtype, device=device)
    return replace(batch.to(device), attention_mask=mask)


def shared_mask(
    ends: Sequence[Sequence[int]], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the additive mask [B, 1, T, T] of rows whose parts end at `ends`, made on `device`.

    A token sees the earlier tokens of the prompt and of its own completion. Padding sees the prompt: a
    softmax over nothing would be NaN. In memory rows are padded to MASK_ALIGNMENT.
    """
    width = max(row[-1] for row in ends)
    mask = torch.full((len(ends), 1, width, padded(width)), MASKED, dtype=dtype, device=device)
    for row, parts in enumerate(ends):
        prompt = parts[0]
        mask[row, 0, prompt:, :prompt] = 0.0
        for start, end in pairwise((0, *parts)):
            mask[row, 0, start:end, start:end].triu_(1)
    return mask[..., :width]


def mask_bytes(rows: int, tokens: int, element_bytes: int) -> int:
    """Return the bytes of the mask of `rows` rows of `tokens` tokens."""
    return rows * tokens * padded(tokens) * element_bytes


def padded(width: int) -> int:
    """Return `width` rounded up to MASK_ALIGNMENT."""
    return -(-width // MASK_ALIGNMENT) * MASK_ALIGNMENT
