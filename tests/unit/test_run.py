"""What a run begins in, and what of a checkpoint it may resume."""

from typing import Any

import pytest

from rollverify.config.tables import (
    Config,
    MethodConfig,
    RoutingReplayConfig,
    VerificationConfig,
)
from rollverify.run import drop_what_may_not_resume
from rollverify.verification.window import AcceptanceWindow


class FakeRollouter:
    """Notes what it is told to drop."""

    def __init__(self) -> None:
        self.is_on_policy = False
        self.dropped: list[tuple[str, Any]] = []

    def drop_older(self, policy_version: int, *, verified: bool) -> None:
        self.dropped.append(("older", (policy_version, verified)))

    def drop_unrouted(self, *, recorded_later: int | None) -> None:
        self.dropped.append(("unrouted", recorded_later))


def resumed(method: str, *, replay: str = "off", measure: bool = False) -> FakeRollouter:
    """The rollouter of a run resumed at version 6."""
    config = Config(
        method=MethodConfig(name=method),
        routing_replay=RoutingReplayConfig(mode=replay),
        verification=VerificationConfig(measure=measure),
    )
    rollouter = FakeRollouter()
    drop_what_may_not_resume(config, rollouter, AcceptanceWindow(config.switching), 6)
    return rollouter


def test_only_rollverify_drops_what_was_not_verified():
    assert resumed("rollverify").dropped == [("older", (6, True))]
    assert resumed("partial_rollout").dropped == []
    assert resumed("on_policy").is_on_policy


@pytest.mark.parametrize(
    ("method", "replay", "measure", "expected"),
    [
        ("partial_rollout", "engine", False, [("unrouted", None)]),
        # The trainer records tokens of version 6 after the phase, where it scores U_k at all.
        ("partial_rollout", "trainer", True, [("unrouted", 6)]),
        ("partial_rollout", "trainer", False, []),
        ("rollverify", "trainer", False, [("older", (6, True)), ("unrouted", 6)]),
        ("on_policy", "trainer", True, []),
    ],
)
def test_replay_drops_what_has_no_experts_to_replay(method, replay, measure, expected):
    assert resumed(method, replay=replay, measure=measure).dropped == expected
