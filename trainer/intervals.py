"""What held-out samples say about a model, and how surely: pass@k, means, perplexity, 95% intervals."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054
"""Two-sided 95% of a normal distribution."""
RESAMPLES = 1000
"""Bootstrap samples of the problems: an interval's ends are then sure to about a tenth of its width."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the chance that one of k of the `samples` drawn without return is correct.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1).
    Raises ValueError for k above n.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct in {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def wilson(successes: float, count: int) -> Estimate:
    """Return a share and Wilson's score interval (1927): never empty, inside [0, 1]."""
    share, z2 = successes / count, Z95 * Z95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def pass_rate(correct: Sequence[int], *, samples: int, k: int) -> Estimate:
    """Return pass@k over problems of which `correct` of `samples` completions passed each.

    One sample a problem is a coin each: Wilson. More: the problems are resampled, for completions of one
    problem go together; where all problems agree a bootstrap has no width, and Wilson's over problems holds.
    """
    values = [pass_at_k(samples, right, k) for right in correct]
    if samples == 1 or len(set(values)) == 1:
        share = sum(values)
        return wilson(share, len(values))
    return bootstrap_mean(values)


def bootstrap_mean(values: Sequence[float]) -> Estimate:
    """Return the mean of `values` and its percentile-bootstrap interval."""
    return bootstrap(len(values), lambda rows: sum(values[row] for row in rows) / len(rows))


def bootstrap(count: int, figure: Callable[[Sequence[int]], float]) -> Estimate:
    """Return `figure` of all rows and its interval over rows drawn with return; seeded, so repeatable."""
    draw = random.Random(f"bootstrap/{count}")
    rows = range(count)
    again = sorted(figure(draw.choices(rows, k=count)) for _ in range(RESAMPLES))
    cut = int(0.025 * RESAMPLES)
    return Estimate(figure(rows), again[cut], again[-cut - 1])
