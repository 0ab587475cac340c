"""Mean, percentiles and maximum of counts, by hand."""

import pytest

from rollverify.metrics.rollout import distribution


def test_five_counts():
    # Sorted 1 2 3 4 10: mean 4, median the third, p95 at rank 0.95 * 4 = 3.8: 4 + 0.8 * 6 = 8.8.
    values = distribution("rollout/response_tokens", [10, 1, 3, 2, 4])
    assert values == pytest.approx(
        {
            "rollout/response_tokens_mean": 4.0,
            "rollout/response_tokens_p50": 3.0,
            "rollout/response_tokens_p95": 8.8,
            "rollout/response_tokens_max": 10.0,
        }
    )


def test_median_of_an_even_number_lies_between():
    assert distribution("x", [1, 2, 5, 9])["x_p50"] == pytest.approx(3.5)


def test_one_count_is_all_of_it():
    assert distribution("x", [7]) == {"x_mean": 7.0, "x_p50": 7.0, "x_p95": 7.0, "x_max": 7.0}


def test_no_counts_give_no_metrics():
    assert distribution("x", []) == {}
