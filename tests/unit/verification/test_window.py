"""Acceptance rate, and when its average ends partial rollouts."""

import json
import math

import pytest

from rollverify.config.tables import SwitchingConfig
from rollverify.errors import CheckpointError
from rollverify.verification.window import AcceptanceWindow, acceptance_rate

FALLING = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


def window_of(size=8, threshold=0.5, average="window", reversible=False):
    return AcceptanceWindow(
        SwitchingConfig(window=size, threshold=threshold, average=average, reversible=reversible)
    )


def decisions(window, rates):
    return [window.update(rate) for rate in rates]


@pytest.mark.parametrize(
    ("accepted", "checked", "rate"), [(4, 9, 4 / 9), (0, 5, 0.0), (5, 5, 1.0), (0, 0, 1.0)]
)
def test_acceptance_rate(accepted, checked, rate):
    assert acceptance_rate(accepted, checked) == rate


def test_worked_example_switches_at_step_9():
    window = window_of()
    assert decisions(window, FALLING[:8]) == [False] * 8
    assert window.average_rate == pytest.approx(0.55)
    assert window.update(FALLING[8]) is True
    assert window.average_rate == pytest.approx(0.45)


def test_nothing_is_decided_before_the_window_is_full():
    window = window_of(size=3)
    assert decisions(window, [0.0, 0.0]) == [False, False]
    assert not window.is_full and window.average_rate == 0.0
    assert window.update(0.0) is True and window.is_full


def test_an_average_at_the_threshold_stays():
    assert decisions(window_of(size=2), [0.1, 0.9, 0.0]) == [False, False, True]


def test_the_switch_is_one_way_by_default():
    window = window_of(size=2)
    assert decisions(window, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]) == [False] + [True] * 5
    assert window.is_on_policy


def test_a_reversible_switch_lasts_a_full_window_each_way():
    window = window_of(size=2, reversible=True)
    rates = [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.2]
    #  switch after 2, back after 2 more; the average 0.5 stays, (1.0 + 0.2) / 2 = 0.6 stays.
    assert decisions(window, rates) == [False, True, True, False, False, False, False]
    assert decisions(window, [0.2]) == [True]


def test_ema_starts_with_the_first_rate_and_waits_as_long():
    # size 3: weight 0.5. 0.8, 0.6, 0.5, 0.25.
    window = window_of(size=3, average="ema")
    assert decisions(window, [0.8, 0.4, 0.4]) == [False, False, False]
    assert window.average_rate == pytest.approx(0.5)
    assert window.update(0.0) is True
    assert window.average_rate == pytest.approx(0.25)


def test_an_empty_window_has_no_average():
    assert window_of().average_rate is None and window_of(average="ema").average_rate is None


@pytest.mark.parametrize("average", ["window", "ema"])
@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("num_before", range(10))
def test_a_window_goes_on_from_its_state(average, reversible, num_before):
    rates = [*FALLING, 1.0, 0.9, 0.0, 0.0]
    whole = window_of(3, 0.5, average, reversible)
    first = window_of(3, 0.5, average, reversible)
    second = window_of(3, 0.5, average, reversible)
    expected = decisions(whole, rates)
    before = decisions(first, rates[:num_before])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + decisions(second, rates[num_before:]) == expected
    assert second.state_dict() == whole.state_dict()


def test_a_smaller_window_keeps_the_latest_rates():
    window, smaller = window_of(size=4), window_of(size=2)
    decisions(window, [0.1, 0.2, 0.6, 0.8])
    smaller.load_state_dict(window.state_dict())
    assert smaller.average_rate == pytest.approx(0.7)


@pytest.mark.parametrize(
    "change",
    [
        {"rates": None},
        {"rates": [2.0]},
        {"rates": [math.nan]},
        {"rates": []},
        {"ema": "0.5"},
        {"ema": None},
        {"is_on_policy": 1},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change):
    state = {"rates": [0.5], "ema": 0.5, "is_on_policy": True}
    window = window_of()
    with pytest.raises(CheckpointError, match="acceptance window is damaged"):
        window.load_state_dict(state | change)
    assert window.state_dict() == window_of().state_dict()
