"""Off-policy shift: worked values, precision, masking, means, and log-probs that are no numbers."""

import math
import random

import pytest
import torch
from unit.losses import reference
from unit.rollout.packed import layout_of, random_order, random_shape, row_of

from rollverify.verification.ops import segment_ops, sequence_ops, token_ops

# The worked example: log-probs before, and how far each moved.
BEFORE = [[[-0.5, -1.0, -0.2, -2.0], [-0.7, -0.3, -1.1], [-0.9, -0.4]]]
MOVES = [[[0.004, -0.006, 0.0, 0.010], [0.002, 1.2, -0.010], [0.03, -0.02]]]
SHIFTS = [0.004008, 0.005982, 0.0, 0.010050, 0.002002, 2.320117, 0.009950, 0.030455, 0.019801]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worked_example_tokens_segments_and_sequence(dtype):
    layout, before = layout_of(BEFORE), row_of(BEFORE, dtype=dtype)
    ops = token_ops(before + row_of(MOVES, dtype=dtype), before, layout)
    assert ops.dtype == dtype
    assert ops.tolist() == pytest.approx(SHIFTS, abs=1e-6)
    means = segment_ops(ops, layout)
    assert means.tolist() == pytest.approx([0.005010, 0.777356, 0.025128], abs=1e-6)
    # (4 * 0.005010 + 3 * 0.777356 + 2 * 0.025128) / 9
    assert sequence_ops(ops, layout).tolist() == pytest.approx([0.266929], abs=1e-6)


def test_vf01_tokens_and_segment_means():
    layout = layout_of([[[0, 0], [0, 0]]])
    updated = torch.tensor([-0.10, -0.205, -0.28, -1.60], dtype=torch.float64)
    behavior = torch.tensor([-0.10, -0.20, -0.30, -0.40], dtype=torch.float64)
    ops = token_ops(updated, behavior, layout)
    assert ops.tolist() == pytest.approx([0.0, 0.004988, 0.020201, 0.698806], abs=1e-6)
    assert segment_ops(ops, layout).tolist() == pytest.approx([0.002494, 0.359504], abs=1e-6)


def test_equal_policies_have_ops_zero():
    row = torch.tensor([-0.1, -7.0, 0.0])
    assert token_ops(row, row, layout_of([[[0, 0, 0]]])).tolist() == [0.0, 0.0, 0.0]


def test_tiny_moves_keep_their_digits():
    # exp(x) - 1 in float32 would round 1e-8 away altogether.
    ops = token_ops(torch.tensor([1e-8]), torch.tensor([0.0]), layout_of([[[0]]]))
    assert ops.item() == pytest.approx(1e-8, rel=1e-6)


def test_large_moves_are_clamped_upwards_only():
    layout, zeros = layout_of([[[0, 0, 0]]]), torch.zeros(3)
    moves = torch.tensor([20.0, 500.0, -500.0])
    limit = math.expm1(20.0)
    assert token_ops(moves, zeros, layout).tolist() == pytest.approx([limit, limit, 1.0])
    symmetric = token_ops(moves, zeros, layout, symmetric=True)
    assert symmetric.tolist() == pytest.approx([limit, limit, limit])


def test_symmetric_form_sees_collapsed_tokens():
    # r = 2, 1/2, 1/4: |r - 1| = 1, 0.5, 0.75; max(r, 1/r) - 1 = 1, 1, 3.
    moves = torch.tensor([2.0, 0.5, 0.25], dtype=torch.float64).log()
    layout, zeros = layout_of([[[0, 0, 0]]]), torch.zeros(3, dtype=torch.float64)
    assert token_ops(moves, zeros, layout).tolist() == pytest.approx([1.0, 0.5, 0.75])
    assert token_ops(moves, zeros, layout, symmetric=True).tolist() == pytest.approx([1, 1, 3])


def test_inputs_are_left_alone():
    updated, behavior = torch.tensor([-1.0, -9.0], requires_grad=True), torch.tensor([-2.0, -1.0])
    ops = token_ops(updated, behavior, layout_of([[[0, 0]]]))
    assert updated.tolist() == [-1.0, -9.0] and behavior.tolist() == [-2.0, -1.0]
    assert not ops.requires_grad


