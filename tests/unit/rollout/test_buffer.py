"""The buffer: whole groups in order, complete groups and tokens counted as they change."""

import json

import pytest
from support.fakes import trajectory
from tensordict import TensorDict

from rollverify.errors import LedgerError, RolloutError
from rollverify.rollout.buffer import TokenCounts, TrajectoryBuffer
from rollverify.rollout.trajectory import (
    RESPONSE_KEYS,
    Status,
    append_segment,
    new_trajectory,
    single_value,
    truncate,
)


def empty_group(group_id: int, size: int = 2) -> list[TensorDict]:
    return [
        new_trajectory(prompt_ids=[7], group_id=group_id, prompt_index=0, sample_index=index)
        for index in range(size)
    ]


def buffer_of(*groups: int, size: int = 2) -> TrajectoryBuffer:
    """A buffer with empty groups of these ids."""
    buffer = TrajectoryBuffer(group_size=size)
    for group_id in groups:
        buffer.add_group(empty_group(group_id, size))
    return buffer


def generate(buffer: TrajectoryBuffer, one: TensorDict, num: int, version: int = 0) -> None:
    buffer.append(one, [5] * num, [-1.0] * num, policy_version=version, seed=0)


def complete_group(buffer: TrajectoryBuffer, group_id: int, *lengths: int) -> None:
    """Generate and finish every sample of a group."""
    for one, length in zip(buffer.group(group_id), lengths, strict=True):
        generate(buffer, one, length)
        buffer.set_outcome(one, Status.STOP, 1.0)


def places(trajectories: list[TensorDict]) -> list[tuple[int, int]]:
    return [(int(one["group_id"]), int(one["sample_index"])) for one in trajectories]


def test_trajectories_come_by_group_and_sample_whatever_the_order_of_arrival():
    buffer = buffer_of(9, 2, 5)
    assert buffer.group_ids() == [2, 5, 9]
    assert places(buffer.trajectories()) == [(2, 0), (2, 1), (5, 0), (5, 1), (9, 0), (9, 1)]
    assert places(buffer.group(5)) == [(5, 0), (5, 1)]
    assert buffer.trajectories()[2] is buffer.group(5)[0]  # edited in place, so not copies


def test_a_group_is_complete_once_all_its_samples_are_finished():
    buffer = buffer_of(1, 2)
    first, second = buffer.group(2)
    generate(buffer, first, 3)
    buffer.set_outcome(first, Status.STOP, 1.0)
    assert (buffer.num_complete, buffer.complete_groups()) == (0, [])
    generate(buffer, second, 2)
    buffer.set_outcome(second, Status.LENGTH, 0.0)
    assert (buffer.num_complete, buffer.complete_groups(), buffer.num_tokens) == (1, [2], 5)
    buffer.check()


def test_complete_groups_come_by_ascending_id():
    buffer = buffer_of(8, 3, 5)
    for group_id in (5, 8):
        complete_group(buffer, group_id, 1, 1)
    assert buffer.complete_groups() == [5, 8]


def test_an_outcome_stored_twice_counts_once():
    buffer = buffer_of(1)
    complete_group(buffer, 1, 1, 1)
    buffer.set_outcome(buffer.group(1)[0], Status.STOP, 0.5)
    assert buffer.num_complete == 1
    buffer.set_outcome(buffer.group(1)[0], Status.UNFINISHED, 0.0)
    assert buffer.num_complete == 0
    buffer.check()


def test_a_cut_of_a_finished_response_makes_its_group_incomplete():
    """VF03: 5 tokens cut at 3 lose 2, in every array."""
    buffer = buffer_of(1)
    complete_group(buffer, 1, 5, 4)
    one = buffer.group(1)[0]
    assert buffer.truncate(one, 3) == 2
    assert {len(one[key]) for key in RESPONSE_KEYS} == {3}
    assert (buffer.num_complete, buffer.num_tokens) == (0, 7)
    assert buffer.counts == TokenCounts(generated=9, cut=2)
    generate(buffer, one, 1, version=1)
    buffer.set_outcome(one, Status.STOP, 1.0)
    assert buffer.num_complete == 1
    buffer.check()


