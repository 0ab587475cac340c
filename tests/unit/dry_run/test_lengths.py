"""Assumed lengths against closed forms, and their means against sums over a few responses."""

from itertools import product
from math import erf, exp, log, sqrt

import pytest
import torch

from rollverify.dry_run.lengths import Lengths, sample_lengths

SPREAD = sqrt(0.6**2 + 0.5**2)
FEW = Lengths(torch.tensor([[1.0, 4.0, 6.0], [2.0, 2.0, 10.0]], dtype=torch.float64))


def moment_of_cut_log_normal(power: int, median: float, limit: float) -> float:
    def below(x: float) -> float:
        return (1 + erf(x / sqrt(2))) / 2

    cut = log(limit / median) / SPREAD
    inside = median**power * exp((power * SPREAD) ** 2 / 2) * below(cut - power * SPREAD)
    return inside + limit**power * (1 - below(cut))


@pytest.mark.parametrize(("median", "limit"), [(2500, 30720), (3840, 30720), (768, 6144)])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_sample_has_the_moments_of_its_law(median: float, limit: int, power: int) -> None:
    got = sample_lengths(median, limit, 8).moment(power)
    assert got == pytest.approx(moment_of_cut_log_normal(power, median, limit), rel=0.04)


def test_the_same_lengths_every_time_and_none_beyond_the_limit() -> None:
    one, two = (sample_lengths(1000, 4096, 8).groups for _ in range(2))
    assert torch.equal(one, two)
    assert one.max() == 4096 and one.min() >= 1


def test_shares_and_moments_of_a_few() -> None:
    assert FEW.limit_frac == pytest.approx(1 / 6)
    assert FEW.moment(2) == pytest.approx((1 + 16 + 36 + 4 + 4 + 100) / 6)


def test_what_is_finished_waits_for_the_longest_of_its_group() -> None:
    # They wait 5, 2, 0 and 8, 8, 0 tokens.
    assert FEW.waiting(0) == pytest.approx(23 / 6)
    assert FEW.waiting(1) == pytest.approx((5 * 1 + 2 * 4 + 8 * 2 + 8 * 2) / 6)
    assert FEW.waiting(1, at_most=3) == pytest.approx((3 * 1 + 2 * 4 + 3 * 2 + 3 * 2) / 6)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_longest_of_some_by_all_draws(number: int) -> None:
    lengths = FEW.groups.flatten().tolist()
    draws = [max(draw) for draw in product(lengths, repeat=number)]
    assert FEW.longest_of(number) == pytest.approx(sum(draws) / len(draws))
