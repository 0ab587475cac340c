"""Filters by age and by OPS: limits are kept, what is above them goes."""

import math

import pytest
import torch
from unit.rollout.packed import ids_of, layout_of

from rollverify.rollout.layout import pack_layout
from rollverify.verification.filtering import keep_by_ops, keep_by_staleness
from rollverify.verification.ops import trajectory_staleness

# Versions of the tokens: trajectory 0 from 3 and 5, 1 empty, 2 from 7, 3 from 6.
VERSIONS = [[[3, 3], [5]], [], [[7, 7]], [[6]]]


def test_staleness_is_that_of_the_oldest_segment():
    layout = layout_of(VERSIONS, order=[2, 0, 3, 1])
    versions = ids_of([7, 7, 3, 3, 5, 6]).int()
    staleness = trajectory_staleness(versions, layout, policy_version=7)
    assert staleness.tolist() == [4, 0, 0, 1]
    assert staleness.dtype == torch.int64


def test_staleness_ignores_positions_outside_the_response():
    layout = pack_layout(ids_of([0, 0, 0]), ids_of([-1, 0, -1]), 1)
    assert trajectory_staleness(ids_of([-1, 4, 99]), layout, 6).tolist() == [2]


def test_staleness_without_any_token():
    layout = layout_of([[], []])
    assert trajectory_staleness(ids_of([]), layout, 3).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("limit", "keep"),
    [(0, [False, True, True, False]), (3, [False, True, True, True]), (4, [True] * 4)],
)
def test_staleness_at_the_limit_is_kept(limit, keep):
    assert keep_by_staleness(ids_of([4, 0, 0, 1]), limit).tolist() == keep


def test_ops_at_the_limit_is_kept():
    ops = torch.tensor([0.0, 0.01, 0.0100001, 5.0])  # float32: 0.01 is rounded, as is the limit
    assert keep_by_ops(ops, 0.01).tolist() == [True, True, False, False]
    assert keep_by_ops(ops, math.inf).tolist() == [True] * 4
    assert keep_by_ops(torch.zeros(0), 0.01).tolist() == []


def test_tokens_newer_than_the_policy_are_refused():
    layout = layout_of(VERSIONS)
    with pytest.raises(ValueError, match=r"trajectory 2 holds tokens of version 7, .* version 6"):
        trajectory_staleness(ids_of([3, 3, 5, 7, 7, 6]), layout, policy_version=6)


def test_versions_must_be_integers():
    with pytest.raises(ValueError, match="policy_versions must be integers"):
        trajectory_staleness(torch.zeros(6), layout_of(VERSIONS), 7)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_an_ops_limit_that_nothing_passes_is_refused(limit):
    with pytest.raises(ValueError, match="max_ops must be > 0"):
        keep_by_ops(torch.zeros(2), limit)


def test_a_staleness_limit_that_nothing_passes_is_refused():
    with pytest.raises(ValueError, match="max_staleness must be >= 0"):
        keep_by_staleness(ids_of([0]), -1)


def test_ops_that_are_nan_name_the_trajectory():
    with pytest.raises(ValueError, match="sequence OPS of trajectory 1 is NaN"):
        keep_by_ops(torch.tensor([0.0, math.nan]), 1.0)


def test_wrong_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"staleness must be \[B\] integers"):
        keep_by_staleness(torch.zeros(2), 1)
    with pytest.raises(ValueError, match=r"sequence_ops must be \[B\] float32"):
        keep_by_ops(torch.zeros(2, 2), 1.0)
