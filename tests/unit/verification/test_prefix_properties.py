"""What holds for verification whatever the trajectories: hypothesis looks for counterexamples."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.rollout.packed import layout_of, row_of
from unit.verification.verified import verify

from rollverify.verification.ops import segment_ops, token_ops

OPS = st.floats(0.0, 4.0, width=32)
TRAJECTORIES = st.lists(st.lists(st.lists(OPS, max_size=6), max_size=6), max_size=6)
THRESHOLDS = st.one_of(st.just(math.inf), st.floats(1e-3, 5.0))


def accepted(trajectories, d_s, d_t):
    """(accepted, checked) lengths as lists."""
    result = verify(row_of(trajectories, dtype=torch.float32), layout_of(trajectories), d_s, d_t)
    return result.accepted_lengths, result.checked_lengths


@settings(deadline=None, derandomize=True)
@given(TRAJECTORIES, THRESHOLDS, THRESHOLDS)
def test_the_accepted_part_is_a_prefix_without_offenders(trajectories, d_s, d_t):
    lengths, checked = accepted(trajectories, d_s, d_t)
    for trajectory, length, total in zip(trajectories, lengths, checked, strict=True):
        tokens = [value for segment in trajectory for value in segment]
        assert 0 <= length <= total == len(tokens)
        bound = torch.tensor(d_t, dtype=torch.float32).item()
        assert all(value < bound for value in tokens[:length])


@settings(deadline=None, derandomize=True)
@given(TRAJECTORIES, THRESHOLDS, THRESHOLDS, THRESHOLDS, THRESHOLDS)
def test_raising_a_threshold_never_shortens(trajectories, d_s, d_t, other_s, other_t):
    low, _ = accepted(trajectories, min(d_s, other_s), min(d_t, other_t))
    high, _ = accepted(trajectories, max(d_s, other_s), max(d_t, other_t))
    assert all(a <= b for a, b in zip(low, high, strict=True))


@settings(deadline=None, derandomize=True)
@given(TRAJECTORIES)
def test_infinite_thresholds_accept_all(trajectories):
    lengths, checked = accepted(trajectories, math.inf, math.inf)
    assert lengths == checked


@settings(deadline=None, derandomize=True)
@given(TRAJECTORIES, THRESHOLDS, THRESHOLDS)
def test_an_unchanged_policy_cuts_nothing(logprobs, d_s, d_t):
    layout, row = layout_of(logprobs), -row_of(logprobs, dtype=torch.float32)
    ops = token_ops(row, row, layout)
    result = verify(ops, layout, d_s, d_t)
    assert result.accepted_lengths == result.checked_lengths
    assert not any(result.cut_ops) and set(result.rules) <= {"none"}


@settings(deadline=None, derandomize=True)
@given(TRAJECTORIES, THRESHOLDS, THRESHOLDS)
def test_what_was_accepted_is_accepted_again_segment_by_segment(trajectories, d_s, d_t):
    # With whole segments kept (no token stage), verification of the rest changes nothing.
    lengths, _ = accepted(trajectories, d_s, math.inf)
    kept = []
    for trajectory, length in zip(trajectories, lengths, strict=True):
        ends = [sum(map(len, trajectory[: i + 1])) for i in range(len(trajectory))]
        kept.append([s for s, end in zip(trajectory, ends, strict=True) if s and end <= length])
    assert accepted(kept, d_s, math.inf) == (lengths, lengths)


@settings(deadline=None, derandomize=True)
@given(TRAJECTORIES, THRESHOLDS, THRESHOLDS, st.randoms(use_true_random=False))
def test_neighbours_and_order_do_not_matter(trajectories, d_s, d_t, generator):
    together, _ = accepted(trajectories, d_s, d_t)
    alone = [accepted([one], d_s, d_t)[0][0] for one in trajectories]
    order = list(range(len(trajectories)))
    generator.shuffle(order)
    shuffled = verify(
        row_of(trajectories, order, torch.float32), layout_of(trajectories, order), d_s, d_t
    )
    assert together == alone == shuffled.accepted_lengths


@settings(deadline=None, derandomize=True)
@given(TRAJECTORIES)
def test_a_segment_mean_lies_between_its_lowest_and_highest_token(trajectories):
    segments = [segment for one in trajectories for segment in one if segment]
    means = segment_ops(row_of(trajectories, dtype=torch.float32), layout_of(trajectories))
    for segment, mean in zip(segments, means.tolist(), strict=True):
        assert min(segment) <= mean <= max(segment)
