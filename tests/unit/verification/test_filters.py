"""Filters by age and by OPS: limits are kept, what is above them goes."""

import math

import pytest
import torch
from unit.rollout.packed import ids_of, layout_of

from rollverify.verification.filters import keep_by_ops, keep_by_staleness
from rollverify.verification.ops import trajectory_staleness

# Versions of the tokens: trajectory 0 from 3 and 5, 1 empty, 2 from 7, 3 from 6.
VERSIONS = [[[3, 3], [5]], [], [[7, 7]], [[6]]]


def test_staleness_is_that_of_the_oldest_segment():
    layout = layout_of(VERSIONS, order=[2, 0, 3, 1])
    versions = ids_of([7, 7, 3, 3, 5, 6]).int()
    staleness = trajectory_staleness(versions, layout, policy_version=7)
    assert staleness.tolist() == [4, 0, 0, 1]
    assert staleness.dtype == torch.int64


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
