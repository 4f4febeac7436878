"""A step's sequences dealt to ranks, and micro-batches made equally many on each."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from trainer.batching import MicroBatch
from trainer.parallel.ranks import Ranks


def deal(lengths: Sequence[int], ranks: Ranks) -> list[int]:
    """Return the indices of this rank's sequences: the longest first, each to whoever has least.

    Every rank deals alike, so nothing is sent. One rank has them all, in order.
    """
    if not ranks.several:
        return list(range(len(lengths)))
    held = [0] * ranks.size
    own: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = held.index(min(held))
        held[rank] += lengths[index]
        if rank == ranks.rank:
            own.append(index)
    return sorted(own)


def evened(
    batches: Iterable[MicroBatch], count: int, ranks: Ranks, *, blank: Callable[[], MicroBatch]
) -> Iterator[MicroBatch]:
    """Yield this rank's `count` micro-batches, then blank ones until it has as many as any rank."""
    most = int(ranks.max(float(count)))
    yield from batches
    for _ in range(most - count):
        yield blank()


def blank_batch(token: int, device: torch.device) -> MicroBatch:
    """Return a micro-batch that no sequence is in: it runs the model, and its loss weighs nothing."""
    one = torch.zeros(1, dtype=torch.long)
    batch = MicroBatch(
        indices=(),
        input_ids=torch.full((1, 2), token),
        position_ids=torch.arange(2)[None],
        attention_mask=None,
        rows=one,
        targets=torch.full((1,), token),
        sequence_ids=one,
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        max_length=2,
    )
    return batch.to(device)
