"""Rewards, lengths and text samples of a step's trajectories."""

from types import SimpleNamespace

import pytest
import torch
from support.fakes import trajectory

from rollverify.config.tables import MetricsConfig
from rollverify.engine.generation import GenerationStats
from rollverify.hooks import StepState
from rollverify.metrics.names import is_declared
from rollverify.metrics.rollout import RolloutMetrics
from rollverify.ranks import Ranks
from rollverify.rollout.dynamic_sampling import GivenUp
from rollverify.rollout.trajectory import Status


def hook(**changes: object) -> tuple[RolloutMetrics, list[tuple[str, str, int]]]:
    texts: list[tuple[str, str, int]] = []
    stats = GenerationStats(
        num_tokens=10,
        num_steps=5,
        num_started=3,
        num_resumed=2,
        tokens_resumed=40,
        slot_steps=15,
        capacity=20,
        num_lost=6,
    )
    settings = {
        "rollouter": SimpleNamespace(stats=stats, given_up=None),
        "decode": lambda ids: "".join(chr(97 + i) for i in ids),
        "log_text": lambda tag, text, step: texts.append((tag, text, step)),
        "metrics": MetricsConfig(text_samples=2, text_samples_every=3),
        "epoch": lambda: 7,
        "ranks": Ranks(),
    }
    return RolloutMetrics(**(settings | changes)), texts


def state(step: int = 1) -> StepState:
    """Two groups: rewards 1 and 0; rewards 0 and 0. Lengths 1, 2, 3, 4; one cut at the limit."""
    finished = [
        trajectory([0], [1], reward=1.0, group=0, sample=0),
        trajectory([0], [1, 2], reward=0.0, group=0, sample=1),
        trajectory([3], [1, 2, 3], reward=0.0, group=1, sample=0),
        trajectory([3], [1, 2, 3, 4], reward=0.0, group=1, sample=1, status=Status.LENGTH),
    ]
    made = StepState(step=step, policy_version=step - 1, finished=finished)
    made.unfinished = [trajectory([5], [1], group=2)]
    return made


EXPECTED = {
    "reward/mean": 0.25,
    "reward/accuracy": 0.25,
    "reward/std": (0.25 - 0.25**2) ** 0.5,  # mean of squares 1/4, square of the mean 1/16
    "rollout/num_finished": 4,
    "rollout/num_unfinished": 1,
    "rollout/truncated_frac": 0.25,
    "rollout/zero_signal_groups": 1,
    "rollout/num_tokens": 10,
    "rollout/engine_busy_frac": 15 / 20,
    "rollout/decode_steps": 5,
    "rollout/idle_slot_steps": 20 - 15,
    "rollout/tokens_lost_at_pause": 6,
    "rollout/num_resumed": 2,
    "rollout/tokens_resumed": 40,
    "rollout/num_started": 3,
    "rollout/response_tokens_mean": 2.5,
    "rollout/response_tokens_p50": 2.5,
    "rollout/response_tokens_p95": 3.85,  # rank 0.95 * 3 = 2.85, between 3 and 4
    "rollout/response_tokens_max": 4,
    "progress/epoch": 7,
}


def test_metrics_by_hand():
    made = state()
    stage, _ = hook()
    assert stage(made) is None
    assert made.metrics == pytest.approx(EXPECTED)
    assert all(is_declared(key) for key in made.metrics)


def test_the_trajectories_are_left_as_they_are():
    made = state()
    before = [{key: one[key].clone() for key in one.keys()} for one in made.finished]  # noqa: SIM118
    hook()[0](made)
    assert len(made.finished) == 4 and len(made.unfinished) == 1
    for one, values in zip(made.finished, before, strict=True):
        for key, value in values.items():  # NaN marks an anchor not scored yet.
            torch.testing.assert_close(one[key], value, rtol=0, atol=0, equal_nan=True)


def test_accuracy_counts_right_answers_and_mean_counts_their_size():
    made = state()
    made.finished[0]["reward"] += 2.0  # 3, 0, 0, 0
    hook()[0](made)
    assert made.metrics["reward/accuracy"] == 0.25
    assert made.metrics["reward/mean"] == 0.75


def test_groups_given_up_count_in_the_mean_over_all_that_were_drawn():
    """Rewards 1 0 | 0 0 are trained on, 1 1 | 1 1 | 1 1 given up: 7 of 10; signal 1 of 5."""
    made = state()
    given_up = GivenUp(num_groups=3, num_trajectories=6, reward=6.0)
    rollouter = SimpleNamespace(stats=GenerationStats(), given_up=given_up)
    hook(rollouter=rollouter)[0](made)
    assert made.metrics["reward/mean"] == 0.25
    assert made.metrics["reward/mean_drawn"] == pytest.approx(0.7)
    assert made.metrics["rollout/groups_given_up"] == 3
    assert made.metrics["rollout/signal_frac"] == pytest.approx(1 / 5)
    assert all(is_declared(key) for key in made.metrics)


def test_text_samples_hold_prompt_response_and_reward():
    stage, texts = hook()
    stage(state())
    # Ids 0, 1, 2 are a, b, c: the first two trajectories, each prompt with its response.
    assert texts == [("samples/responses", "reward 1\nab\n\nreward 0\nabc", 1)]


def test_text_samples_come_every_so_many_steps():
    stage, texts = hook()
    for step in range(1, 8):
        stage(state(step))
    assert [step for _, _, step in texts] == [1, 4, 7]


def test_text_samples_can_be_off():
    stage, texts = hook(metrics=MetricsConfig(text_samples=0))
    stage(state())
    assert texts == []


@pytest.mark.parametrize(
    ("step", "num_cut", "is_said"), [(1, 4, True), (3, 4, True), (4, 4, False), (1, 3, False)]
)
def test_responses_that_all_reach_the_limit_are_said_at_first(caplog, step, num_cut, is_said):
    made = state(step)
    for index, one in enumerate(made.finished):
        status = Status.LENGTH if index < num_cut else Status.STOP
        one["status"] = torch.tensor(int(status), dtype=one["status"].dtype)
    with caplog.at_level("WARNING"):
        hook()[0](made)
    assert ("rollout.stop_token_ids" in caplog.text) is is_said


def test_a_rank_without_trajectories_gives_no_nan():
    """PR15: nothing is not a mean of nothing."""
    made = StepState(step=1, policy_version=0)
    hook()[0](made)
    assert made.metrics["reward/mean"] == 0.0
    assert all(value == value for value in made.metrics.values())


def test_gradings_without_a_verdict_are_counted_apart():
    """CASES RW01: an internal error of the grading is not a wrong answer."""
    counts = {"error": 2, "timeout": 1, "gold_unreadable": 3}
    rollout_metrics, _ = hook(grading_counts=lambda: counts)
    made = state()
    rollout_metrics(made)
    assert made.metrics["reward/grading_errors"] == 2 and made.metrics["reward/timeouts"] == 1
    assert made.metrics["reward/gold_unreadable"] == 3
    assert all(map(is_declared, made.metrics))


def test_a_reward_that_always_has_a_verdict_adds_no_counts():
    made = state()
    hook()[0](made)
    assert "reward/timeouts" not in made.metrics
