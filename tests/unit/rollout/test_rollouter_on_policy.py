"""On-policy phases: shares of ranks, versions, seeds, statuses, rewards."""

import pytest
import torch
from support.fakes import EOS, FakeEngine
from support.rollout_parts import Parts, make_parts, names

from rollverify.engine.generation import request_seed
from rollverify.errors import RolloutError
from rollverify.rollout.trajectory import Status, validate_trajectory


def on_policy(engine: FakeEngine | None = None, groups: int = 4, **changes) -> Parts:
    """On-policy phases of `groups` groups, at most 4 tokens per response."""
    return make_parts(
        engine,
        prompts_per_step=groups,
        max_response_tokens=4,
        is_on_policy=True,
        **({"group_size": 2} | changes),
    )


def test_the_groups_of_one_step_are_whole_ordered_and_numbered_through_the_run():
    parts = on_policy(groups=2)
    first, unfinished = parts.collect(0)
    second, _ = parts.collect(1)
    assert names(first) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert names(second) == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert unfinished == [] and len(parts.engine.requests) == 8


def test_requests_carry_seed_temperature_and_limit():
    parts = on_policy(groups=2)
    parts.collect(0)
    requests = parts.engine.requests
    assert [r.request_id for r in requests] == ["0/0", "0/1", "1/0", "1/1"]
    assert [r.seed for r in requests] == [
        request_seed(3, g, s, 0) for g in range(2) for s in range(2)
    ]
    assert {(r.temperature, r.max_tokens) for r in requests} == {(0.7, 4)}


def test_tokens_log_probs_and_version_are_those_of_sampling():
    """PR17: the version is the one that made the tokens, fixed when the phase begins."""
    parts = on_policy(groups=1, group_size=1)
    (one,), _ = parts.collect(3)
    parts.engine.version = 4
    validate_trajectory(one)
    assert one["response_ids"].tolist() == [300, 301, 302, 303]
    assert torch.allclose(one["behavior_logprobs"], torch.full((4,), -0.4))
    assert one["policy_version"].tolist() == [3, 3, 3, 3]
    assert one["segment_ids"].tolist() == [0, 0, 0, 0]
    assert not one["is_reprefilled"].any()


def test_status_and_reward_tell_a_stop_from_the_limit():
    """PR03: a response at the limit has status LENGTH, a reward, and no further request."""
    engine = FakeEngine(stop_after={"0/0": 2, "0/1": 4})
    finished, _ = on_policy(engine, groups=1, group_size=3).collect(0)
    assert [t["response_ids"].tolist() for t in finished] == [
        [0, EOS],
        [0, 1, 2, EOS],
        [0, 1, 2, 3],
    ]
    statuses = [Status(int(t["status"])) for t in finished]
    assert statuses == [Status.STOP, Status.STOP, Status.LENGTH]
    assert [t["reward"].item() for t in finished] == [2.0, 4.0, 4.0]
    assert len(engine.requests) == 3


def test_stats_are_those_of_the_last_phase():
    parts = on_policy(groups=2)
    parts.collect(0)
    parts.collect(1)
    stats = parts.rollouter.stats
    # 2 groups of 2 samples of 4 tokens, all at once: 4 steps of 4 busy slots.
    assert (stats.num_tokens, stats.num_steps, stats.slot_steps, stats.capacity) == (16, 4, 16, 16)


def test_a_lost_request_ends_the_phase():
    parts = on_policy()
    parts.engine.lost = {"1/0"}
    with pytest.raises(RolloutError, match=r"lost requests.*1/0"):
        parts.collect(0)


def test_the_ledger_follows_a_group_from_the_queue_to_training():
    parts = on_policy(groups=2)
    parts.collect(0)
    assert parts.ledger.counts()["finished"] == 2
    parts.rollouter.mark_trained()
    assert parts.ledger.counts()["trained"] == 2
    assert parts.buffer.counts.trained == parts.buffer.counts.generated == 16
    parts.check()
