"""Means, spreads and confidence intervals over seeds and test problems."""

import math
import statistics
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
    """Unbiased standard deviation; None for a single value."""
    low: float
    high: float
    interval: Interval | None
    """t-interval of the mean; None for a single value."""


def t_quantile(degrees: float) -> float:
    """97.5th percentile of Student's t, degrees >= 1; between whole ones the one below counts."""
    whole = int(degrees)
    if whole <= len(T_95):
        return T_95[whole - 1]
    # Expansion of the t-quantile in 1 / degrees (Abramowitz and Stegun 26.7.5).
    first = (Z_95**3 + Z_95) / 4
    second = (5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95) / 96
    return Z_95 + first / whole + second / whole**2


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, range and t-interval of the mean over seeds; None without values."""
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
    """Welch's interval of mean(ours) - mean(theirs); None where one has fewer than two values."""
    if len(ours) < 2 or len(theirs) < 2:
        return None
    mean = statistics.fmean(ours) - statistics.fmean(theirs)
    parts = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    total = sum(parts)
    if total == 0:
        return Interval(mean, mean)
    weights = [p**2 / (len(values) - 1) for p, values in zip(parts, (ours, theirs), strict=True)]
    half = t_quantile(max(1.0, total**2 / sum(weights))) * math.sqrt(total)
    return Interval(mean - half, mean + half)


def wilson(share: float, num: int) -> Interval:
    """Wilson's interval of a share in [0, 1] of `num` independent trials, at least one."""
    weight = Z_95**2 / num
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))
