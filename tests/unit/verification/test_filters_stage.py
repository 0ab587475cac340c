"""Filters: which trajectories of U_k they give up, and what becomes of those and their groups."""

from math import log

import pytest
import torch
from unit.verification.scored import held_in, lengths, scoring, verification

from rollverify.config.tables import FilterConfig
from rollverify.metrics.names import is_declared
from rollverify.ranks import Ranks
from rollverify.rollout.ledger import PromptState
from rollverify.rollout.trajectory import Status
from rollverify.verification.filters import TrajectoryFilter

GROUPS = {
    0: [{0: [-1.0], 2: [-1.0]}, {2: [-1.0, -1.0]}],  # 3 steps and 1 step old
    1: [{1: [-1.0]}, {}],  # 2 steps old; not begun
}
UPDATED = {(0, 0): [-1.0, -1.0], (0, 1): [-1.0 + log(1.5), -1.0 + log(1.3)], (1, 0): [-1.0]}


def run(**settings):
    """(buffer, ledger, state, what is left) after the filter at version 3."""
    buffer, ledger, state = held_in(GROUPS, group_size=2)
    scored = scoring(UPDATED)(state)
    filtered = FilterConfig(**settings)
    kept = TrajectoryFilter(settings=filtered, buffer=buffer, ledger=ledger, ranks=Ranks())(
        scored, state
    )
    buffer.check()
    ledger.check()
    return buffer, ledger, state, kept


def young(max_staleness: int) -> dict[str, object]:
    return {"name": "staleness", "max_staleness": max_staleness}


@pytest.mark.parametrize(
    ("max_staleness", "expected"),
    [(3, [2, 2, 1, 0]), (2, [0, 2, 1, 0]), (1, [0, 2, 0, 0])],
)
def test_trajectories_above_the_staleness_limit_start_again(max_staleness, expected):
    """The oldest segment counts, and the limit itself is kept."""
    _, _, state, _ = run(**young(max_staleness))
    assert lengths(state.unfinished) == expected


@pytest.mark.parametrize(("max_ops", "expected"), [(0.39, [2, 0, 1, 0]), (0.41, [2, 2, 1, 0])])
def test_trajectories_above_the_ops_limit_start_again(max_ops, expected):
    """The mean over the trajectory counts: (0.5 + 0.3) / 2 = 0.4 for group 0 sample 1."""
    _, _, state, _ = run(name="ops", max_ops=max_ops)
    assert lengths(state.unfinished) == expected


def test_a_discarded_sample_stays_in_its_group_at_the_bare_prompt():
    buffer, ledger, state, kept = run(**young(2))
    one = buffer.group(0)[0]
    assert one is state.unfinished[0]
    assert int(one["status"]) == Status.UNFINISHED
    assert one["policy_version"].shape == one["anchor_logprobs"].shape == (0,)
    assert one["prompt_ids"].tolist() == [7, 8]
    assert ledger.state_of(0) is PromptState.PAUSED
    assert buffer.counts.discarded == 2
    assert lengths(kept.trajectories) == [2, 1, 0]
    assert len(kept.ops) == 3


def test_a_discarded_group_is_given_up_for_good():
    buffer, ledger, state, kept = run(**young(2), discard="group")
    assert buffer.group_ids() == [1]
    assert ledger.counts()[PromptState.FILTERED] == 1
    assert [int(one["group_id"]) for one in state.unfinished] == [1, 1]
    assert kept.trajectories == state.unfinished
    assert len(kept.ops) == 1
    assert buffer.counts.filtered == 4  # The young sample of the group goes too.


@pytest.mark.parametrize(
    ("discard", "expected"), [("trajectory", (1.0, 0.0, 2.0)), ("group", (2.0, 1.0, 4.0))]
)
def test_metrics_by_hand(discard, expected):
    _, _, state, _ = run(**young(2), discard=discard)
    found = {key: value for key, value in state.metrics.items() if key.startswith("filter/")}
    assert found == {
        "filter/trajectories_discarded": expected[0],
        "filter/groups_discarded": expected[1],
        "filter/tokens_discarded": expected[2],
    }
    assert all(is_declared(key) for key in found)


def test_an_empty_response_passes_every_filter():
    """PR15: nothing in it is old or off-policy."""
    for settings in (young(1), {"name": "ops", "max_ops": 1e-9}):
        _, _, _, kept = run(**settings)
        assert int(kept.trajectories[-1]["sample_index"]) == 1
        assert torch.equal(kept.layout.trajectory_lengths[-1:], torch.tensor([0]))


@pytest.mark.parametrize(("limit", "rate"), [(3, 1.0), (2, 3 / 5), (1, 2 / 5)])
def test_what_is_discarded_lowers_the_acceptance_rate(limit, rate):
    """5 tokens: 2 and 2 of group 0, 1 of group 1; nothing is cut, so there is no other metric."""
    buffer, ledger, state = held_in(GROUPS, group_size=2)
    verification(scoring(UPDATED), buffer, ledger, filtered=FilterConfig(**young(limit)))(state)
    assert state.acceptance_rate == pytest.approx(rate)
    assert {key for key in state.metrics if key.startswith("verification/")} == {
        "verification/scoring_s"
    }
    assert [int(one["verified_version"]) for one in state.unfinished] == [-1] * 4
