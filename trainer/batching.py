"""Token-budget micro-batches: as many sequences as fit in M tokens, nothing padded to the longest.

Two layouts, the same tokens:

* packed: sequences end to end in one row [1, M], positions starting anew at each; attention keeps
  them apart (varlen flash attention, or the block-diagonal mask that transformers derives from the
  positions). No padding at all.
* sorted: rows [B, T] of similar length, right-padded to their own longest; for models whose layers
  can't keep packed sequences apart (state-space and convolution layers).

A sequence is never cut, and losses use the whole step's normaliser, so the gradient of any split
equals that of one big batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

import torch
from torch import Tensor

from planner.errors import UsageError


class Layout(StrEnum):
    """How sequences of a micro-batch lie in memory."""

    PACKED = "packed"
    SORTED = "sorted"


def micro_batches(
    lengths: Sequence[int],
    *,
    budget_tokens: int,
    layout: Layout = Layout.PACKED,
    max_sequences: int | None = None,
) -> list[list[int]]:
    """Return index lists; the tokens of each, padding included, are at most `budget_tokens`.

    Packed: best fit, longest first (at most 11/9 of the fewest possible, plus one). Sorted: runs of the
    sorted lengths. The longest comes first, so if a step runs out of memory it does so at once.
    Raises UsageError if a sequence alone is longer than the budget, or empty.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if order:
        _check_lengths(lengths[order[0]], lengths[order[-1]], budget_tokens)
    limit = max_sequences or len(lengths)
    if layout is Layout.PACKED:
        return _best_fit(order, lengths, budget_tokens, limit)
    batches: list[list[int]] = []
    for index in order:
        # the first of a run is its longest: rows * longest is what the run takes
        run = batches[-1] if batches else []
        fits = run and lengths[run[0]] * (len(run) + 1) <= budget_tokens and len(run) < limit
        if fits:
            run.append(index)
        else:
            batches.append([index])
    return batches


def _check_lengths(longest: int, shortest: int, budget_tokens: int) -> None:
    if longest > budget_tokens:
        raise UsageError(
            f"token budget: a sequence of {longest} tokens is longer than the budget of "
            f"{budget_tokens}",
            hint="raise the budget, or lower prompt_length / completion_length",
        )
    if shortest < 1:
        raise UsageError("token budget: an empty sequence", hint="drop it before batching")


def _best_fit(
    order: list[int], lengths: Sequence[int], budget_tokens: int, limit: int
) -> list[list[int]]:
    batches: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        open_batches = [
            number
            for number, free in enumerate(room)
            if free >= length and len(batches[number]) < limit
        ]
        if open_batches:
            number = min(open_batches, key=lambda candidate: room[candidate])
            batches[number].append(index)
            room[number] -= length
        else:
            batches.append([index])
            room.append(budget_tokens - length)
    return batches


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredSequence:
    """One sequence: its tokens, and which of them are scored."""

    token_ids: tuple[int, ...]
    scored: tuple[bool, ...]
    """True: the log-probability of this token counts (completion tokens). Never the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Model inputs of a micro-batch, and where its N scored tokens are.

    `hidden.flatten(0, 1)[rows]` are the hidden states that predict `targets`.
    """

    indices: tuple[int, ...]
    """Which sequences, in the order of `sequence_ids`."""
    input_ids: Tensor
    """[B, T]; packed: [1, M]."""
    position_ids: Tensor
    """[B, T], from 0 in every sequence."""
    attention_mask: Tensor | None
    """[B, T], 1 = a token; None when packed: positions say where sequences begin."""
    rows: Tensor
    """[N] into the flattened [B * T]: the position before each scored token."""
    targets: Tensor
    """[N] the scored tokens."""
    sequence_ids: Tensor
    """[N] which sequence of `indices` a scored token belongs to."""
    cu_seqlens: Tensor
    """[S + 1] int32: sequence boundaries (packed layout), for varlen attention."""
    max_length: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> "MicroBatch":
        """Return it on `device`."""
        tensors = {
            name: value.to(device, non_blocking=True)
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)  # type: ignore[arg-type]


def collate(
    sequences: Sequence[ScoredSequence], indices: Sequence[int], *, layout: Layout, pad_id: int = 0
) -> MicroBatch:
    """Return the micro-batch of sequences[i] for i in indices.

    Raises ValueError if a first token is scored: nothing predicts it.
    """
    chosen = [sequences[index] for index in indices]
    for index, sequence in zip(indices, chosen, strict=True):
        if len(sequence.scored) != len(sequence.token_ids) or sequence.scored[0]:
            raise ValueError(f"sequence {index}: scored needs one flag a token, the first False")
    lengths = [len(sequence.token_ids) for sequence in chosen]
    packed = layout is Layout.PACKED
    width = max(lengths)
    starts = (
        [0, *accumulate(lengths)] if packed else [width * row for row in range(len(chosen) + 1)]
    )
    total = starts[-1]
    ids = torch.full((total,), pad_id, dtype=torch.long)
    positions = torch.zeros(total, dtype=torch.long)
    mask = torch.zeros(total, dtype=torch.long)
    rows: list[int] = []
    owners: list[int] = []
    for owner, (start, length, sequence) in enumerate(zip(starts, lengths, chosen, strict=False)):
        ids[start : start + length] = torch.tensor(sequence.token_ids)
        positions[start : start + length] = torch.arange(length)
        mask[start : start + length] = 1
        scored = [start + place for place, flag in enumerate(sequence.scored) if flag]
        rows += scored
        owners += [owner] * len(scored)
    shape = (1, total) if packed else (len(chosen), width)
    scored_rows = torch.tensor(rows, dtype=torch.long)
    return MicroBatch(
        indices=tuple(indices),
        input_ids=ids.reshape(shape),
        position_ids=positions.reshape(shape),
        attention_mask=None if packed else mask.reshape(shape),
        rows=scored_rows - 1,
        targets=ids[scored_rows],
        sequence_ids=torch.tensor(owners, dtype=torch.long),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_length=width,
    )
