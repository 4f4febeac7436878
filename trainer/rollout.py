"""From prompts to scored sequences: sampling, masks, micro-batches, correction for the sampler.

Shapes: N scored tokens of a micro-batch, S its sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.batching import Layout, MicroBatch, ScoredSequence, collate, micro_batches
from trainer.config import LossSection, SamplingSection
from trainer.data import Prompt
from trainer.engines.protocol import Completion, Engine, SamplingSettings
from trainer.model import Policy
from trainer.parallel.dealing import blank_batch, evened
from trainer.parallel.ranks import ALONE, Ranks
from trainer.sampling import StopStrings, stop_tokens
from trainer.shared_plan import Sharing
from trainer.shared_prefix import collate_shared, shared_tokens, worth_sharing

MAX_LOG_WEIGHT = 20.0
"""exp(20) is far over any cap; beyond it a sequence's product would overflow fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Completions of one step, grouped by prompt, and what the loss needs of them."""

    prompts: list[Prompt]
    """One a completion: a prompt is repeated for its group."""
    completions: list[Completion]
    texts: list[str]
    """Without special tokens."""
    num_generations: int
    places: tuple[int, ...] = ()
    """Where each completion is among those of all ranks."""
    step_completions: int = 0
    """Of all ranks."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of every completion."""
        return [len(completion.token_ids) for completion in self.completions]

    def sequence(self, index: int) -> ScoredSequence:
        """Return completion `index` behind its prompt; only the completion is scored."""
        prompt, completion = self.prompts[index].token_ids, self.completions[index].token_ids
        return ScoredSequence(
            token_ids=prompt + completion,
            scored=(False,) * len(prompt) + (True,) * len(completion),
        )

    def usable(self, *, mask_truncated: bool) -> list[bool]:
        """Return which completions may teach: not the empty ones, nor the cut ones if asked."""
        return [
            bool(completion.token_ids) and (completion.finished or not mask_truncated)
            for completion in self.completions
        ]


def sampling_settings(
    section: SamplingSection, tokenizer: Any, *, num_generations: int, max_new_tokens: int
) -> SamplingSettings:
    """Return the engine's settings; a token that holds a stop string ends at once."""
    return SamplingSettings(
        num_generations=num_generations,
        max_new_tokens=max_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        stop_token_ids=stop_tokens(tokenizer, section.stop),
        stop=section.stop,
        min_p=section.min_p,
        repetition_penalty=section.repetition_penalty,
        presence_penalty=section.presence_penalty,
        frequency_penalty=section.frequency_penalty,
        guided_regex=section.guided_regex,
        guided_json=section.guided_json,
    )


def sample(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    *,
    tokenizer: Any,
    ranks: Ranks = ALONE,
) -> Rollout:
    """Return the completions of `prompts` under the engine's current weights.

    On several ranks: of this one's share of them.
    """
    each, total = settings.num_generations, len(prompts) * settings.num_generations
    owned = ranks.share(range(len(prompts)))
    prompts = [prompts[index] for index in owned]
    settings = replace(settings, numbers=tuple(owned))
    completions = engine.generate([prompt.token_ids for prompt in prompts], settings)
    stops = StopStrings(tokenizer, settings.stop)
    completions = [_stopped(completion, stops) for completion in completions]
    texts = tokenizer.batch_decode(
        [list(completion.token_ids) for completion in completions], skip_special_tokens=True
    )
    return Rollout(
        prompts=[prompts[completion.prompt_index] for completion in completions],
        completions=completions,
        texts=texts,
        num_generations=each,
        places=tuple(index * each + number for index in owned for number in range(each)),
        step_completions=total,
    )


def _stopped(completion: Completion, stops: StopStrings) -> Completion:
    """Return the completion up to a stop string, for an engine that went on behind it."""
    end = stops.cut(completion.token_ids)
    if end is None:
        return completion
    logprobs = completion.logprobs
    return replace(
        completion,
        token_ids=completion.token_ids[:end],
        logprobs=None if logprobs is None else logprobs[:end],
        finished=True,
    )


