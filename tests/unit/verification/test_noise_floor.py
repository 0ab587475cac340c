"""The warning that d_s is finer than what engine and trainer agree on."""

import logging
from math import inf

import pytest

from rollverify.config.tables import VerificationConfig
from rollverify.hooks import StepState
from rollverify.verification.metrics import NoiseFloor


def warnings(caplog, noises: list[float], threshold: float, against="behavior") -> list[str]:
    """Messages of a run whose steps have these noises."""
    settings = VerificationConfig(segment_threshold=threshold, against=against)
    hook = NoiseFloor(settings=settings)
    with caplog.at_level(logging.WARNING, logger="rollverify"):
        for number, noise in enumerate(noises, start=1):
            metrics = {"mismatch/ops_mean": noise}
            hook(StepState(step=number, policy_version=number, metrics=metrics))
    return [record.getMessage() for record in caplog.records]


def test_a_threshold_below_the_noise_is_named_once(caplog):
    [message] = warnings(caplog, [0.009, 0.031, 0.04], 0.01)
    assert message.startswith("step 2: engine and trainer differ by an OPS of 0.031")
    assert "segment_threshold = 0.01" in message


def test_a_threshold_at_the_noise_is_too_low(caplog):
    assert len(warnings(caplog, [0.01], 0.01)) == 1


@pytest.mark.parametrize("threshold", [0.02, inf])
def test_a_threshold_above_the_noise_is_fine(caplog, threshold):
    assert warnings(caplog, [0.01, 0.019], threshold) == []


@pytest.mark.parametrize(("against", "advice"), [("behavior", "cut for"), ("anchor", "fresh")])
def test_the_message_says_what_the_noise_does(caplog, against, advice):
    [message] = warnings(caplog, [0.03], 0.01, against)
    assert advice in message
