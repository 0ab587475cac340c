"""pass@k, maj@k and intervals against hand-computed values and against counting every subset."""

import itertools
import random
import statistics

import pytest

from rollverify.metrics.statistics import (
    majority_at_k,
    mean_interval,
    pass_at_k,
    sample_counts,
    share_interval,
    wilson,
)


@pytest.mark.parametrize(
    ("num_samples", "num_right", "k", "want"),
    [
        (8, 3, 1, 3 / 8),
        (8, 3, 4, 1 - 5 / 70),  # C(5,4) / C(8,4) = 5 / 70
        (10, 3, 5, 1 - 21 / 252),  # C(7,5) / C(10,5)
        (4, 2, 3, 1.0),  # Only 2 are wrong, so 3 hold a right one.
        (5, 0, 5, 0.0),
        (5, 5, 1, 1.0),
    ],
)
def test_pass_at_k_by_hand(num_samples, num_right, k, want):
    assert pass_at_k(num_samples, num_right, k) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num_samples):
    for num_right, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        grades = [True] * num_right + [False] * (num_samples - num_right)
        subsets = list(itertools.combinations(grades, k))
        counted = sum(map(any, subsets)) / len(subsets)
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(counted, abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Its mean over many draws of n = 6 samples is the chance of k = 4 fresh ones, 1 - 0.7^4."""
    stream = random.Random(0)
    draws = [sum(stream.random() < 0.3 for _ in range(6)) for _ in range(20_000)]
    mean = statistics.fmean(pass_at_k(6, right, 4) for right in draws)
    # A draw's standard deviation is below 0.32, so 0.01 is more than 4 standard errors of 0.0023.
    assert mean == pytest.approx(1 - 0.7**4, abs=0.01)


def test_pass_at_k_of_many_samples_does_not_overflow():
    # 1 - C(9999, 5000) / C(10000, 5000) = 1 - 5000 / 10000
    assert pass_at_k(10_000, 1, 5000) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("num_samples", "want"),
    [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (10, [2, 4, 8, 10])],
)
def test_ks_are_the_powers_of_two_and_n(num_samples, want):
    assert sample_counts(num_samples) == want


@pytest.mark.parametrize(
    ("answers", "want"),
    [
        (["a", "a", "b"], 1.0),
        (["b", "b", "a"], 0.0),
        (["a", "b", "c"], 1 / 3),  # Three answers with a vote each, one of them right.
        (["a", "a", "b", "b"], 1 / 2),
        ([None, None, "a"], 1.0),  # Who has no answer does not vote.
        ([None, None, None], 0.0),
    ],
)
def test_majority_by_hand(answers, want):
    """The right answer is "a"."""
    grades = [answer == "a" for answer in answers]
    assert majority_at_k(answers, grades, len(answers)) == pytest.approx(want)


def test_majority_is_the_mean_over_blocks_without_the_rest():
    # Blocks (a a b) -> 1, (b b a) -> 0; the seventh response is left out.
    answers = ["a", "a", "b", "b", "b", "a", "a"]
    assert majority_at_k(answers, [one == "a" for one in answers], 3) == pytest.approx(0.5)


def test_majority_of_an_answer_with_two_grades_counts_their_mean():
    assert majority_at_k(["a", "a"], [True, False], 2) == pytest.approx(0.5)


def test_interval_of_single_trials_is_wilsons():
    # A variance of 7 * 3 / 100 * 10 / 9 / 10 gives 9 trials, fewer than there are problems: 10.
    values = [1.0] * 7 + [0.0] * 3
    assert share_interval(values, 1) == pytest.approx(wilson(0.7, 10))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_interval_where_all_agree_is_not_empty_and_counts_problems_only(value):
    assert share_interval([value] * 5, 8) == pytest.approx(wilson(value, 5))


def test_samples_of_one_problem_are_not_so_many_problems():
    """Problems that are always right or always wrong: 8 samples say no more than one does."""
    assert share_interval([1.0, 0.0] * 20, 8) == pytest.approx(wilson(0.5, 40))


def test_samples_count_in_full_where_problems_are_alike():
    # Problems of 50 % each, all with 4 of 8: no spread, 40 * 8 = 320 trials.
    assert share_interval([0.5] * 40, 8) == pytest.approx(wilson(0.5, 320))


def test_effective_trials_by_hand():
    # Mean 0.5, variance (4 * 0.25^2) / 3 = 1 / 12, of the mean 1 / 48: 0.25 * 48 = 12 trials.
    assert share_interval([0.25, 0.75, 0.25, 0.75], 4) == pytest.approx(wilson(0.5, 12))


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """300 test sets of 40 problems of different difficulty, 4 samples each; the mean is 0.5."""
    stream, hits = random.Random(1), 0
    for _ in range(300):
        chances = [stream.random() for _ in range(40)]
        shares = [sum(stream.random() < chance for _ in range(4)) / 4 for chance in chances]
        low, high = share_interval(shares, 4)
        hits += low <= 0.5 <= high
    # 95 % of 300 is 285, standard deviation 3.8: four of them on each side.
    assert 270 <= hits <= 299


def test_mean_interval_by_hand():
    # 2 +- 4.3027 * 1 / sqrt(3)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((-0.4842, 4.4842), abs=1e-4)


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0]])
def test_mean_interval_needs_two_different_values(values):
    assert mean_interval(values) is None
