"""Policy losses on packed [N] floats, plain torch: GRPO and its relatives.

Completions of a micro-batch lie end to end: token n belongs to sequence sequence_ids[n] in [0, S).
A loss is sum over tokens of weight * token loss / normaliser, and the normaliser is that of the
whole optimizer step (`loss_normaliser`), so any split into micro-batches adds up to the same
gradient. The only requirement: a sequence isn't cut between micro-batches.

| type    | ratio of   | objective per token                   | weight      | normaliser           |
|---------|------------|---------------------------------------|-------------|----------------------|
| grpo    | token      | min(r A, clip(r) A)                   | 1 / length  | sequences            |
| bnpo    | token      | the same                              | 1           | tokens               |
| dapo    | token      | the same                              | 1           | tokens               |
| dr_grpo | token      | the same                              | 1           | sequences * max len  |
| cispo   | token      | min(r, epsilon_high) detached A logp  | 1           | tokens               |
| gspo    | sequence   | min(s A, clip(s) A)                   | 1 / length  | sequences            |

bnpo and dapo are one loss once the normaliser covers the whole step. (Where they differ elsewhere,
bnpo divides by the tokens of each micro-batch, which makes the gradient depend on the split.)
Sources: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, CISPO 2506.13585, GSPO
2507.18071; k3: Schulman, "Approximating KL divergence", 2020.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from planner.errors import UsageError
from trainer.parallel.ranks import Ranks

CISPO_CAP = 5.0
"""Largest importance ratio in CISPO when epsilon_high isn't given."""


class LossType(StrEnum):
    """Member of the family."""

    GRPO = "grpo"
    BNPO = "bnpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    CISPO = "cispo"
    GSPO = "gspo"


class RatioLevel(StrEnum):
    """What an importance ratio belongs to."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """The geometric mean over the sequence's counted tokens."""


