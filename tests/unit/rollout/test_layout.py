"""Offsets of trajectories and segments in packed rows, and what is refused."""

import pytest
import torch
from support.fakes import paused
from unit.rollout.packed import ids_of, layout_of

from rollverify.rollout.layout import pack_layout, response_layout


def test_the_example_of_the_docstring():
    layout = pack_layout(ids_of([1, 1, 1, 0]), ids_of([0, 0, 1, 0]), 3)
    assert layout.token_owners.tolist() == [1, 1, 1, 0]
    assert layout.segment_starts.tolist() == [0, 2, 3]
    assert layout.segment_lengths.tolist() == [2, 1, 1]
    assert layout.segment_owners.tolist() == [1, 1, 0]
    assert layout.nonempty_trajectories.tolist() == [1, 0]
    assert layout.trajectory_lengths.tolist() == [1, 3, 0]
    assert layout.trajectory_starts.tolist() == [3, 0, 0]
    assert layout.num_tokens == 4
    assert layout.name_token(3) == "trajectory 0, response token 0"


def test_masked_tokens_are_not_counted():
    batch = [paused({1: [-1.0, -1.0], 2: [-1.0]}), paused({2: [-1.0, -1.0]}, sample=1)]
    layout = response_layout(batch, torch.tensor([False, True, True, False, True]))
    assert layout.trajectory_starts.tolist() == [0, 2]
    assert layout.trajectory_lengths.tolist() == [2, 1]
    assert layout.segment_lengths.tolist() == [1, 1, 1]
    assert layout.name_token(2) == "trajectory 1, response token 0"


@pytest.mark.parametrize("num_trajectories", [0, 3])
def test_rows_without_tokens_are_legal(num_trajectories):
    layout = layout_of([[]] * num_trajectories)
    assert layout.trajectory_lengths.tolist() == [0] * num_trajectories
    assert len(layout.segment_starts) == 0


def test_skipped_segment_ids_are_legal():
    layout = pack_layout(ids_of([0, 0, 0]).int(), ids_of([1, 1, 4]).int(), 1)
    assert layout.segment_lengths.tolist() == [2, 1]


def test_equal_ids_of_neighbours_are_two_segments():
    assert layout_of([[[1.0]], [[2.0, 3.0]]]).segment_lengths.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("owners", "segments", "message"),
    [
        ([0, 1, 0], [0, 0, 0], "trajectory 0 is split"),
        ([0, 2], [0, 0], r"trajectory id 2 is not in \[0, 2\)"),
        ([-1, 0], [0, 0], r"trajectory id -1 is not in \[0, 2\)"),
        ([0, 1, 1], [0, 1, 0], "segment ids of trajectory 1 fall"),
        ([0, 0], [0], "trajectory_ids has 2 entries, segment_ids 1"),
    ],
)
def test_bad_ids_are_refused(owners, segments, message):
    with pytest.raises(ValueError, match=message):
        pack_layout(ids_of(owners), ids_of(segments), 2)


@pytest.mark.parametrize(
    "ids", [torch.zeros(2), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)]
)
def test_ids_must_be_flat_integers(ids):
    with pytest.raises(ValueError, match="segment_ids must be"):
        pack_layout(ids_of([0, 0]), ids, 1)
