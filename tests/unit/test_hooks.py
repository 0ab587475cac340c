"""The hook registry: order, unique names, unknown points, error notes, timing."""

import logging

import pytest

from rollverify.hooks import HookPoint, HookRegistry, StepState
from rollverify.metrics.names import is_declared


@pytest.fixture
def state() -> StepState:
    return StepState(step=12, policy_version=11)


def do_nothing(state: StepState) -> None:
    del state


def test_hooks_run_in_order_of_registration_and_only_at_their_point(state):
    hooks, events = HookRegistry(), []
    hooks.register(HookPoint.AFTER_WEIGHT_SYNC, "evaluation", lambda _: events.append("eval"))
    hooks.register(HookPoint.BEFORE_WEIGHT_SYNC, "zebra", lambda _: events.append("zebra"))
    hooks.register(HookPoint.BEFORE_WEIGHT_SYNC, "ant", lambda _: events.append("ant"))
    hooks.run(HookPoint.BEFORE_WEIGHT_SYNC, state)
    assert events == ["zebra", "ant"]
    assert hooks.names(HookPoint.BEFORE_WEIGHT_SYNC) == ["zebra", "ant"]
    assert hooks.names(HookPoint.AFTER_TRAIN) == []


def test_a_hook_gets_the_state_of_the_iteration(state):
    hooks = HookRegistry()
    hooks.register(HookPoint.AFTER_TRAIN, "count", lambda state: state.metrics.update(seen=1.0))
    hooks.run(HookPoint.AFTER_TRAIN, state)
    assert state.metrics["seen"] == 1.0


@pytest.mark.parametrize("point", [HookPoint.AFTER_TRAIN, HookPoint.AFTER_ROLLOUT])
def test_a_name_is_unique_over_all_points(point):
    hooks = HookRegistry()
    hooks.register(HookPoint.AFTER_TRAIN, "verification", do_nothing)
    with pytest.raises(ValueError, match="'verification' is already registered at after_train"):
        hooks.register(point, "verification", do_nothing)


def test_an_error_propagates_with_a_note_and_stops_later_hooks(state):
    hooks, events = HookRegistry(), []

    def fail(state: StepState) -> None:
        raise KeyError("cause")

    hooks.register(HookPoint.BEFORE_WEIGHT_SYNC, "verification", fail)
    hooks.register(HookPoint.BEFORE_WEIGHT_SYNC, "later", lambda _: events.append("later"))
    with pytest.raises(KeyError, match="cause") as caught:
        hooks.run(HookPoint.BEFORE_WEIGHT_SYNC, state)
    note = "raised by hook 'verification' at before_weight_sync, step 12"
    assert caught.value.__notes__ == [note]
    assert events == []


def test_each_hook_is_timed_under_a_declared_key(state):
    hooks = HookRegistry()
    hooks.register(HookPoint.AFTER_TRAIN, "spin", lambda _: sum(range(200_000)))
    hooks.register(HookPoint.AFTER_TRAIN, "idle", do_nothing)
    hooks.run(HookPoint.AFTER_TRAIN, state)
    assert list(state.metrics) == ["time/hook/spin_s", "time/hook/idle_s"]
    assert all(is_declared(key) for key in state.metrics)
    # 200,000 additions take milliseconds, an empty call well under a microsecond.
    assert state.metrics["time/hook/spin_s"] > 10 * state.metrics["time/hook/idle_s"] >= 0.0


def test_the_points_are_the_four_phase_boundaries():
    assert list(HookPoint) == [
        "after_rollout",
        "after_train",
        "before_weight_sync",
        "after_weight_sync",
    ]


def test_the_order_is_logged(caplog):
    hooks = HookRegistry()
    hooks.register(HookPoint.AFTER_WEIGHT_SYNC, "evaluation", do_nothing)
    hooks.register(HookPoint.AFTER_WEIGHT_SYNC, "throughput", do_nothing)
    with caplog.at_level(logging.INFO, logger="rollverify"):
        hooks.log_order()
    assert caplog.messages == ["hooks at after_weight_sync: evaluation, throughput"]


def test_two_states_do_not_share_their_containers(state):
    other = StepState(step=13, policy_version=12)
    for name in ("finished", "unfinished", "metrics", "phase_s"):
        assert getattr(state, name) is not getattr(other, name)


def test_a_state_has_no_room_for_undeclared_fields(state):
    with pytest.raises(AttributeError):
        state.note = "x"