class KlEstimator(StrEnum):
    """Estimate of the divergence from the reference, per sampled token; x = ref_logp - logp."""

    K3 = "k3"
    """exp(x) - x - 1: low variance, never negative. Its gradient is that of the forward KL."""
    K3_RATIO = "k3-ratio"
    """k3 times the importance ratio: on policy, exactly the gradient of the reverse KL."""
    FULL_REVERSE = "full-reverse"
    """exp(logp) * k3: an experiment; weighs a token by its probability a second time."""
    FORWARD = "forward"
    """rho ln rho - rho + 1 with rho = exp(x): forward KL, never negative, heavy tailed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Everything that defines a policy loss. Raises UsageError for a value outside its range."""

    loss_type: LossType = LossType.GRPO
    epsilon: float = 0.2
    """Lower clip: ratios below 1 - epsilon."""
    epsilon_high: float | None = None
    """Upper clip: ratios above 1 + epsilon_high (None = epsilon). CISPO: the cap itself."""
    delta: float | None = None
    """Two-sided clipping: cap of the unclipped ratio when the advantage is negative."""
    beta: float = 0.0
    """Weight of the KL term."""
    kl: KlEstimator = KlEstimator.K3
    ratio_level: RatioLevel | None = None
    """None = sequence for gspo, token for the others."""
    max_completion_length: int | None = None
    """Needed by dr_grpo alone."""
    detach_old: bool = True
    """False is an experiment: without old_logp the ratio becomes exp(logp - logp), whose gradient
    is zero: nothing is learnt. On policy it is `logp - logp.detach()` that carries the gradient."""

    def __post_init__(self) -> None:
        # plain strings, as run files have them, become members: below, identity is compared
        object.__setattr__(self, "loss_type", LossType(self.loss_type))
        object.__setattr__(self, "kl", KlEstimator(self.kl))
        if self.ratio_level is not None:
            object.__setattr__(self, "ratio_level", RatioLevel(self.ratio_level))
        _require("epsilon", self.epsilon, 0.0 <= self.epsilon < 1.0, "0 up to below 1")
        if self.epsilon_high is not None:
            _require("epsilon_high", self.epsilon_high, self.epsilon_high > 0, "above 0")
        if self.delta is not None:
            above = 1 + self.upper
            _require("delta", self.delta, self.delta > above, f"above 1 + epsilon_high = {above}")
        _require("beta", self.beta, 0.0 <= self.beta < float("inf"), "0 or above")
        if self.loss_type is LossType.DR_GRPO:
            length = self.max_completion_length
            _require("max_completion_length", length, bool(length and length > 0), "1 or above")

    @property
    def upper(self) -> float:
        """epsilon_high with its default."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_CAP if self.loss_type is LossType.CISPO else self.epsilon

    @property
    def level(self) -> RatioLevel:
        """ratio_level with its default."""
        if self.ratio_level is not None:
            return self.ratio_level
        is_gspo = self.loss_type is LossType.GSPO
        return RatioLevel.SEQUENCE if is_gspo else RatioLevel.TOKEN

    @property
    def per_sequence(self) -> bool:
        """Whether a token weighs 1 / length of its sequence."""
        return self.loss_type in (LossType.GRPO, LossType.GSPO)


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise UsageError(f"{name}: {value} is not allowed", hint=f"allowed: {allowed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossStats:
    """Sums over counted tokens of one micro-batch, as tensors: add them up, then `summary()`."""

    tokens: Tensor
    loss: Tensor
    """Share of the step's loss: plain sum over micro-batches."""
    kl: Tensor
    ratio: Tensor
    low_clipped: Tensor
    high_clipped: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)
    """More sums over tokens, for example the entropy."""

    def __add__(self, other: "LossStats") -> "LossStats":
        """Combine two micro-batches."""
        names = ("tokens", "loss", "kl", "ratio", "low_clipped", "high_clipped")
        return LossStats(
            **{name: getattr(self, name) + getattr(other, name) for name in names},
            ratio_min=torch.minimum(self.ratio_min, other.ratio_min),
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            extra={key: self.extra[key] + other.extra[key] for key in self.extra},
        )

    @classmethod
    def none(cls, like: Tensor) -> "LossStats":
        """Return those of no token, on the device of `like`, as `policy_loss` gives them with an entropy."""
        zero, most = like.detach().new_zeros(()), like.detach().new_full((), float("inf"))
        return cls(
            tokens=zero,
            loss=zero,
            kl=zero,
            ratio=zero,
            low_clipped=zero,
            high_clipped=zero,
            ratio_min=most,
            ratio_max=zero,
            extra={"entropy": zero},
        )

    def over(self, ranks: Ranks) -> "LossStats":
        """Return those of all ranks' tokens."""
        if not ranks.several:
            return self
        names = ("tokens", "loss", "kl", "ratio", "low_clipped", "high_clipped")
        sums = [getattr(self, name).double() for name in names]
        sums += [value.double() for value in self.extra.values()]
        totals = ranks.sum(torch.stack(sums)).unbind()
        return LossStats(
            **dict(zip(names, totals, strict=False)),
            ratio_min=ranks.min(self.ratio_min),
            ratio_max=ranks.max(self.ratio_max),
            extra=dict(zip(self.extra, totals[len(names) :], strict=True)),
        )

    def summary(self) -> dict[str, float]:
        """Return means for the log (one synchronisation)."""
        tokens = self.tokens.clamp(min=1)
        values = {
            "loss": self.loss,
            "tokens": self.tokens,
            "kl": self.kl / tokens,
            "ratio/mean": self.ratio / tokens,
            "ratio/min": self.ratio_min,
            "ratio/max": self.ratio_max,
            "clip_ratio/low": self.low_clipped / tokens,
            "clip_ratio/high": self.high_clipped / tokens,
            "clip_ratio/region": (self.low_clipped + self.high_clipped) / tokens,
            **{name: total / tokens for name, total in self.extra.items()},
        }
        numbers = torch.stack([value.float() for value in values.values()]).tolist()
        return dict(zip(values, numbers, strict=True))


def loss_normaliser(settings: LossSettings, *, num_sequences: int, num_tokens: int) -> float:
    """Return what the loss of a whole optimizer step is divided by.

    num_sequences and num_tokens (counted, unmasked) of ALL micro-batches of the step.
    """
    if settings.per_sequence:
        return float(max(1, num_sequences))
    if settings.loss_type is LossType.DR_GRPO:
        assert settings.max_completion_length is not None
        return float(max(1, num_sequences) * settings.max_completion_length)
    return float(max(1, num_tokens))


