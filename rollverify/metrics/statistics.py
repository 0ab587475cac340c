"""Means, spreads and confidence intervals over seeds and test problems. Reads no files."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Z_95 = 1.959964
"""97.5th percentile of the normal distribution."""

T_95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
"""97.5th percentiles of Student's t with 1 to 30 degrees of freedom."""


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


class Spread(NamedTuple):
    """Values of one figure over the seeds."""

    num: int
    mean: float
    std: float | None
    """Unbiased; None for a single value."""
    low: float
    high: float
    interval: Interval | None
    """t-interval of the mean; None for a single value."""


def t_quantile(degrees: float) -> float:
    """97.5th percentile of Student's t; between whole degrees the larger one below counts."""
    whole = int(degrees)
    if whole <= len(T_95):
        return T_95[whole - 1]
    # Expansion of the t-quantile in 1 / degrees (Abramowitz and Stegun 26.7.5).
    first = (Z_95**3 + Z_95) / 4
    second = (5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95) / 96
    return Z_95 + first / whole + second / whole**2


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, range and t-interval of the mean; None without values."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Spread(1, mean, None, mean, mean, None)
    std = statistics.stdev(values)
    half = t_quantile(len(values) - 1) * std / math.sqrt(len(values))
    interval = Interval(mean - half, mean + half)
    return Spread(len(values), mean, std, min(values), max(values), interval)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """Welch's interval of the mean of `ours` minus `theirs`; None for fewer than two values."""
    if len(ours) < 2 or len(theirs) < 2:
        return None
    mean = statistics.fmean(ours) - statistics.fmean(theirs)
    parts = [statistics.variance(one) / len(one) for one in (ours, theirs)]
    total = sum(parts)
    if total == 0:
        return Interval(mean, mean)
    weights = [part**2 / (len(one) - 1) for part, one in zip(parts, (ours, theirs), strict=True)]
    half = t_quantile(max(1.0, total**2 / sum(weights))) * math.sqrt(total)
    return Interval(mean - half, mean + half)


def wilson(share: float, num: int) -> Interval:
    """Wilson's interval of a share of successes in `num` independent trials."""
    if num < 1 or not 0 <= share <= 1:
        raise ValueError(f"a share in [0, 1] of at least one trial is needed: {share} of {num}")
    weight = Z_95**2 / num
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def sample_counts(num_samples: int) -> list[int]:
    """The k of pass@k and maj@k: 2, 4, 8, ... up to n, and n itself; none for a single sample."""
    powers = [1 << exponent for exponent in range(1, num_samples.bit_length())]
    return sorted({*powers, num_samples} - {1})


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k responses is right.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, Eq. 1); in whole numbers, so that
    nothing overflows or rounds.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], is_right: Sequence[bool], k: int) -> float:
    """Chance that the most frequent answer of k responses is right.

    Taken in blocks of k, in order, so the mean is unbiased; a shorter rest is left out. None does
    not vote; of answers with equally many votes each counts the same share.
    """
    votes = list(zip(answers, is_right, strict=True))
    blocks = [votes[start : start + k] for start in range(0, len(votes) - k + 1, k)]
    return statistics.fmean(_majority(block) for block in blocks)


def _majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Share of right ones among the answers with the most votes; 0 where nobody votes."""
    counts = Counter(answer for answer, _ in votes if answer is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    # A grader may read more than the answer's text, so one answer can have two grades.
    return statistics.fmean(
        statistics.fmean(right for answer, right in votes if answer == winner) for winner in winners
    )


def share_interval(values: Sequence[float], trials_per_problem: int) -> Interval:
    """95 % interval of a mean over problems of shares, each in [0, 1].

    Wilson's interval for as many independent trials as have the same standard error (the n samples
    of one problem are not n problems). It stays inside [0, 1] and is not empty at 0 % or 100 %.
    """
    num = len(values)
    share = statistics.fmean(values)
    variance_of_mean = statistics.variance(values) / num if num > 1 else 0.0
    most = num * trials_per_problem
    spread = share * (1 - share)
    trials = most if spread > 0 else num
    if variance_of_mean > 0:
        trials = min(max(round(spread / variance_of_mean), num), most)
    return wilson(share, trials)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """95 % t-interval of a mean over problems; None for fewer than two or all equal values."""
    if len(values) < 2 or min(values) == max(values):
        return None
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)