def test_a_cut_that_cuts_nothing_leaves_the_group_complete():
    buffer = buffer_of(1)
    complete_group(buffer, 1, 5, 4)
    assert buffer.truncate(buffer.group(1)[0], 5) == 0
    assert (buffer.num_complete, buffer.counts.cut) == (1, 0)


def test_a_cut_out_of_range_changes_nothing():
    buffer = buffer_of(1)
    complete_group(buffer, 1, 5, 4)
    with pytest.raises(ValueError, match="group 1 sample 0: cannot keep 6 of 5 tokens"):
        buffer.truncate(buffer.group(1)[0], 6)
    assert (buffer.num_tokens, buffer.num_complete) == (9, 1)
    buffer.check()


def test_a_discarded_sample_starts_again_in_its_group_with_a_new_stream():
    buffer = buffer_of(1)
    complete_group(buffer, 1, 5, 4)
    one = buffer.group(1)[1]
    assert buffer.discard(one) == 4
    assert buffer.counts == TokenCounts(generated=9, discarded=4)
    assert [len(one["response_ids"]), int(one["status"]), float(one["reward"])] == [0, 0, 0.0]
    assert int(one["num_requests"]) == 1  # the next seed differs from the one already used
    assert (buffer.num_complete, buffer.num_tokens) == (0, 5)
    assert buffer.discard(one) == 0  # PR15: nothing to throw away is fine
    buffer.check()


def test_a_finished_response_is_not_generated_further():
    """PR13: the stop token ends it, whatever else the engine sends."""
    buffer = buffer_of(1)
    complete_group(buffer, 1, 3, 2)
    with pytest.raises(RolloutError, match="group 1 sample 0 is finished and was generated"):
        generate(buffer, buffer.group(1)[0], 1)
    assert buffer.num_tokens == 5 and buffer.counts.generated == 5


def test_a_response_at_the_limit_is_counted_as_finished():
    """PR03: finished by its length, in a complete group, and never resumed."""
    buffer = buffer_of(1, size=1)
    (one,) = buffer.group(1)
    generate(buffer, one, 10)
    buffer.set_outcome(one, Status.LENGTH, 0.0)
    assert buffer.complete_groups() == [1]


def test_a_sample_paused_before_its_first_token_stays_in_the_buffer():
    """PR15."""
    buffer = buffer_of(1)
    one = buffer.group(1)[0]
    generate(buffer, one, 0)
    assert (buffer.num_tokens, buffer.counts.generated, buffer.num_complete) == (0, 0, 0)
    generate(buffer, one, 2, version=1)
    assert one["policy_version"].tolist() == [1, 1]
    buffer.check()


def test_masking_reaches_the_segments():
    """PR05: 3 tokens of version 0 masked, 2 of version 1 not."""
    buffer = buffer_of(1, size=1)
    (one,) = buffer.group(1)
    generate(buffer, one, 3)
    buffer.append(one, [5, 5], [-1.0, -1.0], policy_version=1, seed=1, mask_older=True)
    assert one["loss_mask"].int().tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("fate", ["trained", "discarded", "dropped"])
def test_a_popped_group_is_counted_under_its_fate(fate):
    buffer = buffer_of(1, 2)
    complete_group(buffer, 1, 5, 4)
    assert places(buffer.pop_group(1, fate)) == [(1, 0), (1, 1)]
    assert buffer.counts == TokenCounts(generated=9, **{fate: 9})
    assert (buffer.group_ids(), buffer.num_tokens, buffer.num_complete) == ([2], 0, 0)
    buffer.check()


def test_an_incomplete_group_is_not_trained_on():
    buffer = buffer_of(1)
    generate(buffer, buffer.group(1)[0], 5)
    with pytest.raises(ValueError, match="group 1 is not complete and cannot be trained on"):
        buffer.pop_group(1, "trained")
    assert buffer.counts.trained == 0 and buffer.group_ids() == [1]


def test_tokens_of_a_group_that_moves_are_counted_on_both_ranks():
    giver, taker = buffer_of(1, 2), buffer_of(4)
    complete_group(giver, 1, 5, 4)
    taker.add_group(giver.pop_group(1, "moved"))
    assert [one.num_moved_in for one in (giver, taker)] == [-9, 9]
    assert [one.num_complete for one in (giver, taker)] == [0, 1]
    assert [one.counts for one in (giver, taker)] == [TokenCounts(generated=9), TokenCounts()]
    taker.pop_group(1, "trained")
    assert taker.counts == TokenCounts(trained=9)
    for one in (giver, taker):
        one.check()


