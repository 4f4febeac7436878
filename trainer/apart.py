"""Asks a loaded model whether it keeps the samples of one row apart."""

from typing import Any

import torch
from torch import Tensor

from planner.errors import UnsupportedError
from trainer.batching import Layout, MicroBatch, ScoredSequence, collate
from trainer.scoring import hidden_rows

CHECK_TOKENS = 12
DIFFERENT = 0.1
"""Hidden states further apart than this share of their size are another sample's doing."""


@torch.no_grad()
def check_apart(policy: Any, *, asked: str) -> None:
    """Run two samples in one row and each by itself; raises UnsupportedError when they differ.

    What a model's code does with positions is its own affair: this asks it.
    """
    top = max(4, min(policy.base.config.get_text_config().vocab_size, 1000))
    first, second = (
        ScoredSequence(
            token_ids=tuple((3 + step * place) % top for place in range(CHECK_TOKENS)),
            scored=(False,) + (True,) * (CHECK_TOKENS - 1),
        )
        for step in (7, 11)
    )

    def hidden(sequences: list[ScoredSequence], batch: MicroBatch | None = None) -> Tensor:
        made = batch or collate(sequences, range(len(sequences)), layout=Layout.SORTED)
        made = made.to(policy.device)
        found: Tensor = policy.whole(lambda: hidden_rows(policy, made))
        return found.float()

    both = [first, second]
    row = collate(both, range(2), layout=Layout.PACKED)
    together, alone = hidden(both, row), torch.cat([hidden([first]), hidden([second])])
    error = (together - alone).norm() / alone.norm().clamp(min=1e-12)
    if not bool(error < DIFFERENT):
        raise UnsupportedError(
            f"{asked}: true, but this model computes {float(error):.0%} otherwise for samples in one row",
            hint=f"{asked}: false",
        )
