"""Temperature, min-p, top-k and top-p: one definition for the sampler and for the scorer; penalties.

Shapes: B rows, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.errors import VramwiseError


def shape_logits(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    keep: Tensor | None = None,
) -> Tensor:
    """Return fp32 logits [B, V] after temperature, min-p, top-k, then top-p: dropped ones are -inf.

    The order is vLLM's.

    `keep` [B]: a token of each row that is never dropped. The scorer passes the sampled token, because
    the policy may have moved it just over the edge since it was drawn.
    """
    logits = logits.float() / temperature
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return logits
    kept = torch.ones_like(logits, dtype=torch.bool)
    with torch.no_grad():
        if min_p > 0:
            kept &= logits >= logits.max(dim=-1, keepdim=True).values + math.log(min_p)
        if 0 < top_k < logits.shape[-1]:
            kept &= logits >= logits.topk(top_k, dim=-1).values[:, -1:]
        if top_p < 1:
            ranked, order = logits.masked_fill(~kept, -torch.inf).sort(dim=-1, descending=True)
            probabilities = ranked.softmax(dim=-1)
            # the first token that reaches top_p stays: what lies before it is below top_p
            before = probabilities.cumsum(dim=-1) - probabilities
            kept &= torch.zeros_like(kept).scatter(-1, order, before < top_p)
        if keep is not None:
            kept.scatter_(-1, keep[:, None], True)
    return logits.masked_fill(~kept, -torch.inf)


def penalise(
    logits: Tensor, prompts: Sequence[Sequence[int]], said: Sequence[Sequence[int]], settings: Any
) -> Tensor:
    """Return logits [B, V] after the penalties of `settings` (SamplingSettings), as vLLM makes them.

    `prompts` and `said`: the tokens of each row's prompt and of its completion so far.
    """
    if not settings.penalised:
        return logits
    logits = logits.float().clone()
    for row, (prompt, completion) in enumerate(zip(prompts, said, strict=True)):
        if settings.repetition_penalty != 1:
            seen = torch.tensor(sorted({*prompt, *completion}), device=logits.device)
            values, factor = logits[row, seen], settings.repetition_penalty
            logits[row, seen] = torch.where(values > 0, values / factor, values * factor)
        counts = Counter(completion)
        if counts:
            seen = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device)
            logits[row, seen] -= settings.frequency_penalty * times + settings.presence_penalty
    return logits


def uniforms(seeds: Sequence[int | None], count: int) -> Tensor:
    """Return `count` numbers in [0, 1) for each of B completions, fp64 [B, count]; those of a seed are its own.

    None: of torch's own generator.
    """
    rows = torch.empty(len(seeds), count, dtype=torch.float64)
    for row, seed in zip(rows, seeds, strict=True):
        row.uniform_(generator=None if seed is None else torch.Generator().manual_seed(seed))
    return rows


def draw(logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return (token [B], its log-probability [B]) drawn from shaped fp32 logits [B, V].

    `at` [B]: a number in [0, 1) for each, where in the running sum of probabilities its token lies. So
    what is drawn depends on nothing but the row's own logits and number, whatever it is batched with.
    Raises VramwiseError for NaN: the weights are broken, and nothing can be sampled any more.
    """
    likely = logits.softmax(dim=-1)
    if likely.isnan().any():
        raise VramwiseError(
            "sampling: the model's logits are NaN",
            hint="lower train.lr, or go back to an earlier checkpoint; fp16 overflows where bf16 doesn't",
        )
    upto = likely.cumsum(dim=-1, dtype=torch.float64)
    token = torch.searchsorted(upto, at[:, None] * upto[:, -1:], right=True)
    token.clamp_(max=logits.shape[-1] - 1)
    return token[:, 0], likely.gather(-1, token)[:, 0].log()


def stop_tokens(tokenizer: object, stop: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ids of all tokens whose text holds one of the `stop` strings."""
    if not stop:
        return ()
    vocabulary = tokenizer.get_vocab()  # type: ignore[attr-defined]
    ids = sorted(vocabulary.values())
    texts = tokenizer.batch_decode([[index] for index in ids])  # type: ignore[attr-defined]
    return tuple(
        index for index, text in zip(ids, texts, strict=True) if any(word in text for word in stop)
    )


class StopStrings:
    """Finds where a completion has come to one of the `stop` strings, over however many tokens it lies."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        # a token has a byte at least, and what begins a text may be decoded otherwise: some to spare
        self._window = max((len(word.encode()) for word in stop), default=0) + 4

    def end(self, tokens: list[int]) -> bool:
        """Return whether a string ends with the last of `tokens`; to be asked after every token."""
        if not self._stop:
            return False
        text = self._tokenizer.decode(tokens[-self._window :], skip_special_tokens=False)
        return any(word in text for word in self._stop)

    def cut(self, tokens: tuple[int, ...]) -> int | None:
        """Return how many of `tokens` there are up to the first string, its last token included."""
        if not self._stop:
            return None
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        if not any(word in text for word in self._stop):
            return None
        counts = range(1, len(tokens) + 1)
        return next((count for count in counts if self.end(list(tokens[:count]))), None)