@pytest.mark.parametrize(
    "samples", [[(1, 0)], [(1, 0), (1, 2)], [(1, 1), (1, 0)], [(1, 0), (2, 1)], []]
)
def test_a_group_that_is_not_whole_is_refused(samples):
    group = [trajectory([7], [5], group=group, sample=sample) for group, sample in samples]
    buffer = TrajectoryBuffer(group_size=2)
    with pytest.raises(ValueError, match="a group needs samples 0 to 1 of one group id in order"):
        buffer.add_group(group)
    assert buffer.trajectories() == []


def test_a_group_is_not_added_twice_nor_with_a_broken_trajectory():
    buffer = buffer_of(1)
    with pytest.raises(ValueError, match="the buffer already holds group 1"):
        buffer.add_group(empty_group(1))
    broken = empty_group(3)
    broken[1]["loss_mask"] = broken[1]["loss_mask"].int()
    with pytest.raises(ValueError, match="group 3 sample 1: loss_mask must be"):
        buffer.add_group(broken)
    assert buffer.group_ids() == [1]


def test_what_the_buffer_does_not_hold_is_refused():
    buffer = buffer_of(1)
    copy = buffer.group(1)[0].clone()
    with pytest.raises(ValueError, match="does not hold group 1 sample 0, or only a copy"):
        generate(buffer, copy, 1)
    for call in (buffer.group, lambda group_id: buffer.pop_group(group_id, "dropped")):
        with pytest.raises(ValueError, match="does not hold group 4"):
            call(4)
    (gone, _) = buffer.pop_group(1, "dropped")
    with pytest.raises(ValueError, match="does not hold group 1 sample 0"):
        buffer.discard(gone)


def test_changes_behind_the_back_of_the_buffer_are_noticed():
    buffer = buffer_of(1)
    complete_group(buffer, 1, 5, 4)
    truncate(buffer.group(1)[0], 5)  # nothing is cut: nothing to notice
    buffer.check()
    append_segment(buffer.group(1)[0], [6], [-1.0], policy_version=0, seed=0)
    with pytest.raises(LedgerError, match="holds 10 tokens and counted 9"):
        buffer.check()


def test_a_status_changed_behind_the_back_of_the_buffer_is_noticed():
    buffer = buffer_of(1)
    complete_group(buffer, 1, 5, 4)
    buffer.group(1)[0]["status"] = single_value("status", Status.UNFINISHED)
    with pytest.raises(LedgerError, match="0 groups are complete, 1 were counted"):
        buffer.check()


def test_tokens_counted_twice_are_noticed():
    buffer = buffer_of(1)
    complete_group(buffer, 1, 5, 4)
    buffer.counts.cut += 3
    with pytest.raises(LedgerError, match="0 moved in leave 6"):
        buffer.check()
    buffer.counts.cut -= 3
    buffer.num_tokens += 2
    with pytest.raises(LedgerError, match="holds 9 tokens and counted 11"):
        buffer.check()


@pytest.mark.parametrize("counts_first", [True, False])
def test_a_restored_buffer_adds_up_in_either_order(counts_first):
    before = buffer_of(1, 2)
    complete_group(before, 1, 5, 4)
    generate(before, before.group(2)[0], 3)
    before.pop_group(1, "trained")
    state = json.loads(json.dumps(before.state_dict()))
    after = TrajectoryBuffer(group_size=2)
    steps = [lambda: after.load_state_dict(state), lambda: after.add_group(before.group(2))]
    for step in steps if counts_first else reversed(steps):
        step()
    assert after.counts == TokenCounts(generated=12, trained=9)
    assert (after.num_tokens, after.num_moved_in) == (3, 0)
    after.check()


def test_a_token_lost_in_a_checkpoint_shows_as_moved():
    """Over all ranks nothing can have moved, so a sum other than 0 is a loss."""
    after = buffer_of(2)
    counts = {"generated": 12, "trained": 9, "cut": 0, "discarded": 0, "dropped": 0}
    after.load_state_dict(counts)
    after.check()
    assert after.num_moved_in == -3