def policy_loss(
    logp: Tensor,
    *,
    advantages: Tensor,
    sequence_ids: Tensor,
    normaliser: float,
    settings: LossSettings,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    mask: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Return this micro-batch's share of the loss, and statistics.

    logp [N] fp32 with gradient; advantages [S]; sequence_ids [N] in [0, S), ascending or not;
    old_logp [N] of the sampling policy (None = on policy); ref_logp [N] (needed if beta > 0);
    mask [N], 0 = not counted; token_weights [N]: correction for the sampler's mismatch, multiplied
    into the policy term; entropy [N]: only logged. Shares of all micro-batches sum to the loss.
    """
    if settings.beta and ref_logp is None:
        raise ValueError("ref_logp: needed when beta > 0")
    advantages = advantages.to(logp.dtype)
    counted = torch.ones_like(logp) if mask is None else mask.to(logp.dtype)
    lengths = _sum_by_sequence(counted, sequence_ids, advantages.shape[0]).clamp(min=1)
    if old_logp is None:
        old_logp = logp.detach() if settings.detach_old else logp

    log_ratio = logp - old_logp
    if settings.level is RatioLevel.SEQUENCE:
        mean = _sum_by_sequence(log_ratio * counted, sequence_ids, advantages.shape[0]) / lengths
        log_ratio = mean[sequence_ids]
    ratio = log_ratio.exp()
    advantage = advantages[sequence_ids]
    token_loss = _token_loss(logp, ratio, advantage, settings)
    if token_weights is not None:
        token_loss = token_loss * token_weights
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        kl = _kl(logp, ref_logp, ratio, settings.kl)
        if settings.beta:
            token_loss = token_loss + settings.beta * kl

    weight = counted / lengths[sequence_ids] if settings.per_sequence else counted
    # where, not only times: a masked token's inf or NaN must not reach the sum
    token_loss = torch.where(counted > 0, token_loss, 0.0)
    loss = (token_loss * weight).sum() / normaliser
    return loss, _stats(loss, kl, ratio, advantage, counted, entropy, settings)


def _sum_by_sequence(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return sums [S] of values [N]."""
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def _token_loss(logp: Tensor, ratio: Tensor, advantage: Tensor, settings: LossSettings) -> Tensor:
    """Return minus the objective of every token [N]."""
    if settings.loss_type is LossType.CISPO:
        # Every token keeps its gradient; only its weight is capped.
        return -ratio.clamp(max=settings.upper).detach() * advantage * logp
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.upper)
    if settings.delta is not None:
        ratio = ratio.clamp(max=settings.delta)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def _kl(logp: Tensor, ref_logp: Tensor, ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Return the divergence estimate of every token [N]."""
    x = ref_logp - logp
    if estimator is KlEstimator.FORWARD:
        # rho ln rho - (rho - 1), with expm1 so that it isn't the difference of two ones
        return x.exp() * x - torch.expm1(x)
    # exp(x) - 1 - x loses all digits for small x in fp32; expm1 keeps them
    k3 = torch.expm1(x) - x
    if estimator is KlEstimator.K3_RATIO:
        return k3 * ratio
    return k3 * logp.exp() if estimator is KlEstimator.FULL_REVERSE else k3


@torch.no_grad()
def _stats(
    loss: Tensor,
    kl: Tensor,
    ratio: Tensor,
    advantage: Tensor,
    counted: Tensor,
    entropy: Tensor | None,
    settings: LossSettings,
) -> LossStats:
    """Sum what the log shows. Clipped = the clip decides, so the token has no policy gradient."""
    is_cispo = settings.loss_type is LossType.CISPO
    high = ratio > (settings.upper if is_cispo else 1 + settings.upper)
    low = ratio < 1 - settings.epsilon
    on = counted > 0
    low_clipped = torch.zeros_like(on) if is_cispo else low & (advantage < 0) & on
    high_clipped = high & (advantage > 0) & on
    return LossStats(
        tokens=counted.sum(),
        loss=loss.detach(),
        kl=torch.where(on, kl, 0.0).mul(counted).sum(),
        ratio=torch.where(on, ratio, 0.0).mul(counted).sum(),
        low_clipped=low_clipped.sum().float(),
        high_clipped=high_clipped.sum().float(),
        ratio_min=torch.where(on, ratio, float("inf")).amin() if ratio.numel() else ratio.sum() + 1,
        ratio_max=torch.where(on, ratio, 0.0).amax() if ratio.numel() else ratio.sum() + 1,
        extra={} if entropy is None else {"entropy": (entropy * counted).sum()},
    )


def sft_loss(logp: Tensor, *, num_tokens: int, mask: Tensor | None = None) -> Tensor:
    """Return this micro-batch's share of the cross-entropy: -sum(logp) / num_tokens.

    logp [N] from `logprob_head` over the counted tokens (or all, with mask [N]); num_tokens =
    counted tokens of the whole optimizer step, so any split gives the same gradient.
    """
    total = logp.sum() if mask is None else torch.where(mask > 0, logp, 0.0).mul(mask).sum()
    return -total / max(1, num_tokens)
