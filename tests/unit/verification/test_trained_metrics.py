"""Off-policy shift, engine mismatch and staleness of what is trained on, worked by hand."""

from math import exp, isfinite, log

import pytest
import torch
from support.fakes import FakeTrainer, paused, trajectory

from rollverify.metrics.names import is_declared
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import new_trajectory
from rollverify.verification.metrics import trained_metrics


def hand_case() -> tuple[list, torch.Tensor]:
    """Trained under version 4: one trajectory of versions 1 and 4, one of version 4 alone.

    Anchors of the first: -1, -2, and none for its fresh token. The policy has moved by ln 1.5 and
    ln 0.5 on the old tokens; the engine was off by 0.1 nats on token 1 and by 0.3 on the fresh one.
    """
    old = paused({1: [-1.0, -2.1], 4: [-0.5]}, sample=0)
    old["anchor_logprobs"] = torch.tensor([-1.0, -2.0, float("nan")])
    fresh = trajectory([7], [1], logprobs=[-0.7], version=4, sample=1)
    policy = torch.tensor([-1.0 + log(1.5), -2.0 + log(0.5), -0.8, -0.7])
    return [old, fresh], policy


def test_ops_of_trained_tokens_by_hand():
    finished, policy = hand_case()
    metrics = trained_metrics(finished, policy, 4, Ranks())
    # D = 1.5 - 1, 1 - 0.5, and 0 for both fresh tokens; segments 0.5, 0, 0; trajectories 1/3, 0.
    expected = {
        "ops/trained_token_mean": 0.25,
        "ops/trained_token_max": 0.5,
        "ops/trained_segment_mean": 0.5 / 3,
        "ops/trained_segment_max": 0.5,
        "ops/trained_sequence_mean": 1 / 6,
        "ops/trained_sequence_p95": 0.95 / 3,
        "ops/trained_age_0": 0.0,
        "ops/trained_age_3": 0.5,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert all(is_declared(key) and isfinite(value) for key, value in metrics.items())


def test_staleness_and_mismatch_by_hand():
    finished, policy = hand_case()
    metrics = trained_metrics(finished, policy, 4, Ranks())
    expected = {
        # Against the anchor: 0 and 0.1. Against the policy itself: 0.3 and 0.
        "mismatch/age_3": 0.05,
        "mismatch/age_0": 0.15,
        "mismatch/ops_mean": (exp(0.1) - 1 + 1 - exp(-0.3)) / 4,
        "staleness/trained_tokens_age_0_frac": 0.5,
        "staleness/trained_tokens_age_1_frac": 0.0,
        "staleness/trained_tokens_age_2_frac": 0.0,
        "staleness/trained_tokens_age_3_frac": 0.5,
        "staleness/trained_tokens_age_4_7_frac": 0.0,
        "staleness/trained_tokens_age_8_up_frac": 0.0,
        "staleness/trained_mean": 1.5,  # 4 - 1 and 4 - 4
        "staleness/trained_max": 3.0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert "mismatch/age_1" not in metrics


def test_an_old_token_without_an_anchor_is_compared_with_the_engine():
    old = paused({1: [-1.0]}, has_anchors=False)
    metrics = trained_metrics([old], torch.tensor([-1.2]), 2, Ranks())
    assert metrics["mismatch/ops_mean"] == 0.0  # Noise and staleness cannot be told apart.
    assert metrics["ops/trained_token_mean"] == pytest.approx(1 - exp(-0.2), abs=1e-6)


def test_tokens_outside_the_loss_do_not_count():
    """Older segments masked: only the fresh token is left, and the trajectory is not stale."""
    finished, policy = hand_case()
    finished[0]["loss_mask"] = torch.tensor([False, False, True])
    metrics = trained_metrics(finished, policy, 4, Ranks())
    assert metrics["ops/trained_token_max"] == 0.0
    assert metrics["staleness/trained_max"] == 0.0
    assert metrics["staleness/trained_tokens_age_0_frac"] == 1.0


def test_nothing_trained_on_gives_no_nan():
    """PR15: an empty list and an empty response."""
    empty = new_trajectory(prompt_ids=[1], group_id=0, prompt_index=0, sample_index=0)
    for finished in ([], [empty]):
        metrics = trained_metrics(finished, torch.zeros(0), 3, Ranks())
        assert metrics["staleness/trained_mean"] == 0.0
        assert all(isfinite(value) for value in metrics.values())


def test_an_on_policy_batch_has_no_shift():
    ids = [[0, 1, 2], [0, 3, 4, 5]]
    trainer = FakeTrainer()
    finished = [
        trajectory(one[:1], one[1:], logprobs=trainer.logprobs(one), version=6) for one in ids
    ]
    policy = torch.tensor([value for one in ids for value in trainer.logprobs(one)])
    metrics = trained_metrics(finished, policy, 6, Ranks())
    assert metrics["ops/trained_token_max"] == 0.0
    assert metrics["staleness/trained_tokens_age_0_frac"] == 1.0
    assert metrics["mismatch/age_0"] < 1e-6
