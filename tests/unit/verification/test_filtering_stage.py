"""Filters: which trajectories of U_k they give up, and what becomes of those and their groups."""

from math import log

import pytest
import torch
from unit.verification.scored import held_in, lengths, scoring

from rollverify.metrics.names import is_declared
from rollverify.rollout.ledger import PromptState
from rollverify.rollout.trajectory import Status
from rollverify.verification.filtering import TrajectoryFilter, keep_close, keep_young

GROUPS = {
    0: [{0: [-1.0], 2: [-1.0]}, {2: [-1.0, -1.0]}],  # 3 steps and 1 step old
    1: [{1: [-1.0]}, {}],  # 2 steps old; not begun
}
UPDATED = {(0, 0): [-1.0, -1.0], (0, 1): [-1.0 + log(1.5), -1.0 + log(1.3)], (1, 0): [-1.0]}


def run(keep, discard: str = "trajectory"):
    """(buffer, ledger, state, scoring) after the filter at version 3."""
    buffer, ledger, state = held_in(GROUPS, group_size=2)
    stage = scoring(UPDATED)
    stage(state)
    TrajectoryFilter(
        keep=keep,
        discard=discard,
        ops_scoring=stage,
        buffer=buffer,
        ledger=ledger,
        data_group=None,
    )(state)
    buffer.check()
    ledger.check()
    return buffer, ledger, state, stage


@pytest.mark.parametrize(
    ("max_staleness", "expected"),
    [(3, [2, 2, 1, 0]), (2, [0, 2, 1, 0]), (1, [0, 2, 0, 0]), (0, [0, 0, 0, 0])],
)
def test_trajectories_above_the_staleness_limit_start_again(max_staleness, expected):
    """The oldest segment counts, and the limit itself is kept."""
    _, _, state, _ = run(keep_young(max_staleness))
    assert lengths(state.unfinished) == expected


@pytest.mark.parametrize(("max_ops", "expected"), [(0.39, [2, 0, 1, 0]), (0.41, [2, 2, 1, 0])])
def test_trajectories_above_the_ops_limit_start_again(max_ops, expected):
    """The mean over the trajectory counts: (0.5 + 0.3) / 2 = 0.4 for group 0 sample 1."""
    _, _, state, _ = run(keep_close(max_ops))
    assert lengths(state.unfinished) == expected


def test_a_discarded_sample_stays_in_its_group_at_the_bare_prompt():
    buffer, ledger, state, stage = run(keep_young(2))
    one = buffer.group(0)[0]
    assert one is state.unfinished[0]
    assert int(one["status"]) == Status.UNFINISHED
    assert one["policy_version"].shape == one["anchor_logprobs"].shape == (0,)
    assert one["prompt_ids"].tolist() == [7, 8]
    assert ledger.state_of(0) is PromptState.PAUSED
    assert buffer.counts.discarded == 2
    assert lengths(stage.trajectories) == [2, 1, 0]
    assert len(stage.ops) == 3


def test_a_discarded_group_is_given_up_for_good():
    buffer, ledger, state, stage = run(keep_young(2), discard="group")
    assert buffer.group_ids() == [1]
    assert ledger.counts()[PromptState.FILTERED] == 1
    assert [int(one["group_id"]) for one in state.unfinished] == [1, 1]
    assert stage.trajectories == state.unfinished
    assert len(stage.ops) == 1
    assert buffer.counts.filtered == 4  # The young sample of the group goes too.


@pytest.mark.parametrize(
    ("discard", "expected"), [("trajectory", (1.0, 0.0, 2.0)), ("group", (2.0, 1.0, 4.0))]
)
def test_metrics_by_hand(discard, expected):
    _, _, state, _ = run(keep_young(2), discard)
    found = {key: value for key, value in state.metrics.items() if key.startswith("filter/")}
    assert found == {
        "filter/trajectories_discarded": expected[0],
        "filter/groups_discarded": expected[1],
        "filter/tokens_discarded": expected[2],
    }
    assert all(is_declared(key) for key in found)


def test_an_empty_response_passes_every_filter():
    """PR15: nothing in it is old or off-policy."""
    for keep in (keep_young(0), keep_close(1e-9)):
        _, _, _, stage = run(keep)
        assert int(stage.trajectories[-1]["sample_index"]) == 1
        assert torch.equal(stage.layout.trajectory_lengths[-1:], torch.tensor([0]))