def split(
    rollout: Rollout,
    chosen: Sequence[int],
    *,
    policy: Policy,
    budget_tokens: int,
    layout: Layout,
    sharing: Sharing | None = None,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of the completions `chosen`, each at most `budget_tokens` tokens.

    One is made, on the policy's device, when it is asked for: masks of shared prompts are large.
    `sharing`: a group shares one row where it fits and is cheaper; None never.
    MicroBatch.indices count in the rollout.
    """
    pad = policy.tokenizer.pad_token_id or 0
    sequences = {index: rollout.sequence(index) for index in chosen}
    rows_tokens = min(budget_tokens, sharing.budget_tokens) if sharing else 0
    shared, single = _shared_groups(rollout, sequences, sharing, rows_tokens)
    sizes = [shared_tokens([sequences[index] for index in group]) for group in shared]
    own = [sequences[index] for index in single]
    lengths = [len(sequence.token_ids) for sequence in own]
    shared_picks = micro_batches(sizes, budget_tokens=rows_tokens, layout=Layout.SORTED)
    own_picks = micro_batches(lengths, budget_tokens=budget_tokens, layout=layout)

    def made() -> Iterator[MicroBatch]:
        for picks in shared_picks:
            yield collate_shared(
                [[sequences[index] for index in shared[pick]] for pick in picks],
                [index for pick in picks for index in shared[pick]],
                pad_id=pad,
                dtype=policy.dtype,
                device=policy.device,
            )
        for picks in own_picks:
            batch = collate(own, picks, layout=layout, pad_id=pad)
            yield replace(batch, indices=tuple(single[pick] for pick in picks)).to(policy.device)

    yield from evened(
        made(),
        len(shared_picks) + len(own_picks),
        policy.ranks,
        blank=lambda: blank_batch(pad, policy.device),
    )


def importance_weights(
    logp: Tensor, sampler_logp: Tensor, sequence_ids: Tensor, *, section: LossSection
) -> Tensor | None:
    """Return the weight [N] of every token for pi_scorer / pi_sampler, without gradient.

    Engines that compute in other kernels or dtypes sample from a slightly different policy. Token
    level weighs each token by its own ratio, sequence level by the product over its sequence;
    truncate caps the weight at `is_cap`, mask drops what lies above it (Yao et al. 2025, truncated
    importance sampling; masked: IcePop). None = off.
    """
    if section.is_correction == "none":
        return None
    log_weight = (logp.detach() - sampler_logp).float()
    if section.is_correction == "sequence" and log_weight.numel():
        sums = log_weight.new_zeros(int(sequence_ids.max()) + 1)
        log_weight = sums.index_add(0, sequence_ids, log_weight)[sequence_ids]
    weight = log_weight.clamp(max=MAX_LOG_WEIGHT).exp()
    if section.is_mode == "truncate":
        return weight.clamp(max=section.is_cap)
    return torch.where(weight > section.is_cap, 0.0, weight)


@dataclass
class SamplerGap:
    """How far the engine's log-probabilities are from the scorer's, over one optimizer step's tokens."""

    tokens: int = 0
    difference_sum: float = 0.0
    difference_max: float = 0.0
    ratio_sum: float = 0.0
    ratio_min: float = float("inf")
    ratio_max: float = 0.0
    changed: int = 0
    """Tokens whose weight was capped or masked."""

    def add(self, logp: Tensor, sampler_logp: Tensor, *, cap: float) -> None:
        """Count the tokens [N] of one micro-batch."""
        if not logp.numel():
            return
        log_ratio = (logp.detach() - sampler_logp).float()
        ratio = log_ratio.clamp(max=MAX_LOG_WEIGHT).exp()
        self.tokens += logp.numel()
        self.difference_sum += log_ratio.abs().sum().item()
        self.difference_max = max(self.difference_max, log_ratio.abs().max().item())
        self.ratio_sum += ratio.sum().item()
        self.ratio_min = min(self.ratio_min, ratio.min().item())
        self.ratio_max = max(self.ratio_max, ratio.max().item())
        self.changed += int((ratio > cap).sum())

    def over(self, ranks: Ranks) -> "SamplerGap":
        """Return that of all ranks' tokens."""
        total = SamplerGap()
        for own in ranks.gather_objects(self):
            total.tokens += own.tokens
            total.difference_sum += own.difference_sum
            total.difference_max = max(total.difference_max, own.difference_max)
            total.ratio_sum += own.ratio_sum
            total.ratio_min = min(total.ratio_min, own.ratio_min)
            total.ratio_max = max(total.ratio_max, own.ratio_max)
            total.changed += own.changed
        return total

    def summary(self) -> dict[str, float]:
        """Return what to log; empty when the sampler is the scorer."""
        if not self.tokens:
            return {}
        return {
            "sampling/logp_difference_mean": self.difference_sum / self.tokens,
            "sampling/logp_difference_max": self.difference_max,
            "sampling/ratio_mean": self.ratio_sum / self.tokens,
            "sampling/ratio_min": self.ratio_min,
            "sampling/ratio_max": self.ratio_max,
            "sampling/over_cap_frac": self.changed / self.tokens,
        }


def sampler_log_probs(rollout: Rollout, batch: MicroBatch) -> Tensor | None:
    """Return the sampler's own log-probabilities [N] in the batch's order; None if one is unknown."""
    values: list[float] = []
    for index in batch.indices:
        known = rollout.completions[index].logprobs
        if known is None:
            return None
        values += known
    return torch.tensor(values, device=batch.rows.device)


def _shared_groups(
    rollout: Rollout,
    sequences: dict[int, ScoredSequence],
    sharing: Sharing | None,
    budget_tokens: int,
) -> tuple[list[list[int]], list[int]]:
    """Return (groups that share their prompt, the other sequences), as indices of the rollout."""
    if sharing is None:
        return [], list(sequences)
    by_prompt: dict[int, list[int]] = {}
    for index in sequences:
        by_prompt.setdefault(index // rollout.num_generations, []).append(index)
    shared, single = [], []
    for group in by_prompt.values():
        members = [sequences[index] for index in group]
        fits = len(group) > 1 and shared_tokens(members) <= min(budget_tokens, sharing.row_tokens)
        if fits and (sharing.always or worth_sharing(members, sharing.cost)):
            shared.append(group)
        else:
            single += group
    return shared, single
