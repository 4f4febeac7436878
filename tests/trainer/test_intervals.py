import itertools

import pytest

from trainer.intervals import bootstrap_mean, pass_at_k, pass_rate, wilson


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_one(samples):
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
        assert pass_at_k(samples, correct, k) == pytest.approx(
            sum(map(any, subsets)) / len(subsets)
        )


def test_pass_at_k_above_the_samples_is_an_error():
    with pytest.raises(ValueError, match="pass@3 of 1 correct in 2"):
        pass_at_k(2, 1, 3)


def test_wilson_equals_the_textbook_example():
    """81 of 263: 0.2553 to 0.3662 (Newcombe 1998, table I, method 3)."""
    found = wilson(81, 263)
    assert (found.low, found.high) == (
        pytest.approx(0.2553, abs=5e-5),
        pytest.approx(0.3662, abs=5e-5),
    )
    assert wilson(0, 20).low == 0
    assert wilson(0, 20).high == pytest.approx(0.1611, abs=5e-5)


def test_one_sample_a_problem_is_wilson_and_more_resample_problems():
    assert pass_rate([1, 0, 1, 1], samples=1, k=1) == wilson(3, 4)
    several = pass_rate([4, 0, 2, 1], samples=4, k=1)
    assert several.value == pytest.approx(7 / 16)
    assert several.low < 7 / 16 < several.high
    # problems that all agree leave a bootstrap no width
    assert pass_rate([4, 4, 4], samples=4, k=2) == wilson(3, 3)


def test_the_bootstrap_covers_the_mean_as_often_as_it_says():
    import random

    draw = random.Random(0)
    hits = 0
    for _ in range(100):
        found = bootstrap_mean([draw.gauss(1, 2) for _ in range(60)])
        hits += found.low <= 1 <= found.high
    assert 88 <= hits <= 100
