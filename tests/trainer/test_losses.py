"""Policy losses: identities that hold whatever the implementation, and the experiments' point."""

import pytest
import torch

from planner.errors import UsageError
from trainer.losses import (
    KlEstimator,
    LossSettings,
    LossType,
    RatioLevel,
    loss_normaliser,
    policy_loss,
    sft_loss,
)

LENGTHS = (4, 1, 6, 3)
IDS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
ADVANTAGES = torch.tensor([0.8, -0.3, -1.2, 0.7])


def numbers(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logp = -torch.randn(len(IDS), generator=generator).abs() - 0.1
    old = logp + 0.3 * torch.randn(len(IDS), generator=generator)
    ref = logp + 0.3 * torch.randn(len(IDS), generator=generator)
    return logp, old, ref


def settings(loss_type, **changes):
    return LossSettings(loss_type=loss_type, max_completion_length=8, **changes)


def run(logp, chosen, *, which=slice(None), sequences=range(4), **tensors):
    """Return (loss, gradient, stats) for the tokens `which` of `sequences`."""
    leaf = logp.clone().requires_grad_()
    renumber = {sequence: place for place, sequence in enumerate(sequences)}
    ids = torch.tensor([renumber[int(sequence)] for sequence in IDS[which]])
    loss, stats = policy_loss(
        leaf[which],
        advantages=ADVANTAGES[list(sequences)],
        sequence_ids=ids,
        settings=chosen,
        normaliser=loss_normaliser(chosen, num_sequences=4, num_tokens=len(IDS)),
        **{name: value[which] for name, value in tensors.items()},
    )
    loss.backward()
    return loss.detach(), leaf.grad, stats


@pytest.mark.parametrize("loss_type", list(LossType))
@pytest.mark.parametrize("parts", [((0, 1), (2, 3)), ((2,), (0, 3), (1,)), ((3, 2, 1, 0),)])
def test_any_split_into_micro_batches_gives_the_same_gradient(loss_type, parts):
    logp, old, ref = numbers()
    chosen = settings(loss_type, beta=0.1, epsilon_high=0.3)
    whole = run(logp, chosen, old_logp=old, ref_logp=ref)
    loss, grad, stats = torch.zeros(()), torch.zeros(len(IDS)), None
    for sequences in parts:
        which = torch.isin(IDS, torch.tensor(sequences))
        part = run(logp, chosen, which=which, sequences=sequences, old_logp=old, ref_logp=ref)
        loss, grad = loss + part[0], grad + part[1]
        stats = part[2] if stats is None else stats + part[2]
    torch.testing.assert_close(loss, whole[0])
    torch.testing.assert_close(grad, whole[1])
    assert stats.summary() == pytest.approx(whole[2].summary(), rel=1e-5, abs=1e-7)


def test_on_policy_grpo_gradient_is_the_policy_gradient():
    """d/dlogp of min(r A, ...) at r = 1 is A: -A / (length * sequences) a token."""
    logp, _, _ = numbers()
    _, grad, stats = run(logp, settings("grpo"))
    lengths = torch.tensor(LENGTHS, dtype=torch.float32)
    torch.testing.assert_close(grad, -(ADVANTAGES / lengths / 4)[IDS])
    assert stats.summary()["ratio/max"] == stats.summary()["ratio/min"] == 1.0


def test_without_detach_nothing_is_learnt():
    """exp(logp - logp) is 1 with gradient zero: the experiment that shows why detach stays."""
    logp, _, ref = numbers()
    with_detach, grad, _ = run(logp, settings("dapo"))
    without, no_grad, _ = run(logp, settings("dapo", detach_old=False))
    torch.testing.assert_close(with_detach, without)
    assert grad.abs().min() > 0
    assert torch.equal(no_grad, torch.zeros_like(no_grad))
    # with a KL term the gradient is the KL's alone: a pull to the reference, no reward
    _, kl_only, _ = run(logp, settings("dapo", detach_old=False, beta=0.1), ref_logp=ref)
    torch.testing.assert_close(kl_only, 0.1 * -torch.expm1(ref - logp) / len(IDS))


def test_kl_gradients_are_those_of_the_divergences_they_claim():
    """Over all tokens of a small vocabulary, the expected gradient is the true divergence's."""
    generator = torch.Generator().manual_seed(1)
    policy = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)

    def expected_gradient(estimator):
        logp = policy.log_softmax(-1)
        chosen = LossSettings(loss_type="dapo", beta=1.0, kl=estimator)
        per_token = [
            policy_loss(
                logp[token : token + 1],
                advantages=torch.zeros(1),
                sequence_ids=torch.zeros(1, dtype=torch.long),
                normaliser=1.0,
                settings=chosen,
                ref_logp=ref[token : token + 1],
            )[0]
            for token in range(6)
        ]
        return torch.autograd.grad((torch.stack(per_token) * logp.exp().detach()).sum(), policy)[0]

    logp = policy.log_softmax(-1)
    reverse = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), policy, retain_graph=True)[0]
    forward = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), policy)[0]
    torch.testing.assert_close(expected_gradient(KlEstimator.K3), forward)
    torch.testing.assert_close(expected_gradient(KlEstimator.K3_RATIO), reverse)


