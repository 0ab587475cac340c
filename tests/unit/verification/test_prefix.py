"""Two-stage verification: worked values, boundaries, and the literal transcription as a judge."""

import math
import random

import pytest
import torch
from unit.losses import reference
from unit.rollout.packed import layout_of, random_order, random_shape, row_of
from unit.verification.verified import verify as verify_packed

from rollverify.verification.ops import token_ops

EXAMPLE = [
    [
        [0.004008, 0.005982, 0.0, 0.010050],
        [0.002002, 2.320117, 0.009950],
        [0.030455, 0.019801],
    ]
]


def verify(trajectories, d_s, d_t, order=None, dtype=torch.float64):
    """Verification of OPS given as nested lists."""
    return verify_packed(
        row_of(trajectories, order, dtype), layout_of(trajectories, order), d_s, d_t
    )


def outcome(trajectory, d_s, d_t):
    """(accepted length, rule, cut index, cut OPS) of a single trajectory."""
    result = verify([trajectory], d_s, d_t)
    fields = (result.accepted_lengths, result.rules, result.cut_indices, result.cut_ops)
    return tuple(field[0] for field in fields)


@pytest.mark.parametrize(
    ("d_s", "d_t", "length", "rule", "index", "value"),
    [
        (0.01, 2.0, 4, "segment", 4, 0.777356),  # stop at s_2
        (1.0, 2.0, 5, "token", 5, 2.320117),  # all segments pass, the sixth token fails
        (math.inf, math.inf, 9, "none", -1, 0.0),
    ],
)
def test_worked_example(d_s, d_t, length, rule, index, value):
    result = verify(EXAMPLE, d_s, d_t, dtype=torch.float32)
    assert result.checked_lengths == [9]
    assert result.accepted_lengths == [length]
    assert result.rules == [rule]
    assert result.cut_indices == [index]
    assert result.cut_ops == pytest.approx([value], abs=1e-6)


def test_vf01_the_mean_is_per_segment():
    layout = layout_of([[[0, 0], [0, 0]]])
    updated = torch.tensor([-0.10, -0.205, -0.28, -1.60])
    behavior = torch.tensor([-0.10, -0.20, -0.30, -0.40])
    ops = token_ops(updated, behavior, layout)
    result = verify_packed(ops, layout, 0.01, 2.0)
    assert result.accepted_lengths == [2]


def test_vf01_a_segment_at_its_threshold_is_cut():
    assert outcome([[0.5]], 0.5, math.inf) == (0, "segment", 0, 0.5)


def test_vf03_the_token_stage_cuts_inside_a_segment():
    behavior = torch.tensor([-1.0, -1.0, -1.0, -4.0, -1.0])
    updated = torch.tensor([-1.0, -1.0, -1.0, -2.5, -1.0])
    layout = layout_of([[[0] * 5]])
    ops = token_ops(updated, behavior, layout)
    result = verify_packed(ops, layout, 1.0, 2.0)
    assert result.accepted_lengths == [3]
    assert result.rules == ["token"]
    assert result.cut_ops[0] == pytest.approx(3.4817, abs=1e-4)


def test_pr15_a_trajectory_without_tokens_is_verified_and_not_cut():
    result = verify([[], [[0.5]], []], 0.01, 2.0)
    assert result.checked_lengths == [0, 1, 0]
    assert result.accepted_lengths == [0, 0, 0]
    assert result.rules == ["none", "segment", "none"]
    assert result.cut_indices == [-1, 0, -1]
    assert result.cut_ops == [0.0, 0.5, 0.0]


@pytest.mark.parametrize("trajectories", [[], [[]], [[], []]])
def test_pr15_nothing_to_verify(trajectories):
    result = verify(trajectories, 0.01, 2.0)
    assert result.accepted_lengths == [0] * len(trajectories)
    assert result.cut_ops == [0.0] * len(trajectories)


