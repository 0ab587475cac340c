"""The switch to on-policy rollouts: when it comes, what it does, whether there is a way back."""

import logging

import pytest
from support.fakes import paused

from rollverify.config.tables import SwitchingConfig
from rollverify.hooks import StepState
from rollverify.metrics.names import is_declared
from rollverify.verification.switching import Switching
from rollverify.verification.window import AcceptanceWindow, acceptance_rate


class FakeRollouter:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.modes: list[bool] = []

    def set_on_policy(self, is_on_policy: bool) -> None:
        self.modes.append(is_on_policy)


class Steps:
    """Runs the hook step by step on a U_k of 10 tokens, of which some are left."""

    def __init__(self, *, reversible: bool = False, size: int = 8) -> None:
        self.rollouter = FakeRollouter()
        self.window = AcceptanceWindow(
            SwitchingConfig(window=size, threshold=0.5, reversible=reversible)
        )
        self.hook = Switching(window=self.window, rollouter=self.rollouter)
        self.step = 0

    def run(self, num_left: int, num_checked: int = 10) -> StepState:
        self.step += 1
        unfinished = [paused({0: [-1.0] * num_left}), paused({}, sample=1)]
        state = StepState(step=self.step, policy_version=self.step, unfinished=unfinished)
        state.acceptance_rate = acceptance_rate(num_left, num_checked)
        self.hook(state)
        return state


def test_the_switch_comes_when_the_mean_of_8_steps_is_below_one_half():
    """Rates 0.9, 0.8, ..., 0.1: mean of the first 8 is 0.55, of steps 2 to 9 is 0.45."""
    steps = Steps()
    states = [steps.run(left) for left in (9, 8, 7, 6, 5, 4, 3, 2, 1)]
    switched = [state.metrics["switching/is_on_policy"] for state in states]
    assert switched == [0.0] * 8 + [1.0]
    assert states[7].metrics["switching/average_rate"] == pytest.approx(0.55)
    assert states[8].metrics["switching/average_rate"] == pytest.approx(0.45)
    assert states[8].metrics["switching/acceptance_rate"] == pytest.approx(0.1)
    assert all(is_declared(key) for key in states[8].metrics)


def test_what_is_unfinished_is_given_up_at_the_switch_only():
    steps = Steps(size=2)
    states = [steps.run(1) for _ in range(2)]
    assert [len(state.unfinished) for state in states] == [2, 0]
    assert steps.rollouter.modes == [True]


def test_no_decision_before_the_window_is_full():
    steps = Steps()
    for _ in range(7):
        assert steps.run(0).metrics["switching/is_on_policy"] == 0.0
    assert steps.rollouter.modes == []


def test_the_switch_is_for_good():
    steps = Steps(size=2)
    states = [steps.run(left) for left in (1, 1, 10, 10, 10, 10)]
    assert [state.metrics["switching/is_on_policy"] for state in states[1:]] == [1.0] * 5
    assert steps.rollouter.modes == [True]
    assert "switching/acceptance_rate" not in states[2].metrics
    assert states[-1].metrics["switching/average_rate"] == pytest.approx(0.1)


def test_a_reversible_switch_comes_back_after_as_many_steps():
    steps = Steps(reversible=True, size=3)
    for left in (1, 1, 1):
        steps.run(left)
    modes = [steps.run(0, num_checked=0).metrics["switching/is_on_policy"] for _ in range(4)]
    assert modes == [1.0, 1.0, 0.0, 0.0]
    assert steps.rollouter.modes == [True, False]


def test_nothing_checked_counts_as_nothing_lost():
    """PR15: U_k of empty responses: no 0 / 0."""
    state = Steps().run(0, num_checked=0)
    assert state.metrics["switching/acceptance_rate"] == 1.0


def test_a_switch_is_logged_once(caplog):
    steps = Steps(size=1)
    with caplog.at_level(logging.INFO, logger="rollverify"):
        steps.run(1)
        steps.run(1)
    (message,) = caplog.messages
    assert message.startswith("step 1: rollouts are on-policy from now on")
    assert "0.100" in message


def test_a_resumed_run_goes_on_with_its_window():
    steps, resumed = Steps(size=2), Steps(size=2)
    steps.run(1)
    resumed.window.load_state_dict(steps.window.state_dict())
    assert resumed.run(1).metrics["switching/is_on_policy"] == 1.0