@pytest.mark.parametrize("estimator", [KlEstimator.K3, KlEstimator.FORWARD])
def test_kl_estimates_average_to_the_divergence(estimator):
    generator = torch.Generator().manual_seed(2)
    logp = torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(-1)
    ref = torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(-1)
    chosen = LossSettings(loss_type="dapo", kl=estimator)
    kl = [
        policy_loss(
            logp[token : token + 1],
            advantages=torch.zeros(1),
            sequence_ids=torch.zeros(1, dtype=torch.long),
            normaliser=1.0,
            settings=chosen,
            ref_logp=ref[token : token + 1],
        )[1].kl
        for token in range(8)
    ]
    assert min(kl) >= 0
    mean = (logp.exp() * torch.stack(kl)).sum()
    true = {
        KlEstimator.K3: (logp.exp() * (logp - ref)).sum(),
        KlEstimator.FORWARD: (ref.exp() * (ref - logp)).sum(),
    }
    torch.testing.assert_close(mean, true[estimator])


def test_k3_keeps_its_digits_near_the_reference():
    """At x = 1e-4, exp(x) - x - 1 in fp32 is off by over 100 %; the true value is 5e-9."""
    logp, _, _ = numbers()
    chosen = settings("dapo", beta=1.0)
    _, _, stats = run(logp.double(), chosen, ref_logp=logp.double() + 1e-4)
    assert stats.summary()["kl"] == pytest.approx(5e-9, rel=1e-3)
    leaf = torch.zeros(len(IDS))
    _, _, stats = run(leaf, chosen, ref_logp=leaf + 1e-4)
    assert stats.summary()["kl"] == pytest.approx(5e-9, rel=0.05)


def test_full_reverse_weighs_by_the_probability():
    logp, _, ref = numbers()
    plain = run(logp, settings("dapo", beta=1.0), ref_logp=ref)[2]
    full = run(logp, settings("dapo", beta=1.0, kl="full-reverse"), ref_logp=ref)[2]
    x = ref - logp
    torch.testing.assert_close(full.kl, ((torch.expm1(x) - x) * logp.exp()).sum())
    assert full.kl < plain.kl


def test_clipped_tokens_have_no_gradient_and_are_counted():
    logp = torch.zeros(len(IDS))
    old = torch.where(IDS == 0, -0.5, 0.0)  # sequence 0 (A > 0): ratio 1.65
    old = torch.where(IDS == 2, 0.5, old)  # sequence 2 (A < 0): ratio 0.61
    _, grad, stats = run(logp, settings("grpo"), old_logp=old)
    assert grad[(IDS == 0) | (IDS == 2)].abs().max() == 0
    assert grad[(IDS == 1) | (IDS == 3)].abs().min() > 0
    summary = stats.summary()
    assert summary["clip_ratio/high"] == pytest.approx(4 / len(IDS))
    assert summary["clip_ratio/low"] == pytest.approx(6 / len(IDS))


def test_cispo_keeps_the_gradient_of_every_token():
    logp = torch.zeros(len(IDS))
    old = torch.full((len(IDS),), -5.0)
    _, grad, stats = run(logp, settings("cispo", epsilon_high=2.0), old_logp=old)
    torch.testing.assert_close(grad, -2.0 * ADVANTAGES[IDS] / len(IDS))
    assert stats.summary()["clip_ratio/high"] == pytest.approx(7 / len(IDS))


