"""The cost of decode steps: fit, cost at given constants, comparison."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollverify.study.cost_model import Work, accuracy_at, break_even, cost, fit_cost


def fit(*works):
    return fit_cost(pd.DataFrame(works, columns=Work._fields))


@given(
    st.floats(1e-4, 1e-1),
    st.floats(1e-6, 1e-2),
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 512)), min_size=2, max_size=20),
)
def test_exact_times_give_their_constants_back(c0, c1, phases):
    found = fit(*((n, n * active, c0 * n + c1 * n * active) for n, active in phases))
    if len({active for _, active in phases}) == 1:
        assert found is None
        return
    assert found is not None
    # Rounding of the differences, against constants up to 1e5 apart.
    assert found.c0_s + 512 * found.c1_s == pytest.approx(c0 + 512 * c1, rel=1e-6)
    assert found.residual_frac == pytest.approx(0, abs=1e-6)


def test_phases_count_by_their_steps():
    # 3 steps of 1 s with 1 active, 1 step of 3 s with 1 active, 4 steps of 2 s with 3 active:
    # with 1 active the mean is (3 + 3) / 4 = 1.5 s, so c1 = (2 - 1.5) / 2 and c0 = 1.25
    found = fit((3, 3, 3), (1, 1, 3), (4, 12, 8))
    assert found is not None
    assert (found.c0_s, found.c1_s, found.ratio) == pytest.approx((1.25, 0.25, 0.2))
    # errors per step: 3 * 0.5^2 + 1 * 1.5^2 + 0 = 3, over 8 steps; mean step 14 / 8 s
    assert found.residual_s == pytest.approx(math.sqrt(3 / 8))
    assert found.residual_frac == pytest.approx(math.sqrt(3 / 8) / (14 / 8))
    assert found.num_phases == 3


def test_too_little_is_not_fitted():
    assert fit() is None
    assert fit((3, 3, 3), (0, 0, 1)) is None
    assert fit((3, 6, 3), (5, 10, 4)) is None


def test_a_fit_without_a_positive_constant_has_no_ratio():
    found = fit((1, 1, 1), (1, 2, 3))  # 2 * active - 1
    assert found is not None
    assert (found.c0_s, found.c1_s, found.ratio) == (-1, 2, None)


def test_cost_at_given_constants():
    work = Work(100, 5000, 7.0)
    assert [cost(work, ratio) for ratio in (0, 0.002, math.inf)] == [100, 110, 5000]


def test_both_cost_the_same_at_the_break_even():
    ours, theirs = Work(100, 5000, 0), Work(400, 2000, 0)
    ratio = break_even(ours, theirs)
    assert ratio == pytest.approx(0.1)  # (400 - 100) / (5000 - 2000)
    assert cost(ours, ratio) == cost(theirs, ratio) == 600
    assert break_even(theirs, ours) == ratio


def test_what_is_cheaper_at_every_ratio_has_no_break_even():
    assert break_even(Work(100, 1000, 0), Work(400, 2000, 0)) is None
    assert break_even(Work(100, 1000, 0), Work(100, 1000, 0)) is None


def test_accuracy_between_evaluations_is_linear():
    points = [(0.0, 0.2), (10.0, 0.4), (30.0, 0.8)]
    found = [accuracy_at(points, budget) for budget in (0, 5, 10, 15, 30, 99)]
    assert found == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.8, 0.8])
    assert accuracy_at(points, -1.0) is None and accuracy_at([], 4.0) is None
