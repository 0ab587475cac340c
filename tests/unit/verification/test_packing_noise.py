"""What packing alone does to log-probs: by hand, with a scorer that rounds by the row's length."""

import logging
import math
from typing import Any

import pytest
import torch
from support.fakes import trajectory

from rollverify.config.tables import VerificationConfig
from rollverify.hooks import StepState
from rollverify.ranks import Ranks
from rollverify.verification.packing_noise import NUM_RESPONSES, PackingNoise


class RoundingScorer:
    """Gives -0.5, and `shift` more in calls with more than one response."""

    def __init__(self, shift: float) -> None:
        self.shift = shift
        self.calls: list[int] = []

    def score(self, trajectories: list[Any]) -> torch.Tensor:
        self.calls.append(len(trajectories))
        size = sum(len(one["response_ids"]) for one in trajectories)
        return torch.full((size,), -0.5 + self.shift * (len(trajectories) > 1))


def measured(
    shift: float, *, step: int = 1, num: int = 3
) -> tuple[RoundingScorer, dict[str, float]]:
    scorer: Any = RoundingScorer(shift)
    settings = VerificationConfig(packing_noise_every=5)
    hook = PackingNoise(scorer=scorer, settings=settings, ranks=Ranks())
    state = StepState(step=step, policy_version=0)
    state.finished = [trajectory([1], [2] * (index + 1), group=index) for index in range(num)]
    hook(state)
    return scorer, state.metrics


def test_ops_between_the_two_packings(caplog) -> None:
    """Alone -0.5, together -0.5 + ln(1.25): |1 / 1.25 - 1| = 0.2 at every token."""
    with caplog.at_level(logging.WARNING):
        _, metrics = measured(math.log(1.25))
    assert metrics["mismatch/packing_ops_mean"] == pytest.approx(0.2, abs=1e-6)
    assert metrics["mismatch/packing_ops_max"] == pytest.approx(0.2, abs=1e-6)
    assert "sound segments are cut" in caplog.text


def test_equal_log_probs_give_zero_and_no_warning(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        _, metrics = measured(0.0)
    assert metrics == {"mismatch/packing_ops_mean": 0.0, "mismatch/packing_ops_max": 0.0}
    assert caplog.text == ""


def test_only_some_steps_measure() -> None:
    assert [bool(measured(0.0, step=step)[1]) for step in range(1, 8)] == [
        step in (1, 6) for step in range(1, 8)
    ]


@pytest.mark.parametrize("num", [0, 3, 20])
def test_every_rank_makes_as_many_passes(num: int) -> None:
    """Whatever it has finished: passes are collective."""
    scorer, _ = measured(0.0, num=num)
    assert len(scorer.calls) == 1 + NUM_RESPONSES
    assert scorer.calls[0] == min(num, NUM_RESPONSES) == sum(scorer.calls[1:])
