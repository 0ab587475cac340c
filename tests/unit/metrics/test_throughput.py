"""Tokens per second, memory and the figures of the weight transfer."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from rollverify.hooks import StepState
from rollverify.metrics.gpu import GpuFigures
from rollverify.metrics.names import is_declared
from rollverify.metrics.throughput import Throughput, resident_gib

GIB = 2**30


def trajectory(num_response: int) -> TensorDict:
    """One prompt token, which is fed with all of the response but its last."""
    ids = torch.zeros(num_response, dtype=torch.int64)
    return TensorDict({"prompt_ids": ids[:1], "response_ids": ids}, batch_size=[])


class Sync:
    parity_abs_max = 3e-5
    push_s = 0.25

    def __init__(self) -> None:
        self.engine = SimpleNamespace(num_preemptions=0)


class FakeCuda:
    """A GPU of 80 GiB: torch's counters, a sleeping engine's part of them, 2 GiB of libraries."""

    def __init__(self) -> None:
        self.current = self.peak = self.asleep = self.retries = 0

    def use(self, peak: int, then: int) -> None:
        """Allocate up to `peak` GiB in all, then keep so many."""
        self.peak, self.current = max(self.peak, peak), then

    def memory_stats(self) -> dict[str, int]:
        gib = {"current": self.current, "peak": self.peak}
        stats = {f"allocated_bytes.all.{key}": size * GIB for key, size in gib.items()}
        kept = {f"reserved_bytes.all.{key}": (size + 1) * GIB for key, size in gib.items()}
        return stats | kept | {"num_alloc_retries": self.retries}

    def mem_get_info(self) -> tuple[int, int]:
        used = self.current + 1 - self.asleep + 2
        return (80 - used) * GIB, 80 * GIB

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.current


def gpu_figures(cuda: FakeCuda, num_ranks: int = 1) -> GpuFigures:
    return GpuFigures(flops=(10**9, 10**6), peak_flops=1e15, num_ranks=num_ranks, device=cuda)


def step_of(*lengths: int) -> StepState:
    """A step that trained on sequences of so many tokens, in half a second."""
    state = StepState(step=4, policy_version=4)
    state.metrics = {"rollout/num_tokens": 3000.0, "train/num_tokens": 2000.0}
    state.phase_s = {"rollout": 2.0, "train": 0.5}
    state.finished = [trajectory(num_response=length) for length in lengths]
    return state


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


def test_a_sleeping_engine_takes_no_memory():
    """70 GiB in the rollout; 50 of them sleep while training takes torch's count to 110."""
    cuda = FakeCuda()
    gpu = gpu_figures(cuda)
    cuda.use(70, then=65)
    gpu.sample()
    cuda.asleep = 50
    cuda.use(110, then=66)
    gpu.sample()
    cuda.asleep = 0
    cuda.use(67, then=66)
    # With 2 GiB of libraries; in training 110 - 50 + 2 = 62.
    assert gpu.take() == {
        "memory/gpu_peak_gib": 72.0,
        "memory/gpu_reserved_peak_gib": 73.0,
        "memory/gpu_alloc_retries": 0.0,
    }
    cuda.use(68, then=66)
    assert gpu.take()["memory/gpu_peak_gib"] == 70.0


def test_figures_of_a_gpu_are_those_of_the_step():
    cuda, sync = FakeCuda(), Sync()
    hook, seen = Throughput(weight_sync=sync, gpu=gpu_figures(cuda)), []
    for preemptions, retries in ((5, 2), (7, 2)):
        sync.engine.num_preemptions, cuda.retries = preemptions, retries
        state = step_of(10)
        hook(state)
        seen.append(state.metrics)
    assert [row["rollout/preemptions"] for row in seen] == [5, 2]
    assert [row["memory/gpu_alloc_retries"] for row in seen] == [2, 0]
    assert all(is_declared(key) for key in seen[1])


def test_work_grows_with_the_square_of_a_sequence():
    """100 and 300 tokens: 400 * 1e9 + (1e4 + 9e4) * 1e6 flops = 5e11, on two GPUs 1e15 flops."""
    state = step_of(100, 300)
    # Both ranks divide these sequences between them, and one rank is asked here.
    hook = Throughput(weight_sync=Sync(), gpu=gpu_figures(FakeCuda(), 2), num_twins=2)
    hook(state)
    assert state.metrics["train/mfu"] == pytest.approx(5e11 / 2 / 1e15)


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
