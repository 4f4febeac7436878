"""Generation by the training model itself: no second copy of the weights, nothing to synchronise.

A group's prompt runs once and its KV cache is repeated for the group, with room for all that it may say;
finished rows leave the batch.
Shapes: U prompts, B rows, P prompt tokens, V vocabulary.
"""

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from planner.errors import UnsupportedError, VramwiseError
from planner.run.recipe import Recipe
from trainer.engines.cache import fill, keep, roomy, spread
from trainer.engines.protocol import Completion, SamplingSettings
from trainer.model import Policy, eos_ids
from trainer.sampling import StopStrings, draw, penalise, shape_logits, uniforms

PREFILL_TOKENS = 2048
"""Prompt tokens of one forward: their activations are gone before the cache is full."""
COMPACT_BELOW = 0.75
"""Rows are dropped from the cache when at most this share of them still runs: dropping moves some."""


@dataclass
class _Row:
    """One completion under way."""

    prompt_index: int
    seed: int | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


class TransformersEngine:
    """The `transformers` engine; see trainer.engines.protocol.Engine."""

    name = "transformers"

    def __init__(self, policy: Policy, *, recipe: Recipe, plan: Any = None) -> None:
        self._policy = policy
        # the planner's own rule for how many sequences are generated at once
        rows = max(recipe.micro_batch_size or 1, recipe.num_generations or 1)
        self._wave = recipe.engine.max_num_seqs or rows
        self._prefill_tokens = recipe.engine.max_num_batched_tokens or PREFILL_TOKENS
        self._kv_bytes = 0

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings
    ) -> list[Completion]:
        """Return num_generations completions per prompt, grouped by prompt, in order.

        When memory runs out, fewer are under way at once from then on, and all of it is done again.
        """
        while True:
            rows = self._attempt(prompts, settings)
            if rows is not None:
                break
            self._policy.settle()
            if self._wave == 1:
                raise VramwiseError(
                    "out of memory while generating one completion at a time",
                    hint="lower prompt_length or completion_length, or see: vramwise advise RUN.yaml",
                )
            self._wave = max(1, self._wave // 2)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self._end_together()
        return [
            Completion(
                prompt_index=row.prompt_index,
                token_ids=tuple(row.tokens),
                logprobs=tuple(row.logprobs),
                finished=row.finished,
            )
            for row in rows
        ]

    def _attempt(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings
    ) -> list[_Row] | None:
        """Return all rows, filled; or None when memory ran out: then no frame holds its tensors."""
        if settings.guided:
            raise UnsupportedError(
                f"sampling.guided_{next(iter(settings.guided))}: engine kind transformers has no grammars",
                hint="engine kind vllm-push, vllm-shared or vllm-server",
            )
        rows = [
            _Row(prompt_index=index, seed=None if seed is None else seed + number)
            for index, seed in enumerate(map(settings.prompt_seed, range(len(prompts))))
            for number in range(settings.num_generations)
        ]
        self._kv_bytes = 0
        try:
            for start in range(0, len(rows), self._wave):
                self._run(rows[start : start + self._wave], prompts, settings)
        except torch.OutOfMemoryError:
            return None
        return rows

    def _run(
        self,
        rows: list[_Row],
        prompts: Sequence[Sequence[int]],
        settings: SamplingSettings,
    ) -> None:
        """Fill `rows` with tokens until each has ended or is at the limit."""
        ends = set(eos_ids(self._policy)) | set(settings.stop_token_ids)
        stops = StopStrings(self._policy.tokenizer, settings.stop)
        logits, mask, cache = self._prefill(rows, prompts, settings.max_new_tokens)
        active = list(rows)
        at = uniforms([row.seed for row in rows], settings.max_new_tokens).to(logits.device)
        for step in range(settings.max_new_tokens):
            shaped = shape_logits(
                penalise(
                    logits,
                    [prompts[row.prompt_index] for row in active],
                    [row.tokens for row in active],
                    settings,
                ),
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
            )
            token, logp = draw(shaped, at[:, step])
            for row, index, value in zip(active, token.tolist(), logp.tolist(), strict=True):
                if not row.finished:
                    row.tokens.append(index)
                    row.logprobs.append(value)
                    row.finished = index in ends or stops.end(row.tokens)
            self._kv_bytes = max(self._kv_bytes, cache_bytes(cache))
            running = [place for place, row in enumerate(active) if not row.finished]
            if not running or step == settings.max_new_tokens - 1:
                return
            if len(running) <= COMPACT_BELOW * len(active) and _selectable(cache):
                places = keep(cache, running, token.device)
                chosen = torch.tensor(places, device=token.device)
                token, mask, at = token[chosen], mask[chosen], at[chosen]
                active = [active[place] for place in places]
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
            logits = self._forward(token[:, None], mask, cache)

    def _prefill(
        self, rows: list[_Row], prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[Tensor, Tensor, Any]:
        """Return (logits [B, V] of the first new token, mask [B, P], cache) of `rows`."""
        cache = self._new_cache()
        unique = list(dict.fromkeys(row.prompt_index for row in rows))
        if not _selectable(cache):
            unique = [row.prompt_index for row in rows]
        width = max(len(prompts[index]) for index in unique)
        full = width + max_new_tokens - 1  # the last token is not run
        cache = roomy(cache, width if len(unique) < len(rows) else full)
        ids = torch.full((len(unique), width), self._policy.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for place, index in enumerate(unique):
            ids[place, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[place, width - len(prompts[index]) :] = 1
        device = self._policy.device
        ids, mask = ids.to(device), mask.to(device)
        logits = self._prefill_in_chunks(ids, mask, cache)
        if len(unique) < len(rows):
            where = {index: place for place, index in enumerate(unique)}
            chosen = torch.tensor([where[row.prompt_index] for row in rows], device=device)
            spread(cache, chosen, full)
            logits, mask = logits[chosen], mask[chosen]
        return logits, mask, cache

    def _prefill_in_chunks(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Return logits [U, V] after the prompts `ids` [U, P], at most PREFILL_TOKENS tokens at a time."""
        columns = max(1, self._prefill_tokens // ids.shape[0])
        for start in range(0, ids.shape[1], columns):
            stop = min(start + columns, ids.shape[1])
            logits = self._forward(ids[:, start:stop], mask[:, :stop], cache)
        return logits

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._policy.base.config)

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Return logits [B, V] of the token after `ids` [B, t]; positions skip the left padding."""
        if self._gathers:
            self._policy.ranks.any(True)  # the others run along
        return self._policy.whole(lambda: self._logits(ids, mask, cache), keep=True)

    def _logits(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        output = self._policy.base(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    @property
    def _gathers(self) -> bool:
        """Whether a forward needs every rank: layers are gathered from all of them."""
        return self._policy.ranks.shards > 1

    def _end_together(self) -> None:
        """Run along with ranks whose completions go on: as many forwards on each as on the slowest."""
        one = torch.zeros(1, 1, dtype=torch.long, device=self._policy.device)
        while self._gathers and self._policy.ranks.any(False):
            # where another one's memory ran out, it starts again, and is waited for again
            with contextlib.suppress(torch.OutOfMemoryError):
                self._policy.whole(
                    lambda: self._policy.base(input_ids=one, use_cache=False), keep=True
                )
        self._policy.settle()

    def max_rows(self, wanted: int) -> int:
        """Return how many of `wanted` completions are under way at once."""
        return min(wanted, self._wave)

    @torch.no_grad()
    def rehearse(
        self, rows: int, *, num_prompts: int, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Hold what the last token of a rollout at full length holds: all prompts, then a full cache."""
        ids = torch.zeros(num_prompts, prompt_tokens, dtype=torch.long, device=self._policy.device)
        cache = roomy(self._new_cache(), prompt_tokens)
        logits = self._prefill_in_chunks(ids, torch.ones_like(ids), cache)
        if _selectable(cache):
            chosen = torch.arange(rows, device=ids.device) % num_prompts
            full = prompt_tokens + completion_tokens - 1
            spread(cache, chosen, full)
            fill(cache, full - 1)
            mask = ids.new_ones(rows, full)
            logits = self._forward(ids.new_zeros(rows, 1), mask, cache)
        at = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
        draw(shape_logits(logits, temperature=1.0, top_k=0, top_p=1.0), at)
        self._end_together()

    def update_weights(self) -> None:
        """Do nothing: the weights are the policy's own."""

    def release(self) -> None:
        """Do nothing: the cache lives only inside generate."""

    def resume(self) -> None:
        """Do nothing."""

    def memory(self) -> dict[str, int]:
        """Return the largest KV cache of the last rollout: it is gone by now."""
        return {"weights": 0, "kv_cache": self._kv_bytes, "engine": 0}

    def close(self) -> None:
        """Do nothing."""


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors in a transformers cache."""
    return sum(
        tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(tensor, Tensor)
    )


def _selectable(cache: Any) -> bool:
    """Return whether rows can be picked out of `cache` (linear-attention states cannot)."""
    return all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
