"""Estimators over test problems and their responses: pass@k, maj@k, confidence intervals.

Reads no files and knows no models; `docs/evaluation.md` says what each number means.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from rollverify.study.statistics import Interval, t_quantile, wilson


def sample_counts(num_samples: int) -> list[int]:
    """The k of pass@k and maj@k: 2, 4, 8, ... up to n, and n itself; none for a single sample.

    Args:
        num_samples: n, samples per problem.
    """
    powers = [1 << exponent for exponent in range(1, num_samples.bit_length())]
    return sorted({*powers, num_samples} - {1})


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k responses is right.

    Args:
        num_samples: n responses of the problem.
        num_right: c of them are right.
        k: 1 <= k <= n.

    Returns:
        1 - C(n - c, k) / C(n, k), the share of the k-subsets of the n that hold a right one.

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.

    Source:
        Chen et al. 2021, arXiv 2107.03374, Eq. 1; in whole numbers, so nothing overflows or rounds.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} of {num_right} right in {num_samples} is not defined")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], is_right: Sequence[bool], k: int) -> float:
    """Chance that the most frequent answer of k responses is right.

    The responses are taken in blocks of k, in order; a rest shorter than k is left out. The blocks
    are independent, so their mean is unbiased. Responses without an answer do not vote.

    Args:
        answers: text of each response's answer, None where it has none.
        is_right: the grade of each response.
        k: responses that vote together, 1 <= k <= len(answers).

    Returns:
        Mean over the blocks; of answers with equally many votes each counts the same share.

    Raises:
        ValueError: k is not in 1..len(answers).
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} needs at least {k} responses, got {len(answers)}")
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

    Wilson's interval for as many independent trials as have the same standard error: the n samples
    of one problem are not n problems. It stays inside [0, 1] and is not empty at 0 % or 100 %.

    Args:
        values: one share per problem, at least one.
        trials_per_problem: n behind each share; the effective number of trials lies between the
            number of problems and n times that.

    Raises:
        ValueError: no value, or one outside [0, 1].
    """
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError("shares in [0, 1] of at least one problem are needed")
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
    """95 % t-interval of a mean over problems; None for fewer than two or all equal values.

    Args:
        values: one per problem, for instance the difference of two models on it.
    """
    if len(values) < 2 or min(values) == max(values):
        return None
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)
