"""Tokens per second, memory and the figures of the weight transfer."""

import pytest

from rollverify.hooks import StepState
from rollverify.metrics.names import is_declared
from rollverify.metrics.throughput import Throughput, resident_gib


class Sync:
    parity_abs_max = 3e-5
    push_s = 0.25


def test_figures_of_a_step():
    state = StepState(step=4, policy_version=4)
    state.metrics = {"rollout/num_tokens": 3000.0, "train/num_tokens": 2000.0}
    state.phase_s = {"rollout": 2.0, "train": 0.5}
    before = set(state.metrics)
    assert Throughput(weight_sync=Sync())(state) is None
    expected = {
        "rollout/tokens_per_s": 1500.0,  # 3000 tokens in 2 s
        "train/tokens_per_s": 4000.0,  # 2000 tokens in 0.5 s
        "sync/parity_abs_max": 3e-5,
        "sync/push_s": 0.25,
        "progress/policy_version": 4,
    }
    assert {key: state.metrics[key] for key in expected} == expected
    assert set(state.metrics) - before - set(expected) == {"memory/rss_gib"}
    assert all(is_declared(key) for key in state.metrics)


def test_the_share_of_verification_leaves_evaluation_and_checkpoints_out():
    state = StepState(step=4, policy_version=4)
    state.metrics = {
        "rollout/num_tokens": 1.0,
        "train/num_tokens": 1.0,
        "time/hook/anchor_scoring_s": 0.1,
        "verification/scoring_s": 0.2,
        "time/hook/evaluation_s": 9.0,
    }
    state.phase_s = {"rollout": 2.1, "train": 0.4, "verify": 0.25}
    Throughput(weight_sync=Sync())(state)
    assert state.metrics["verification/scoring_s"] == pytest.approx(0.3)
    assert state.metrics["rollout/tokens_per_s"] == pytest.approx(1 / (2.1 - 0.1))
    # (0.1 + 0.25) of 2.1 + 0.4 + 0.25 + 0.25 seconds; the anchors are scored in the rollout phase.
    assert state.metrics["verification/step_frac"] == pytest.approx(0.35 / 3.0)


@pytest.mark.skipif(resident_gib() == 0, reason="the kernel does not tell resident memory")
def test_resident_memory_is_in_gib():
    # An interpreter with torch takes more than 0.05 GiB and, in a unit test, less than 16.
    assert 0.05 < resident_gib() < 16
