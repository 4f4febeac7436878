"""The seam between trainer and generation: what an engine must do, and what it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """How completions are drawn; the scorer uses the same temperature, top-p and top-k."""

    num_generations: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    stop_token_ids: tuple[int, ...] = ()
    """End a completion like EOS does; the token is kept."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, over however many tokens they lie. An engine may stop at them; the
    trainer cuts what goes on behind them."""
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion."""

    prompt_index: int
    token_ids: tuple[int, ...]
    """EOS included when the model emitted it."""
    logprobs: tuple[float, ...] | None
    """The sampler's own log-probability of every token after temperature/top-p/top-k; None = not known."""
    finished: bool
    """False: cut at max_new_tokens."""


class Engine(Protocol):
    """Generates completions with the policy's current weights."""

    name: str

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings
    ) -> list[Completion]:
        """Return num_generations completions per prompt, grouped by prompt, in order."""
        ...

    def update_weights(self) -> None:
        """Make the next generate use the trained weights as they are now."""
        ...

    def release(self) -> None:
        """Give back what only generation needs (KV cache) before training."""
        ...

    def resume(self) -> None:
        """Take it again before generation."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes the engine holds now, by term (weights, kv_cache, engine)."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


EngineFactory = Any
"""Callable(model, tokenizer, recipe, plan) -> Engine; see trainer.rollout."""
