"""Held-out data: what a policy makes of samples it never trained on.

Two kinds: completions that rewards judge (pass@k, every reward's mean), and the loss on given text
(perplexity). Both take the policy as it is; `trainer.validation` calls them while a run goes on,
`trainer.evaluate` for a checkpoint.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from planner.errors import UsageError
from trainer.batching import Layout, MicroBatch, ScoredSequence, collate, micro_batches
from trainer.config import DatasetSection, EvaluationSection
from trainer.data import Prompt, Sample, Samples
from trainer.engines.protocol import Engine, SamplingSettings
from trainer.intervals import Estimate, bootstrap, bootstrap_mean, pass_rate
from trainer.model import Policy
from trainer.parallel.dealing import blank_batch, deal, evened
from trainer.parallel.ranks import ALONE, Ranks
from trainer.parallel.together import together
from trainer.rewards import Rewards, Scores, score
from trainer.rollout import Rollout, sample
from trainer.scoring import hidden_rows, log_probs
from trainer.stepping import TokenBudget, in_budget

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Figures of one evaluation, flat, and the completions they rest on."""

    figures: dict[str, float]
    rollout: Rollout | None = None
    scores: Scores | None = None


def measure_rewards(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    *,
    tokenizer: Any,
    rewards: Rewards,
    section: EvaluationSection,
    state: dict[str, Any] | None = None,
    ranks: Ranks = ALONE,
) -> Measured:
    """Return pass@k and every reward's mean over completions of `prompts` under the engine's weights.

    Each of several ranks samples and judges its share; the figures are of all.
    """
    shared = ranks if len(prompts) >= ranks.size else ALONE  # too few to share: each has all
    rollout = together(
        ranks, lambda: sample(engine, prompts, settings, tokenizer=tokenizer, ranks=shared)
    )
    scores = together(
        ranks,
        lambda: score(
            rewards,
            prompts=rollout.prompts,
            texts=rollout.texts,
            completion_ids=[completion.token_ids for completion in rollout.completions],
            state=state,
        ),
    )
    rollout, scores = _of_all(rollout, scores, shared)
    each = settings.num_generations
    figures: dict[str, float] = {"samples": len(prompts), "generations": each}
    for name, values in scores.by_reward.items():
        said = [_mean(part) for part in _by_prompt(values, each)]
        _put(figures, f"rewards/{name}", [value for value in said if value is not None])
    _put(
        figures, "reward", [v for v in map(_mean, _by_prompt(scores.totals, each)) if v is not None]
    )
    passed = scores.by_reward[section.pass_reward or rewards[0].name]
    correct = [
        sum(value is not None and value >= section.pass_at for value in part)
        for part in _by_prompt(passed, each)
    ]
    for k in section.k or sorted({1, each}):
        _add(figures, f"pass@{k}", pass_rate(correct, samples=each, k=k))
    figures["mean_length"] = sum(rollout.lengths) / len(rollout.lengths)
    cut = sum(not completion.finished for completion in rollout.completions)
    figures["truncated_frac"] = cut / len(rollout.completions)
    figures["reward_failures"] = len(scores.failures)
    # what rewards logged (log_metric); it never stands for a figure of ours
    figures = scores.metrics | figures
    return Measured(figures=figures, rollout=rollout, scores=scores)


def _of_all(rollout: Rollout, scores: Scores, ranks: Ranks) -> tuple[Rollout, Scores]:
    """Return the completions of all ranks and what was said about them, in the order of the prompts."""
    if not ranks.several:
        return rollout, scores
    every = ranks.gather_objects((rollout, scores))
    places = [place for own, _ in every for place in own.places]
    order = sorted(range(len(places)), key=places.__getitem__)

    def ordered(parts: Iterable[Sequence[T]]) -> list[T]:
        values = [value for part in parts for value in part]
        return [values[place] for place in order]

    told = [own.metrics for _, own in every]
    means = {
        name: [own[name] for own in told if name in own]
        for name in dict.fromkeys(name for own in told for name in own)
    }
    return (
        replace(
            rollout,
            prompts=ordered(own.prompts for own, _ in every),
            completions=ordered(own.completions for own, _ in every),
            texts=ordered(own.texts for own, _ in every),
            places=tuple(sorted(places)),
        ),
        replace(
            scores,
            totals=ordered(own.totals for _, own in every),
            by_reward={
                name: ordered(own.by_reward[name] for _, own in every) for name in scores.by_reward
            },
            failures=tuple(failure for _, own in every for failure in own.failures),
            metrics={name: sum(values) / len(values) for name, values in means.items()},
        ),
    )


def measure_loss(
    policy: Policy,
    sequences: Sequence[ScoredSequence],
    *,
    budget_tokens: int,
    layout: Layout,
    chunk_rows: int | None = None,
) -> dict[str, float]:
    """Return the mean loss a trained token and its perplexity, with intervals over sequences.

    Where memory runs out, all of it is done again in micro-batches of half the tokens. Each of several
    ranks does its share of the sequences.
    """
    row = max(len(sequence.token_ids) for sequence in sequences)
    ranks = policy.ranks
    own = deal([len(sequence.token_ids) for sequence in sequences], ranks)
    found = in_budget(
        lambda tokens: _losses(
            policy,
            [sequences[index] for index in own],
            budget_tokens=tokens,
            layout=layout,
            row=row,
            chunk_rows=chunk_rows,
        ),
        TokenBudget(max(budget_tokens, row)),
        longest=row,
    )
    whole = torch.zeros(2, len(sequences), dtype=torch.float64)
    whole[:, own] = torch.tensor(found, dtype=torch.float64)
    sums, counts = ranks.sum(whole).tolist()
    loss = bootstrap(
        len(sequences), lambda rows: sum(sums[r] for r in rows) / sum(counts[r] for r in rows)
    )
    figures: dict[str, float] = {"samples": len(sequences), "tokens": int(sum(counts))}
    _add(figures, "loss", loss)
    _add(figures, "perplexity", Estimate(*(_exp(v) for v in (loss.value, loss.low, loss.high))))
    return figures


