"""Scoring of U_k: what is compared with what, what is counted, what the filter takes out."""

from math import exp, isfinite, log

import pytest
import torch
from support.fakes import paused
from unit.verification.scored import held_in, scoring

from rollverify.errors import RolloutError
from rollverify.hooks import StepState
from rollverify.metrics.names import is_declared
from rollverify.verification.scoring import OpsScoring

UPDATED = {(0, 0): [-1.0 + log(1.5), -2.0], (0, 1): [], (1, 0): [-3.0 + log(0.9)], (1, 1): []}


def state() -> StepState:
    groups = {0: [{1: [-1.0], 2: [-2.0]}, {}], 1: [{1: [-3.0]}, {}]}
    return held_in(groups, group_size=2)[2]


def test_ops_of_each_trajectory_by_hand():
    stage, made = scoring(UPDATED), state()
    stage(made)
    assert [one.tolist() for one in stage.token_ops] == [
        pytest.approx([0.5, 0.0], abs=1e-6),
        [],
        pytest.approx([0.1], abs=1e-6),
        [],
    ]
    assert stage.trajectories == made.unfinished
    assert stage.num_checked_tokens == 3
    assert stage.num_checked_trajectories == 4


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
    ("reference", "symmetric", "expected"),
    [
        ("anchor", False, 1 - exp(-1)),
        ("anchor", True, exp(1) - 1),
        ("behavior", False, exp(0.5) - 1),
    ],
)
def test_the_reference_and_the_form_can_be_chosen(reference, symmetric, expected):
    one = paused({1: [-2.5]})
    one["anchor_logprobs"] = torch.tensor([-1.0])
    stage = scoring({(0, 0): [-2.0]}, reference=reference, symmetric=symmetric)
    stage(StepState(step=2, policy_version=2, unfinished=[one]))
    assert stage.ops.tolist() == pytest.approx([expected])


def test_without_a_scorer_tokens_are_counted_only():
    stage = OpsScoring(scorer=None, reference="anchor", symmetric=False, data_group=None)
    made = state()
    stage(made)
    assert (stage.num_checked_tokens, stage.token_ops, made.metrics) == (3, [], {})
    with pytest.raises(RolloutError, match="not scored"):
        _ = stage.ops


@pytest.mark.parametrize("unfinished", [[], [paused({}), paused({}, sample=1)]])
def test_nothing_or_only_empty_responses_give_no_nan(unfinished):
    """PR15: paused before the first token: 0 segments, no OPS, no NaN."""
    stage = scoring({})
    made = StepState(step=3, policy_version=3, unfinished=unfinished)
    stage(made)
    assert [len(one) for one in stage.token_ops] == [0] * len(unfinished)
    assert len(stage.layout.segment_ids) == 0
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
    """After a resume with the reference changed from behavior to anchor."""
    stage, plain = scoring(UPDATED), scoring(UPDATED)
    made, usual = state(), state()
    made.unfinished[0]["anchor_logprobs"].fill_(float("nan"))  # Else equal to the engine's.
    stage(made)
    plain(usual)
    assert torch.equal(stage.ops, plain.ops)


def test_dropped_trajectories_leave_list_ops_and_layout():
    stage, made = scoring(UPDATED), state()
    stage(made)
    stage.drop([0, 3])
    assert [int(one["group_id"]) for one in stage.trajectories] == [0, 1]
    assert stage.ops.tolist() == pytest.approx([0.1], abs=1e-6)
    assert stage.layout.token_owners.tolist() == [1]  # Place in the list that is left.
    assert stage.num_checked_tokens == 3
