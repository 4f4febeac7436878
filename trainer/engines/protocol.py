"""The seam between trainer and generation: what an engine must do, and what it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PROMPT_STRIDE = 7919
"""Between the seeds of two prompts: a prime that no group of completions is as large as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """How completions are drawn; the scorer uses the same temperature, top-p, top-k and min-p."""

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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Of tokens of prompt and completion; the other penalties are of the completion's alone."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    guided_regex: str | None = None
    guided_json: dict[str, Any] | None = None
    seed: int | None = None
    """Of the whole step; every prompt has its own from it."""
    numbers: tuple[int, ...] = ()
    """Which of the step's prompts those asked are, for their seeds: the ranks that share a step draw what one
    rank would. () = in order, from 0."""

    def prompt_seed(self, index: int) -> int | None:
        """Return the seed of prompt `index`, whose n-th completion draws by the n-th number from there."""
        if self.seed is None:
            return None
        return self.seed + PROMPT_STRIDE * (self.numbers[index] if self.numbers else index)

    @property
    def guided(self) -> dict[str, Any]:
        """Return the grammar by vLLM's name for its kind; empty without one."""
        if self.guided_regex is not None:
            return {"regex": self.guided_regex}
        return {} if self.guided_json is None else {"json": self.guided_json}

    @property
    def penalised(self) -> bool:
        """Whether what was said before changes what comes."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion."""

    prompt_index: int
    token_ids: tuple[int, ...]
    """EOS included when the model emitted it."""
    logprobs: tuple[float, ...] | None
    """The sampler's own log-probability of every token as it was drawn: after penalties, grammar,
    temperature, min-p, top-p and top-k; None = not known."""
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