@torch.no_grad()
def _losses(
    policy: Policy,
    sequences: Sequence[ScoredSequence],
    *,
    budget_tokens: int,
    layout: Layout,
    row: int,
    chunk_rows: int | None,
) -> tuple[list[float], list[int]]:
    """Return the summed loss and the number of trained tokens of each sequence."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    pad = policy.tokenizer.pad_token_id or 0
    sums, counts = [0.0] * len(sequences), [0] * len(sequences)
    picks = micro_batches(lengths, budget_tokens=budget_tokens, layout=layout, row_tokens=row)
    made = (
        collate(sequences, pick, layout=layout, pad_id=pad, row_tokens=row).to(policy.device)
        for pick in picks
    )
    blank = partial(blank_batch, pad, policy.device)
    for batch in evened(made, len(picks), policy.ranks, blank=blank):
        if batch.blank:
            policy.whole(partial(_scored, policy, batch, chunk_rows))
            continue
        logp = policy.whole(partial(_scored, policy, batch, chunk_rows)).double()
        for owner, value in zip(batch.sequence_ids.tolist(), logp.tolist(), strict=True):
            sums[batch.indices[owner]] -= value
            counts[batch.indices[owner]] += 1
        del batch, logp  # before the next one is made
    return sums, counts


def _scored(policy: Policy, batch: MicroBatch, chunk_rows: int | None) -> Tensor:
    hidden = hidden_rows(policy, batch)
    return log_probs(policy, batch, hidden, chunk_rows=chunk_rows).logp


def refuse_overlap(
    training: Samples, section: DatasetSection, held_out: Samples, other: DatasetSection
) -> None:
    """Raise UsageError naming the first held-out row that the training set has too."""
    ours: dict[str, int] = {}
    for row in range(len(held_out)):
        ours.setdefault(_key(held_out[row], other), row)
    for row in range(len(training)):
        same = ours.get(_key(training[row], section))
        if same is not None:
            raise UsageError(
                f"train.validation: row {same + 1} of {held_out.source} is row {row + 1} of the "
                f"training set {training.source}",
                hint="hold data out: another file, split or seed",
            )


def _key(sample: Sample, section: DatasetSection) -> str:
    """Return what makes a sample the same one: its question, whatever else stands beside it."""
    for column in (section.messages_column, section.prompt_column, section.text_column):
        if sample.get(column) is not None:
            asked = [sample[column]]
            if column == section.prompt_column:
                asked.append(sample.get(section.completion_column))
            text = json.dumps(asked, sort_keys=True, default=str)
            return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return hashlib.blake2b(repr(sorted(sample.items())).encode(), digest_size=16).hexdigest()


def check_evaluation(section: EvaluationSection, rewards: Rewards) -> None:
    """Raise UsageError when the reward that decides is not there."""
    names = [reward.name for reward in rewards]
    if section.pass_reward is not None and section.pass_reward not in names:
        raise UsageError(
            f"train.evaluation.pass_reward: {section.pass_reward!r} is no reward of this run",
            hint=f"one of {', '.join(names)}",
        )
    passing = [f"pass@{k}" for k in section.k or sorted({1, section.generations})]
    check_metric(section, ["reward", *passing, *(f"rewards/{name}" for name in names)])


def check_metric(section: EvaluationSection, measured: Sequence[str]) -> None:
    """Raise UsageError when what decides about the best is not among what is measured."""
    if section.metric is not None and section.metric not in measured:
        raise UsageError(
            f"train.evaluation.metric: {section.metric!r} is not measured",
            hint=f"one of {', '.join(measured)}",
        )


def line_of(figures: Mapping[str, float]) -> str:
    """Return the figures that matter, as one line."""
    names = [n for n in figures if n.startswith("pass@") and "/" not in n]
    names += [n for n in ("reward", "loss", "perplexity") if n in figures]
    parts = [
        f"{name} {figures[name]:.3f} ({figures[f'{name}/low']:.3f} to {figures[f'{name}/high']:.3f})"
        for name in names
    ]
    return "  ".join([*parts, f"{figures['samples']:.0f} samples"])


def _by_prompt(values: Sequence[Any], each: int) -> list[Sequence[Any]]:
    return [values[start : start + each] for start in range(0, len(values), each)]


def _mean(values: Sequence[float | None]) -> float | None:
    said = [value for value in values if value is not None and math.isfinite(value)]
    return sum(said) / len(said) if said else None


def _put(figures: dict[str, float], name: str, values: Sequence[float]) -> None:
    if values:
        _add(figures, name, bootstrap_mean(values))


def _add(figures: dict[str, float], name: str, estimate: Estimate) -> None:
    figures |= {name: estimate.value, f"{name}/low": estimate.low, f"{name}/high": estimate.high}


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
