"""Token-budget micro-batches: as many sequences as fit in M tokens, nothing padded to the longest.

Three layouts, the same tokens:

* packed: sequences end to end in one row [1, M], positions starting anew at each; attention keeps
  them apart (varlen flash attention, or the block-diagonal mask that transformers derives from the
  positions). No padding at all.
* rows: several sequences end to end in each of several rows [B, T], none longer than the recipe's
  length; what packing is where attention needs a mask, whose size is that of a row squared.
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
    ROWS = "rows"
    SORTED = "sorted"


def micro_batches(
    lengths: Sequence[int],
    *,
    budget_tokens: int,
    layout: Layout = Layout.PACKED,
    max_sequences: int | None = None,
    row_tokens: int = 0,
) -> list[list[int]]:
    """Return index lists; the tokens of each, padding included, are at most `budget_tokens`.

    Packed: best fit, longest first (at most 11/9 of the fewest possible, plus one). Rows: the same into
    rows of `row_tokens`, then as sorted ones. Sorted: runs of the sorted lengths. The longest comes first, so if a step runs out of memory it does so at once.
    Raises UsageError if a sequence alone is longer than the budget, or empty.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if order:
        _check_lengths(lengths[order[0]], lengths[order[-1]], budget_tokens)
    limit = max_sequences or len(lengths)
    if layout is Layout.PACKED:
        return _best_fit(order, lengths, budget_tokens, limit)
    rows = [[index] for index in order]
    if layout is Layout.ROWS and order:
        filled = _best_fit(order, lengths, row_tokens or lengths[order[0]], limit)
        rows = sorted(filled, key=lambda row: -sum(lengths[index] for index in row))
    return _runs(rows, lengths, budget_tokens, limit)


def _runs(
    rows: list[list[int]], lengths: Sequence[int], budget_tokens: int, limit: int
) -> list[list[int]]:
    """Return rows, longest first, in runs padded to their first one within the budget."""
    batches: list[list[int]] = []
    width = count = 0
    for row in rows:
        fits = count and width * (count + 1) <= budget_tokens
        if fits and len(batches[-1]) + len(row) <= limit:
            batches[-1] += row
            count += 1
        else:
            batches.append(list(row))
            width, count = sum(lengths[index] for index in row), 1
    return batches


def fill_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Return rows of indices whose lengths add up to `row_tokens` at most: best fit, longest first."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return _best_fit(order, lengths, row_tokens, len(lengths))


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
    """[B, T], 1 = a token; None when packed or in rows: positions say where sequences begin."""
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
        """Tokens that the model computes, padding included; a blank one has none that count."""
        return 0 if self.blank else self.input_ids.numel()

    @property
    def blank(self) -> bool:
        """Whether no sequence is in it: it only keeps this rank in step with the others."""
        return not self.indices

    def to(self, device: torch.device) -> "MicroBatch":
        """Return it on `device`."""
        tensors = {
            name: value.to(device, non_blocking=True)
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)  # type: ignore[arg-type]


def collate(
    sequences: Sequence[ScoredSequence],
    indices: Sequence[int],
    *,
    layout: Layout,
    pad_id: int = 0,
    row_tokens: int = 0,
) -> MicroBatch:
    """Return the micro-batch of sequences[i] for i in indices.

    Rows: a sequence goes into the row of the one before it while `row_tokens` allow.

    Raises ValueError if a first token is scored: nothing predicts it.
    """
    chosen = [sequences[index] for index in indices]
    for index, sequence in zip(indices, chosen, strict=True):
        if len(sequence.scored) != len(sequence.token_ids) or sequence.scored[0]:
            raise ValueError(f"sequence {index}: scored needs one flag a token, the first False")
    lengths = [len(sequence.token_ids) for sequence in chosen]
    packed = layout is Layout.PACKED
    width = max(lengths)
    if layout is Layout.ROWS:
        starts, shape = _row_starts(lengths, row_tokens)
    elif packed:
        starts, shape = [0, *accumulate(lengths)][:-1], (1, sum(lengths))
    else:
        starts, shape = [width * row for row in range(len(chosen))], (len(chosen), width)
    total = shape[0] * shape[1]
    ids = torch.full((total,), pad_id, dtype=torch.long)
    positions = torch.zeros(total, dtype=torch.long)
    mask = torch.zeros(total, dtype=torch.long)
    rows: list[int] = []
    owners: list[int] = []
    for owner, (start, length, sequence) in enumerate(zip(starts, lengths, chosen, strict=True)):
        ids[start : start + length] = torch.tensor(sequence.token_ids)
        positions[start : start + length] = torch.arange(length)
        mask[start : start + length] = 1
        scored = [start + place for place, flag in enumerate(sequence.scored) if flag]
        rows += scored
        owners += [owner] * len(scored)
    scored_rows = torch.tensor(rows, dtype=torch.long)
    return MicroBatch(
        indices=tuple(indices),
        input_ids=ids.reshape(shape),
        position_ids=positions.reshape(shape),
        attention_mask=mask.reshape(shape) if layout is Layout.SORTED else None,
        rows=scored_rows - 1,
        targets=ids[scored_rows],
        sequence_ids=torch.tensor(owners, dtype=torch.long),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_length=width,
    )


def _row_starts(lengths: Sequence[int], row_tokens: int) -> tuple[list[int], tuple[int, int]]:
    """Return (where each sequence starts in the flattened rows, shape of the rows)."""
    rows: list[list[int]] = []
    for length in lengths:
        if not rows or sum(rows[-1]) + length > row_tokens:
            rows.append([])
        rows[-1].append(length)
    width = max(sum(row) for row in rows)
    starts = [
        number * width + start
        for number, row in enumerate(rows)
        for start in [0, *accumulate(row)][:-1]
    ]
    return starts, (len(rows), width)