@pytest.mark.parametrize(
    ("trajectory", "d_s", "d_t", "expected"),
    [
        # Just below, at and just above each threshold.
        ([[0.25, 0.75], [0.0]], 0.5000001, 2.0, (3, "none", -1, 0.0)),
        ([[0.25, 0.75], [0.0]], 0.5, 2.0, (0, "segment", 0, 0.5)),
        ([[0.25, 0.75], [0.0]], 9.0, 0.75, (1, "token", 1, 0.75)),
        ([[0.25, 0.75], [0.0]], 9.0, 0.7500001, (3, "none", -1, 0.0)),
        # First and last token, first and last segment.
        ([[3.0, 0.0]], 9.0, 2.0, (0, "token", 0, 3.0)),
        ([[0.0, 3.0]], 9.0, 2.0, (1, "token", 1, 3.0)),
        ([[0.0], [0.0], [1.0]], 0.5, 2.0, (2, "segment", 2, 1.0)),
        ([[1.0], [0.0], [1.0]], 0.5, 2.0, (0, "segment", 0, 1.0)),
        # Both stages cut: the second names the rule. It does not look at what the first dropped.
        ([[0.0, 2.5], [8.0]], 4.0, 2.0, (1, "token", 1, 2.5)),
        ([[0.0, 0.5], [8.0]], 4.0, 2.0, (2, "segment", 2, 8.0)),
        # One stage turned off.
        ([[0.0], [8.0]], math.inf, 2.0, (1, "token", 1, 8.0)),
        ([[0.0], [8.0]], 4.0, math.inf, (1, "segment", 1, 8.0)),
        # A late low segment does not save what comes after an early high one.
        ([[0.0], [1.0], [0.0]], 0.5, 2.0, (1, "segment", 1, 1.0)),
    ],
)
def test_boundaries(trajectory, d_s, d_t, expected):
    assert outcome(trajectory, d_s, d_t) == expected


def test_thresholds_are_inclusive_in_float32_too():
    # float32(0.01) is 0.00999999978: below 0.01 unless the threshold is rounded likewise.
    for d_s, d_t in ((0.01, math.inf), (math.inf, 0.01)):
        result = verify([[[0.01, 0.01, 0.01]]], d_s, d_t, dtype=torch.float32)
        assert result.accepted_lengths == [0]


def test_a_threshold_below_float32_does_not_cut_zeros():
    result = verify([[[0.0, 0.0]]], 1e-60, 1e-60, dtype=torch.float32)
    assert result.accepted_lengths == [2]


def test_a_threshold_above_float32_cuts_nothing():
    result = verify([[[4e8]]], 1e300, 1e300, dtype=torch.float32)
    assert result.accepted_lengths == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_ops_that_are_no_distance_name_trajectory_and_token(bad):
    with pytest.raises(ValueError, match="OPS of trajectory 1, response token 1 is"):
        verify([[[0.0]], [[0.0], [bad]]], math.inf, math.inf)


def random_case(generator):
    """Trajectories of OPS that are multiples of 1/64, so that their sums are exact, and bounds.

    Bounds are often exactly a token's OPS or a segment's mean.
    """
    spread = generator.choice([2, 8, 64, 256])
    trajectories = [
        [[generator.randint(0, spread) / 64 for _ in range(n)] for n in random_shape(generator)]
        for _ in range(generator.randint(0, 12))
    ]
    segments = [segment for one in trajectories for segment in one]
    means = [reference.mean(segment) for segment in segments]
    tokens = [value for segment in segments for value in segment]
    choices = [
        [bound for bound in values if bound > 0] + [math.inf, 0.01, generator.uniform(0.01, 4)]
        for values in (means, tokens)
    ]
    d_s, d_t = (generator.choice(bounds) for bounds in choices)
    return trajectories, d_s, d_t, random_order(generator, len(trajectories))


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_the_literal_transcription(seed):
    generator, seen = random.Random(seed), set()
    for _ in range(400):
        trajectories, d_s, d_t, order = random_case(generator)
        result = verify(trajectories, d_s, d_t, order)
        expected = [reference.verify_trajectory(one, d_s, d_t) for one in trajectories]
        lengths = [length for length, _, _ in expected]
        assert result.accepted_lengths == lengths
        assert result.rules == [rule for _, rule, _ in expected]
        assert result.cut_ops == [value for _, _, value in expected]
        cuts = [-1 if rule == "none" else length for length, rule, _ in expected]
        assert result.cut_indices == cuts
        checked = [sum(len(segment) for segment in one) for one in trajectories]
        assert result.checked_lengths == checked
        seen |= {rule for _, rule, _ in expected}
    assert seen == {"none", "segment", "token"}
