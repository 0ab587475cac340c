"""Tokens per second, memory and the figures of the weight transfer."""

from types import SimpleNamespace

import pytest

from rollverify.hooks import StepState
from rollverify.metrics.gpu import GpuFigures
from rollverify.metrics.names import is_declared
from rollverify.metrics.throughput import Throughput, resident_gib


class Sync:
    parity_abs_max = 3e-5
    push_s = 0.25

    def __init__(self) -> None:
        self.engine = SimpleNamespace(num_preemptions=0)


class FakeCuda:
    """An allocator of torch."""

    def __init__(self) -> None:
        self.resets = 0
        self.stats = {
            "allocated_bytes.all.peak": 3 * 2**30,
            "reserved_bytes.all.peak": 4 * 2**30,
            "num_alloc_retries": 2,
        }

    def memory_stats(self) -> dict[str, int]:
        return self.stats

    def reset_peak_memory_stats(self) -> None:
        self.resets += 1


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
        "rollout/preemptions": 0.0,
    }
    assert {key: state.metrics[key] for key in expected} == expected
    assert set(state.metrics) - before - set(expected) == {"memory/rss_gib"}
    assert all(is_declared(key) for key in state.metrics)


def test_figures_of_a_gpu_are_those_of_the_step():
    """2000 tokens of 3e9 flops in 0.5 s on 2 GPUs of 1e15 flops: 0.006 of the peak."""
    cuda, sync = FakeCuda(), Sync()
    gpu = GpuFigures(flops_per_token=3 * 10**9, peak_flops=1e15, num_ranks=2, device=cuda)
    hook = Throughput(weight_sync=sync, gpu=gpu)
    seen = []
    for preemptions, retries in ((5, 2), (7, 2)):
        sync.engine.num_preemptions, cuda.stats["num_alloc_retries"] = preemptions, retries
        state = StepState(step=4, policy_version=4)
        state.metrics = {"rollout/num_tokens": 3000.0, "train/num_tokens": 2000.0}
        state.phase_s = {"rollout": 2.0, "train": 0.5}
        hook(state)
        seen.append(state.metrics)
    assert [row["rollout/preemptions"] for row in seen] == [5, 2]
    assert [row["memory/gpu_alloc_retries"] for row in seen] == [2, 0]
    assert seen[1]["memory/gpu_peak_gib"] == 3.0
    assert seen[1]["memory/gpu_reserved_peak_gib"] == 4.0
    assert seen[1]["train/mfu"] == pytest.approx(0.006)
    assert cuda.resets == 2
    assert all(is_declared(key) for key in seen[1])


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
