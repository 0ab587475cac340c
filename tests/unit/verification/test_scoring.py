"""Scoring of U_k: what is compared with what, what is counted, what the filter takes out."""

from math import exp, isfinite, log

import pytest
import torch
from support.fakes import paused
from unit.verification.scored import held_in, ops_of, scoring

from rollverify.errors import RolloutError
from rollverify.hooks import StepState
from rollverify.metrics.names import is_declared
from rollverify.ranks import Ranks
from rollverify.verification.ops import segment_ops
from rollverify.verification.scoring import OpsScoring

UPDATED = {(0, 0): [-1.0 + log(1.5), -2.0], (0, 1): [], (1, 0): [-3.0 + log(0.9)], (1, 1): []}


def state() -> StepState:
    groups = {0: [{1: [-1.0], 2: [-2.0]}, {}], 1: [{1: [-3.0]}, {}]}
    return held_in(groups, group_size=2)[2]


def test_ops_of_each_trajectory_by_hand():
    made = state()
    scored = scoring(UPDATED)(made)
    assert ops_of(scored) == [
        pytest.approx([0.5, 0.0], abs=1e-6),
        [],
        pytest.approx([0.1], abs=1e-6),
        [],
    ]
    assert scored.trajectories == made.unfinished
    assert scored.layout.num_tokens == 3


def test_metrics_by_hand():
    made = state()
    scoring(UPDATED)(made)
    expected = {
        "ops/unfinished_token_mean": 0.2,  # (0.5 + 0 + 0.1) / 3
        "ops/unfinished_token_p95": 0.46,  # rank 0.95 * 2 of 0, 0.1, 0.5: 0.1 + 0.9 * 0.4
        "ops/unfinished_token_max": 0.5,
        "ops/unfinished_segment_mean": 0.2,
        "ops/unfinished_segment_p95": 0.46,
        "ops/unfinished_segment_max": 0.5,
        "ops/unfinished_sequence_mean": 0.175,  # 0.25 and 0.1; empty ones have none
        "ops/unfinished_sequence_p95": 0.2425,
        "ops/unfinished_sequence_max": 0.25,
        "ops/unfinished_age_1": 0.0,  # version 2 against 3
        "ops/unfinished_age_2": 0.3,
    }
    assert made.metrics == pytest.approx(expected, abs=1e-6)
    assert all(is_declared(key) for key in made.metrics)


@pytest.mark.parametrize(
    ("against", "symmetric", "expected"),
    [
        ("anchor", False, 1 - exp(-1)),
        ("anchor", True, exp(1) - 1),
        ("behavior", False, exp(0.5) - 1),
    ],
)
def test_the_log_probs_and_the_form_can_be_chosen(against, symmetric, expected):
    one = paused({1: [-2.5]})
    one["anchor_logprobs"] = torch.tensor([-1.0])
    score = scoring({(0, 0): [-2.0]}, against=against, symmetric=symmetric)
    scored = score(StepState(step=2, policy_version=2, unfinished=[one]))
    assert scored.ops.tolist() == pytest.approx([expected])


def test_without_a_scorer_tokens_are_counted_only():
    made = state()
    score = OpsScoring(scorer=None, against="anchor", symmetric=False, ranks=Ranks())
    scored = score(made)
    assert (scored.layout.num_tokens, made.metrics) == (3, {})
    with pytest.raises(ValueError, match="OPS of trajectory 0, response token 0 is nan"):
        segment_ops(scored.ops, scored.layout)


@pytest.mark.parametrize("unfinished", [[], [paused({}), paused({}, sample=1)]])
def test_nothing_or_only_empty_responses_give_no_nan(unfinished):
    """PR15: paused before the first token: 0 segments, no OPS, no NaN."""
    made = StepState(step=3, policy_version=3, unfinished=unfinished)
    scored = scoring({})(made)
    assert ops_of(scored) == [[]] * len(unfinished)
    assert len(scored.layout.segment_starts) == 0
    assert all(isfinite(value) for value in made.metrics.values())


def test_a_log_prob_that_is_not_finite_names_the_trajectory():
    with pytest.raises(
        RolloutError, match="group 1 sample 0: updated_logprobs of response token 0"
    ):
        scoring(UPDATED | {(1, 0): [float("-inf")]})(state())
    made = state()
    made.unfinished[0]["anchor_logprobs"] = torch.tensor([-1.0, float("inf")])
    with pytest.raises(RolloutError, match="group 0 sample 0: anchor_logprobs of response token 1"):
        scoring(UPDATED)(made)


def test_a_token_without_an_anchor_is_compared_with_the_engine():
    """After a resume with `against` changed from behavior to anchor."""
    made, usual = state(), state()
    made.unfinished[0]["anchor_logprobs"].fill_(float("nan"))  # Else equal to the engine's.
    assert torch.equal(scoring(UPDATED)(made).ops, scoring(UPDATED)(usual).ops)


def test_dropped_trajectories_leave_list_ops_and_layout():
    scored = scoring(UPDATED)(state()).only(torch.tensor([False, True, True, False]))
    assert [int(one["group_id"]) for one in scored.trajectories] == [0, 1]
    assert scored.ops.tolist() == pytest.approx([0.1], abs=1e-6)
    assert scored.layout.token_owners.tolist() == [1]  # Place in the list that is left.