def test_delta_bounds_the_loss_of_a_bad_token():
    logp = torch.zeros(len(IDS))
    old = torch.full((len(IDS),), -10.0)
    loss, grad, _ = run(logp, settings("grpo", delta=4.0), old_logp=old)
    assert loss.abs() < 4.0
    assert grad.abs().max() == 0
    assert run(logp, settings("grpo"), old_logp=old)[0].abs() > 1000


def test_gspo_ratio_is_the_geometric_mean_over_counted_tokens():
    logp, old, _ = numbers()
    mask = torch.ones(len(IDS))
    mask[5:7] = 0
    stats = run(logp, settings("gspo"), old_logp=old, mask=mask)[2]
    ratios = [(logp - old)[(sequence == IDS) & (mask > 0)].mean().exp() for sequence in range(4)]
    assert stats.summary()["ratio/max"] == pytest.approx(max(ratios).item(), rel=1e-5)
    assert stats.summary()["ratio/min"] == pytest.approx(min(ratios).item(), rel=1e-5)


@pytest.mark.parametrize("loss_type", list(LossType))
def test_masked_tokens_count_for_nothing_even_when_not_finite(loss_type):
    logp, old, ref = numbers()
    mask = torch.ones(len(IDS))
    mask[[2, 5]] = 0
    chosen = settings(loss_type, beta=0.1)
    clean = run(logp, chosen, old_logp=old, ref_logp=ref, mask=mask)
    old[2], ref[5] = float("-inf"), 50.0
    if LossSettings(loss_type=loss_type, max_completion_length=8).level is RatioLevel.TOKEN:
        dirty = run(logp, chosen, old_logp=old, ref_logp=ref, mask=mask)
        torch.testing.assert_close(dirty[0], clean[0])
        assert dirty[2].summary() == pytest.approx(clean[2].summary())
    assert clean[1][[2, 5]].abs().max() == 0


@pytest.mark.parametrize("loss_type", list(LossType))
def test_a_fully_masked_sequence_is_a_zero_not_a_nan(loss_type):
    logp, old, _ = numbers()
    mask = (IDS != 1).float()
    loss, grad, _ = run(logp, settings(loss_type), old_logp=old, mask=mask)
    assert loss.isfinite()
    assert grad[IDS == 1].abs().max() == 0


def test_token_weights_scale_the_policy_term_alone():
    logp, _, ref = numbers()
    chosen = settings("dapo", beta=0.1)
    off = run(logp, chosen, ref_logp=ref, token_weights=torch.zeros(len(IDS)))[1]
    torch.testing.assert_close(off, 0.1 * -torch.expm1(ref - logp) / len(IDS))


def test_normalisers():
    def of(loss_type):
        return loss_normaliser(settings(loss_type), num_sequences=6, num_tokens=50)

    assert [of(loss_type) for loss_type in ("grpo", "gspo", "dr_grpo")] == [6, 6, 48]
    assert [of(loss_type) for loss_type in ("bnpo", "dapo", "cispo")] == [50, 50, 50]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"epsilon": 1.0}, "epsilon"),
        ({"epsilon_high": 0.0}, "epsilon_high"),
        ({"delta": 1.1}, "delta"),
        ({"beta": -0.1}, "beta"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
    ],
)
def test_settings_out_of_range_are_named(changes, name):
    with pytest.raises(UsageError, match=name):
        LossSettings(**changes)


def test_beta_needs_a_reference():
    with pytest.raises(ValueError, match="ref_logp"):
        run(numbers()[0], settings("grpo", beta=0.1))


def test_sft_loss_is_the_mean_cross_entropy_of_counted_tokens():
    logits = torch.randn(10, 7, generator=torch.Generator().manual_seed(0))
    target = torch.randint(0, 7, (10,), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 0, 1])
    logp = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    expected = torch.nn.functional.cross_entropy(logits[mask > 0], target[mask > 0])
    torch.testing.assert_close(sft_loss(logp, num_tokens=7, mask=mask), expected)
    parts = sft_loss(logp[:4], num_tokens=7, mask=mask[:4]) + sft_loss(
        logp[4:], num_tokens=7, mask=mask[4:]
    )
    torch.testing.assert_close(parts, expected)
