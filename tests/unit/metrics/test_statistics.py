"""Intervals against values of published tables and worked examples."""

import math

import pytest

from rollverify.metrics.statistics import Z_95, difference, spread, t_quantile, wilson


def test_t_quantiles_are_those_of_the_tables():
    published = {1: 12.706, 2: 4.303, 10: 2.228, 30: 2.042, 31: 2.040, 60: 2.000, 120: 1.980}
    assert {n: round(t_quantile(n), 3) for n in published} == pytest.approx(published, abs=1e-3)


def test_t_quantiles_fall_towards_the_normal_one():
    quantiles = [t_quantile(n) for n in range(1, 200)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert t_quantile(10**9) == pytest.approx(Z_95)


def test_between_degrees_the_wider_interval_is_taken():
    assert t_quantile(2.9) == t_quantile(2)


def test_spread_by_hand():
    found = spread([1.0, 2.0, 3.0])
    assert found is not None and found.interval is not None
    assert (found.num, found.mean, found.std, found.low, found.high) == (3, 2.0, 1.0, 1.0, 3.0)
    # 2 +- 4.3027 * 1 / sqrt(3) = 2 +- 2.4842
    assert found.interval == pytest.approx((2 - 2.4842, 2 + 2.4842), abs=1e-4)


def test_a_single_seed_has_no_interval():
    found = spread([0.5])
    assert found is not None
    assert (found.num, found.mean, found.std, found.interval) == (1, 0.5, None, None)
    assert spread([]) is None


def test_welch_by_hand():
    # variances 1 and 4 of 3 values each: 1/3 + 4/3 = 5/3; degrees (5/3)^2 / ((1/9 + 16/9) / 2)
    # = 2.94, so t of 2: 4.3027 * sqrt(5/3) = 5.5548; means 2 and 6
    found = difference([1, 2, 3], [4, 6, 8])
    assert found == pytest.approx((-4 - 5.5548, -4 + 5.5548), abs=1e-4)


def test_equal_values_differ_exactly_and_one_seed_not_at_all():
    assert difference([1, 1], [3, 3]) == (-2, -2)
    assert difference([1], [3, 3]) is None


def test_wilson_against_a_worked_example():
    # Newcombe 1998, 81 of 263: 0.2553 to 0.3662
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    # 0 of 20: from 0 to z^2 / (20 + z^2)
    assert wilson(0, 20) == pytest.approx((0, Z_95**2 / (20 + Z_95**2)))
    assert wilson(1, 20).high == 1


def test_wilson_needs_a_share():
    for share, num in ((1.1, 5), (0.5, 0), (math.nan, 5)):
        with pytest.raises(ValueError, match="a share in"):
            wilson(share, num)
