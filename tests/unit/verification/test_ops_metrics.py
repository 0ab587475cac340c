"""Distribution of the off-policy shift by level and by age, worked by hand."""

import pytest
import torch
from unit.rollout.packed import layout_of, row_of

from rollverify.metrics.names import is_declared
from rollverify.metrics.rollout import distribution
from rollverify.ranks import Ranks
from rollverify.verification.metrics import AGES, ops_metrics, percentile, sums_by_age

OPS = [[[0.1, 0.3], [0.5]], [], [[0.0]]]
"""Trajectory 0 has segments of 2 and 1 tokens, 1 has none, 2 has one token."""


def test_levels_by_hand():
    layout, ops = layout_of(OPS), row_of(OPS)
    metrics = ops_metrics("unfinished", ops, layout, torch.tensor([2, 2, 1, 9]), Ranks())
    expected = {
        "ops/unfinished_token_mean": 0.9 / 4,
        # Sorted 0, 0.1, 0.3, 0.5: rank 0.95 * 3 = 2.85, so 0.3 + 0.85 * 0.2.
        "ops/unfinished_token_p95": 0.47,
        "ops/unfinished_token_max": 0.5,
        # Segment means 0.2, 0.5, 0: rank 1.9, so 0.2 + 0.9 * 0.3.
        "ops/unfinished_segment_mean": 0.7 / 3,
        "ops/unfinished_segment_p95": 0.47,
        "ops/unfinished_segment_max": 0.5,
        # Trajectory means 0.3 and 0; the one without tokens is left out: rank 0.95.
        "ops/unfinished_sequence_mean": 0.15,
        "ops/unfinished_sequence_p95": 0.285,
        "ops/unfinished_sequence_max": 0.3,
        "ops/unfinished_age_1": 0.5,
        "ops/unfinished_age_2": 0.2,
        "ops/unfinished_age_8_up": 0.0,
    }
    assert metrics == pytest.approx(expected)
    assert all(is_declared(key) for key in metrics)


def test_without_a_token_there_is_no_metric():
    """PR15: no NaN for samples paused before their first token."""
    empty: list[list[list[float]]] = [[], []]
    assert ops_metrics("unfinished", row_of(empty), layout_of(empty), torch.zeros(0), Ranks()) == {}


def test_age_classes_have_the_bounds_they_are_named_after():
    ages = torch.tensor([0, 1, 2, 3, 4, 7, 8, 100])
    sums = sums_by_age(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]), ages)
    assert [sums[f"num_{age}"] for age in AGES] == [1, 1, 1, 1, 2, 2]
    assert [sums[f"sum_{age}"] for age in AGES] == [1, 2, 4, 8, 48, 192]


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 1000])
def test_the_percentile_is_that_of_the_length_metrics(count):
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(0, 1000, (count,), generator=generator)
    expected = distribution("rollout/response_tokens", values.tolist())
    found = percentile(values.double(), 0.95)
    assert found == pytest.approx(expected["rollout/response_tokens_p95"])