def test_pr15_a_trajectory_without_tokens_has_ops_zero():
    layout = layout_of([[], [[0.5, 0.25]], []], order=[2, 1, 0])
    assert sequence_ops(torch.tensor([0.5, 0.25]), layout).tolist() == [0.0, 0.375, 0.0]
    empty = layout_of([[], []])
    assert token_ops(torch.zeros(0), torch.zeros(0), empty).tolist() == []
    assert segment_ops(torch.zeros(0), empty).tolist() == []
    assert sequence_ops(torch.zeros(0), empty).tolist() == [0.0, 0.0]


def test_the_mean_of_equal_values_is_that_value():
    # 30,000 float32 additions of 0.01 one after the other would be off by 1e-4.
    layout = layout_of([[[0] * 30_000]])
    ops = torch.full((30_000,), 0.01)
    assert segment_ops(ops, layout).item() == ops[0].item()
    assert sequence_ops(ops, layout).item() == ops[0].item()


def test_one_huge_token_does_not_touch_other_trajectories():
    layout = layout_of([[[0, 0]], [[0, 0]]])
    ops = torch.tensor([4e8, 4e8, 1e-7, 3e-7], dtype=torch.float64)
    assert segment_ops(ops, layout).tolist() == [4e8, 2e-7]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["updated_logprobs", "sampled_logprobs"])
def test_log_probs_that_are_not_finite_name_trajectory_and_token(bad, name):
    layout = layout_of([[[0, 0]], [[0], [0, 0]]], order=[1, 0])
    rows = {"updated_logprobs": -torch.ones(5), "sampled_logprobs": -torch.ones(5)}
    rows[name][2] = bad
    with pytest.raises(ValueError, match=f"{name} of trajectory 1, response token 2 is {bad}"):
        token_ops(**rows, layout=layout)


def test_the_same_infinity_on_both_sides_is_an_error():
    row = torch.tensor([-math.inf])
    with pytest.raises(ValueError, match="trajectory 0, response token 0 is -inf"):
        token_ops(row, row, layout_of([[[0]]]))


def test_a_difference_that_overflows_is_an_error():
    row = torch.tensor([3e38])
    with pytest.raises(ValueError, match="overflows"):
        token_ops(row, -row, layout_of([[[0]]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
@pytest.mark.parametrize("function", [segment_ops, sequence_ops])
def test_ops_that_are_no_distance_are_refused(bad, function):
    layout = layout_of([[[0]], [[0, 0]]])
    with pytest.raises(ValueError, match="OPS of trajectory 1, response token 1 is"):
        function(torch.tensor([0.0, 0.0, bad]), layout)


def test_coarse_dtypes_are_refused():
    with pytest.raises(ValueError, match="token_ops must be float32"):
        segment_ops(torch.zeros(1).half(), layout_of([[[0]]]))


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_the_literal_transcription(seed):
    generator = random.Random(seed)
    shapes = [random_shape(generator) for _ in range(50)]
    before = [[[generator.uniform(-9, 0) for _ in range(n)] for n in shape] for shape in shapes]
    after = [[[v + generator.gauss(0, 0.5) for v in seg] for seg in one] for one in before]
    order = random_order(generator, len(shapes))
    layout = layout_of(before, order)
    ops = token_ops(row_of(after, order), row_of(before, order), layout)
    literal = [reference.ops_of_trajectory(*pair) for pair in zip(after, before, strict=True)]
    assert ops.tolist() == pytest.approx(row_of(literal, order).tolist(), abs=1e-12)
    means = [reference.mean(seg) for index in order for seg in literal[index] if seg]
    assert segment_ops(ops, layout).tolist() == pytest.approx(means, abs=1e-12)
    wholes = [reference.mean([v for seg in one for v in seg]) for one in literal]
    assert sequence_ops(ops, layout).tolist() == pytest.approx(wholes, abs=1e-12)
