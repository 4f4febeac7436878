"""A server's view of a plan: cache, requests at once, the longest request, adapters, shared prefixes."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from planner.answers.advise import largest
from planner.answers.serving_changes import Rescue, rescues
from planner.errors import VramwiseError
from planner.machines.machine import Machine
from planner.models.spec import ModelSpec
from planner.plan import Plan, plan
from planner.run.engine_choices import DEFAULT_LORA_RANK
from planner.run.recipe import MAX_TOKENS, Recipe, Task
from planner.run.resolved import Resolved
from planner.terms.engine import Serving, kv_pool
from planner.terms.vllm_blocks import VllmKv
from planner.terms.vllm_weights import adapter_slot_bytes

TYPICAL = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of a request, prompt and answer together."""
PREFIX = 1024
"""Tokens of a system prompt that all requests share, where nobody says how many."""
MOST_SLOTS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """How many requests of one length run at once."""

    tokens: int
    at_once: int
    """On all engines side by side; more wait in the queue."""
    low: int
    """The same where the pool is as small as in 5% of published starts."""
    by: str
    """What ends it: the cache, or max_num_seqs."""
    given: bool
    """The length that was asked about."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "tokens": self.tokens,
            "at_once": self.at_once,
            "low": self.low,
            "limited_by": self.by,
            "given": self.given,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Adapters that are served beside the base."""

    now: int
    rank: int
    slot_bytes: int
    """One slot on one GPU; it is there from the start, loaded or not."""
    slot_tokens: int
    """Tokens of cache that one slot takes the place of."""
    most: int
    """Slots with which the server still starts."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "slots": self.now,
            "rank": self.rank,
            "slot_bytes": self.slot_bytes,
            "slot_kv_tokens": self.slot_tokens,
            "most_slots": self.most,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """What a prefix that all requests share saves."""

    enabled: bool
    tokens: int
    """Shared tokens, whole blocks of them."""
    request_tokens: int
    alone: int
    """Requests at once without sharing."""
    at_once: int
    """Requests at once when the prefix is held once."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "enabled": self.enabled,
            "shared_tokens": self.tokens,
            "request_tokens": self.request_tokens,
            "at_once_alone": self.alone,
            "at_once_shared": self.at_once,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingView:
    """All that a server's owner asks of one plan."""

    figures: Serving
    starts: bool
    """vLLM starts; False with the risk of refusal that the plan does not allow."""
    why: str
    """Why it refuses, "" where it starts."""
    engines: int
    """Side by side (data parallel), each with the pool that `figures` say."""
    max_num_seqs: int
    bytes_per_token: int
    requests: tuple[Requests, ...]
    longest: int
    """The largest max_model_len with which it starts, all else as it is; 0 = none."""
    made_for: int
    """Positions of the model; 0 = it does not say."""
    slots: Slots | None
    prefix: Prefix | None
    changes: tuple[Rescue, ...]
    """What makes it start, or, where it starts, what makes more room."""

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of `serving` in --json."""
        return self.figures.to_dict() | {
            "starts": self.starts,
            "why": self.why,
            "max_model_len": self.figures.max_model_len,
            "longest_max_model_len": self.longest,
            "model_max_position": self.made_for,
            "kv_bytes_per_token": self.bytes_per_token,
            "engines": self.engines,
            "max_num_seqs": self.max_num_seqs,
            "requests": [row.to_dict() for row in self.requests],
            "lora": self.slots.to_dict() if self.slots else None,
            "prefix_cache": self.prefix.to_dict() if self.prefix else None,
            "changes": [change.to_dict() for change in self.changes],
        }


def serving_view(
    model: ModelSpec, recipe: Recipe, machine: Machine, base: Plan, *, shared_prefix: int = 0
) -> ServingView | None:
    """Return a server's view of its plan; None where vLLM does not serve, or the model has no cache.

    `shared_prefix`: tokens that all requests start with; 0 = nobody knows, a usual one is shown.
    """
    figures = base.serving
    if base.resolved.task is not Task.SERVE or figures is None:
        return None
    r = replace(base.resolved, max_num_seqs=base.resolved.max_num_seqs or 1)
    given = request_tokens(recipe, r)
    pool = figures.pool
    starts = base.fits
    return ServingView(
        figures=figures,
        starts=starts,
        why="" if starts else _why(base),
        engines=r.data_parallel,
        max_num_seqs=r.max_num_seqs,
        bytes_per_token=_bytes_per_token(pool),
        requests=_rows(model, r, figures, given),
        longest=longest_length(model, recipe, machine),
        made_for=model.longest,
        slots=_slots(model, recipe, machine, base),
        prefix=_prefix(model, r, figures, given, shared_prefix),
        changes=tuple(rescues(model, recipe, machine, base)),
    )


def _why(base: Plan) -> str:
    """Return why vLLM refuses, or may."""
    if not base.may_run:
        return base.why
    return (
        f"vLLM refuses {base.risk.p_oom:.0%} of starts like this: its pool is then under one request "
        f"of {base.resolved.seq_tokens:,} tokens"
    )


def request_tokens(recipe: Recipe, r: Resolved) -> int:
    """Return the length of the requests asked about: prompt and answer, else max_model_len."""
    parts = (recipe.prompt_length, recipe.completion_length)
    stated = sum(part for part in parts if part) if all(parts) else 0
    return min(stated or r.seq_tokens, r.seq_tokens)


def longest_length(model: ModelSpec, recipe: Recipe, machine: Machine) -> int:
    """Return the largest max_model_len with which vLLM starts; 0 = it never does."""
    limit = model.longest or MAX_TOKENS
    return largest(
        partial(_verdict, model, recipe, machine), limit=limit, accepted=frozenset(("fits",))
    )


def _verdict(model: ModelSpec, recipe: Recipe, machine: Machine, tokens: int) -> str:
    try:
        return plan(model, with_length(recipe, tokens), machine).verdict
    except VramwiseError:
        return "refused"


def with_length(recipe: Recipe, tokens: int) -> Recipe:
    """Return the recipe with another max_model_len."""
    lengths = {"context": tokens, "prompt_length": None, "completion_length": None}
    return recipe.model_copy(update=lengths)


def _pool_at(model: ModelSpec, r: Resolved, kv_bytes: int, tokens: int) -> VllmKv | None:
    """Return the pool with requests of `tokens` in it."""
    return kv_pool(model, replace(r, prompt_tokens=0, completion_tokens=tokens), kv_bytes)


def _at_once(model: ModelSpec, r: Resolved, kv_bytes: int, tokens: int) -> tuple[int, str]:
    """Return how many requests of `tokens` run at once on all engines, and what ends it."""
    pool = _pool_at(model, r, kv_bytes, tokens)
    room = pool.num_blocks // pool.blocks_per_sequence if pool else r.max_num_seqs
    by = "cache" if room < r.max_num_seqs else "max_num_seqs"
    return r.data_parallel * min(room, r.max_num_seqs), by


def _rows(model: ModelSpec, r: Resolved, figures: Serving, given: int) -> tuple[Requests, ...]:
    apart = [
        n for n in TYPICAL if n <= figures.max_model_len and not 9 * given < 10 * n < 11 * given
    ]
    lengths = {*apart, given}
    rows = []
    for tokens in sorted(lengths):
        at_once, by = _at_once(model, r, figures.kv.typical, tokens)
        low, _ = _at_once(model, r, figures.kv.low, tokens)
        rows.append(Requests(tokens=tokens, at_once=at_once, low=low, by=by, given=tokens == given))
    return tuple(rows)


def _bytes_per_token(pool: VllmKv | None) -> int:
    """Return what one more token of a long request takes, on one GPU."""
    if pool is None:
        return 0
    if pool.groups == 1:
        return pool.bytes_per_block // pool.block_tokens
    return pool.bytes_per_sequence // pool.max_model_len


def _slots(model: ModelSpec, recipe: Recipe, machine: Machine, base: Plan) -> Slots | None:
    """Return what adapter slots take; None where even one does not start."""
    r = base.resolved
    rank = r.max_lora_rank or DEFAULT_LORA_RANK
    each = adapter_slot_bytes(model, replace(r, max_loras=1, max_lora_rank=rank))
    verdict = partial(_slot_verdict, model, recipe, machine, rank)
    most = largest(verdict, limit=MOST_SLOTS, accepted=frozenset(("fits",))) if base.fits else 0
    per_token = _bytes_per_token(base.serving.pool if base.serving else None)
    return Slots(
        now=r.max_loras,
        rank=rank,
        slot_bytes=each,
        slot_tokens=each // per_token if per_token else 0,
        most=most,
    )


def _slot_verdict(model: ModelSpec, recipe: Recipe, machine: Machine, rank: int, slots: int) -> str:
    engine = recipe.engine.model_copy(update={"max_loras": slots, "max_lora_rank": rank})
    try:
        return plan(model, recipe.model_copy(update={"engine": engine}), machine).verdict
    except VramwiseError:
        return "refused"


def _prefix(
    model: ModelSpec, r: Resolved, figures: Serving, given: int, shared: int
) -> Prefix | None:
    """Return what a shared prefix saves; None where layers of several kinds cache it apart."""
    pool = _pool_at(model, r, figures.kv.typical, given)
    if pool is None or pool.groups > 1:
        return None
    blocks = min(shared or min(PREFIX, given // 2), given) // pool.block_tokens
    own = pool.blocks_per_sequence - blocks
    room = (pool.num_blocks - blocks) // own if own else r.max_num_seqs
    alone, _ = _at_once(model, r, figures.kv.typical, given)
    together = r.data_parallel * min(max(room, 0), r.max_num_seqs)
    return Prefix(
        enabled=r.prefix_caching,
        tokens=blocks * pool.block_tokens,
        request_tokens=given,
        alone=alone,
        at_once=max(alone, together) if r.prefix_caching else alone,
    )
