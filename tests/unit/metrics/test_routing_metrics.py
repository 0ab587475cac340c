"""Routing metrics: shares over all tokens, the fullest expert, and the gap without replay."""

from types import SimpleNamespace

import pytest
import torch
from support.fakes import ScoringTrainer, trajectory

from rollverify.engine.generation import GenerationStats
from rollverify.hooks import StepState
from rollverify.metrics.routing import NativeMismatch, RoutingMetrics
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import ROUTING
from rollverify.training.scoring import TrajectoryScorer

STATS = SimpleNamespace(
    layers=(0, 2),
    num_tokens=10,
    changed_L=torch.tensor([1, 3]),
    load_LE=torch.tensor([[5, 5, 5, 5], [8, 4, 4, 4]]),
)


def metrics(stats: object, finished: list, resumed: GenerationStats | None = None) -> dict:
    hook = RoutingMetrics(
        trainer=SimpleNamespace(take_routing_stats=lambda: stats),
        rollouter=SimpleNamespace(stats=resumed or GenerationStats()),
        ranks=Ranks(),
        data_ranks=Ranks(),
    )
    state = StepState(step=1, policy_version=0, finished=finished)
    hook(state)
    return state.metrics


def test_changed_tokens_are_shares_per_layer_and_in_the_mean():
    """1 and 3 of 10 tokens: .1 and .3, mean .2; layer 1 is dense and has none."""
    found = metrics(STATS, [])
    assert found["routing/changed_layer_0_frac"] == pytest.approx(0.1)
    assert found["routing/changed_layer_2_frac"] == pytest.approx(0.3)
    assert found["routing/changed_frac"] == pytest.approx(0.2)
    assert "routing/changed_layer_1_frac" not in found


def test_load_is_the_fullest_expert_over_the_mean():
    """5 of 20 over 4 experts is even: 1. 8 of 20: 8 * 4 / 20 = 1.6, the worse layer."""
    found = metrics(STATS, [])
    assert found["routing/load_layer_0_max"] == pytest.approx(1.0)
    assert found["routing/load_max"] == pytest.approx(1.6)


def test_bytes_are_layers_times_experts_times_the_size_of_an_id():
    """3 layers, 2 experts of one byte: 6 bytes per token."""
    one = trajectory([1], [2, 3])
    one[ROUTING] = torch.zeros(2, 3, 2, dtype=torch.uint8)
    found = metrics(None, [one, trajectory([1], [2])])
    assert found == {"routing/bytes_per_token": 6.0, "routing/reprefill_changed_frac": 0.0}


def test_resumed_contexts_report_how_much_of_their_routing_changed():
    found = metrics(None, [], GenerationStats(num_held_rows=8, num_changed_rows=2))
    assert found["routing/reprefill_changed_frac"] == 0.25


@pytest.mark.parametrize(("step", "is_measured"), [(1, True), (2, False), (3, False), (4, True)])
def test_the_gap_without_replay_is_measured_now_and_then(step, is_measured):
    trainer = ScoringTrainer()
    scorer = TrajectoryScorer(
        trainer=trainer, micro_batch_tokens=64, temperature=1.0, ranks=Ranks()
    )
    ids, own = [0, 1, 2], trainer.logprobs([0, 1, 2])
    new = trajectory(ids[:1], ids[1:], logprobs=[own[0] + 0.1, own[1] - 0.3], version=5)
    older = trajectory(ids[:1], ids[1:], logprobs=[-9.0, -9.0], version=4)
    state = StepState(step=step, policy_version=5, finished=[older, new])
    NativeMismatch(scorer=scorer, every_steps=3, ranks=Ranks())(state)
    expected = {"mismatch/native_abs_mean": 0.2, "mismatch/native_abs_max": 0.3}
    assert state.metrics == pytest.approx(expected if is_measured else {}, abs=1e-6)
