"""Group advantages: what they are, worked by hand, and what they must never be."""

import pytest
import torch

from trainer.advantages import Scale, group_advantages


def test_worked_by_hand():
    """Group (1, 0, 0, 1): mean 0.5, unbiased std sqrt(1/3)."""
    found = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), num_generations=4)
    step = 0.5 / ((1 / 3) ** 0.5 + 1e-4)
    torch.testing.assert_close(found.values, torch.tensor([step, -step, -step, step]))
    assert found.zero_std_frac == 0.0
    assert found.reward_mean == 0.5


def test_equal_rewards_teach_nothing_and_are_counted():
    found = group_advantages(torch.tensor([1.0, 1.0, 0.0, 1.0]), num_generations=2)
    assert torch.equal(found.values[:2], torch.zeros(2))
    assert found.values[2] < 0 < found.values[3]
    assert found.zero_std_frac == 0.5


@pytest.mark.parametrize("scale", list(Scale))
def test_every_group_sums_to_zero(scale):
    rewards = torch.randn(24, generator=torch.Generator().manual_seed(0)) * 3 + 2
    found = group_advantages(rewards, num_generations=6, scale=scale)
    torch.testing.assert_close(found.values.reshape(4, 6).sum(1), torch.zeros(4), rtol=0, atol=1e-5)


def test_scales_differ_in_the_divisor_alone():
    rewards = torch.tensor([0.0, 1.0, 0.0, 10.0])
    none = group_advantages(rewards, num_generations=2, scale=Scale.NONE).values
    torch.testing.assert_close(none, torch.tensor([-0.5, 0.5, -5.0, 5.0]))
    batch = group_advantages(rewards, num_generations=2, scale=Scale.BATCH).values
    torch.testing.assert_close(batch, none / (rewards.std() + 1e-4))
    group = group_advantages(rewards, num_generations=2, scale=Scale.GROUP).values
    torch.testing.assert_close(group.abs(), torch.full((4,), 0.5**0.5), rtol=1e-3, atol=0)


def test_zero_std_is_about_groups_whatever_the_scale():
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0])
    for scale in Scale:
        assert group_advantages(rewards, num_generations=2, scale=scale).zero_std_frac == 1.0


def test_one_generation_has_no_advantage():
    found = group_advantages(torch.tensor([3.0, 5.0]), num_generations=1)
    assert torch.equal(found.values, torch.zeros(2))
    assert found.zero_std_frac == 1.0


def test_a_failed_reward_is_left_out():
    nan = float("nan")
    found = group_advantages(torch.tensor([1.0, nan, 0.0, nan, nan, nan]), num_generations=3)
    alone = group_advantages(torch.tensor([1.0, 0.0]), num_generations=2)
    torch.testing.assert_close(found.values[[0, 2]], alone.values)
    assert torch.equal(found.values[[1, 3, 4, 5]], torch.zeros(4))
    assert found.reward_mean == 0.5


@pytest.mark.parametrize("rewards", [torch.zeros(5), torch.zeros(0), torch.zeros(2, 2)])
def test_sizes_that_do_not_match_are_refused(rewards):
    with pytest.raises(ValueError, match="num_generations=2"):
        group_advantages(rewards, num_generations=2)
