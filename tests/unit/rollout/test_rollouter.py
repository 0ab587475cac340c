"""Partial phases: what is in flight, when a phase ends, what is paused, resumed first and kept."""

import pytest
import torch
from support.fakes import EOS, FakeEngine
from support.rollout_parts import Parts, make_parts, names

from rollverify.engine.engine import Completion, GenerationRequest
from rollverify.engine.generation import request_seed
from rollverify.errors import EngineFailedError, RolloutStopped, UnverifiedTrajectoryError
from rollverify.rollout.trajectory import Status

SHORT, LONG = 4, 25


def short_and_long() -> FakeEngine:
    """Prompts S1, L1, S2, L2, ...: 4 tokens for even groups, 25 for odd ones."""
    lengths = {f"{g}/0": LONG if g % 2 else SHORT for g in range(40)}
    return FakeEngine(stop_after=lengths)


def phase(parts: Parts, version: int) -> tuple[int, list[int], dict[int, int]]:
    """(ticks, groups trained on, tokens of what is left by group)."""
    before = parts.engine.num_steps
    finished, unfinished = parts.collect(version)
    parts.rollouter.mark_trained()
    parts.check()
    left = {int(t["group_id"]): len(t["response_ids"]) for t in unfinished}
    return parts.engine.num_steps - before, [g for g, _ in names(finished)], left


def test_long_responses_are_trained_as_often_as_short_ones():
    """PR19: two slots, a phase ends with two finished, resumed responses go first.

    Groups 0, 2, 4, ... are S1, S2, S3, ...; groups 1, 3, ... are L1, L2, ....
    """
    parts = make_parts(short_and_long())
    phases = [phase(parts, version) for version in range(10)]
    assert phases[:4] == [
        (8, [0, 2], {1: 8}),
        (21, [1, 4], {3: 21}),
        (8, [3, 6], {5: 8}),
        (21, [5, 8], {7: 21}),
    ]
    trained = [g for _, groups, _ in phases for g in groups]
    assert sum(g % 2 for g in trained) == 9 and len(trained) == len(set(trained)) == 20


def test_a_resumed_response_goes_on_where_it_stopped():
    """PR01, PR17, PR11: tokens, versions and budget of a response made in two phases."""
    parts = make_parts(short_and_long(), max_response_tokens=30)
    parts.collect(0)
    finished, _ = parts.collect(1)
    one = finished[0]
    # 8 tokens of version 0, then 16 of version 1 and the stop token as the 25th.
    assert one["response_ids"].tolist() == [*range(8), *(100 + p for p in range(8, 24)), EOS]
    assert one["policy_version"].tolist() == [0] * 8 + [1] * 17
    assert one["segment_ids"].tolist() == [0] * 8 + [1] * 17
    assert one["is_reprefilled"].tolist() == [False] * 8 + [True] * 17
    assert torch.allclose(one["behavior_logprobs"], torch.tensor([-0.1] * 8 + [-0.2] * 17))
    resumed = next(r for r in parts.engine.requests if len(r.token_ids) > 1)
    assert (resumed.request_id, resumed.token_ids) == ("1/0", (1, *range(8)))
    assert resumed.max_tokens == 30 - 8
    assert resumed.seed == request_seed(3, 1, 0, 1)


def test_resumed_responses_are_sent_first_and_new_groups_only_into_free_slots():
    parts = make_parts(short_and_long())
    parts.collect(0)
    seen = len(parts.engine.requests)
    parts.collect(1)
    assert [r.request_id for r in parts.engine.requests[seen:]] == ["1/0", "3/0", "4/0"]
    assert (parts.rollouter.stats.num_resumed, parts.rollouter.stats.num_started) == (1, 2)


def test_a_group_is_trained_on_only_when_all_its_samples_are_done():
    engine = FakeEngine(stop_after={"0/0": 2, "0/1": 9, "1/0": 2, "1/1": 3, "2/0": 2, "2/1": 4})
    parts = make_parts(engine, group_size=2, prompts_per_step=1, num_in_flight=4)
    finished, unfinished = parts.collect(0)
    # Ticks 1-2: 0/0 and 1/0 end; tick 3: 1/1 ends, group 1 is complete; 2/0 and 2/1 had one tick.
    assert names(finished) == [(1, 0), (1, 1)]
    assert names(unfinished) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert [len(t["response_ids"]) for t in unfinished] == [2, 3, 1, 1]
    assert [int(t["status"]) for t in unfinished] == [Status.STOP, 0, 0, 0]
    assert [t["reward"].item() for t in unfinished] == [2.0, 0.0, 0.0, 0.0]


def test_complete_groups_beyond_the_batch_wait_and_need_no_new_request():
    """PR07: three groups end in one tick, two are asked for; the third is not lost."""
    engine = FakeEngine(stop_after={f"{g}/0": 3 for g in range(3)})
    parts = make_parts(engine, num_in_flight=3)
    first, left = parts.collect(0)
    assert (names(first), names(left)) == ([(0, 0), (1, 0)], [(2, 0)])
    parts.rollouter._choice.num_groups = 1
    seen = len(engine.requests)
    second, left = parts.collect(1)
    assert (names(second), left, len(engine.requests)) == ([(2, 0)], [], seen)


def test_a_response_paused_before_its_first_token_is_kept_and_starts_later():
    """PR15: the engine has two slots for three requests; the third never had its turn."""
    engine = FakeEngine(stop_after={"0/0": 2, "1/0": 2, "2/0": 1}, max_num_seqs=2)
    parts = make_parts(engine, num_in_flight=3)
    _, unfinished = parts.collect(0)
    (one,) = unfinished
    assert names([one]) == [(2, 0)] and len(one["response_ids"]) == 0
    assert (int(one["status"]), int(one["num_requests"])) == (Status.UNFINISHED, 1)
    finished, _ = parts.collect(1)
    assert names(finished)[0] == (2, 0)
    assert finished[0]["response_ids"].tolist() == [EOS]
    assert finished[0]["policy_version"].tolist() == [1]


def test_a_stop_token_drawn_at_the_pause_ends_the_response():
    """PR13: the engine was paused in the step that drew the stop token; nothing is sent again."""
    parts = make_parts(FakeEngine(), num_in_flight=1, prompts_per_step=1)
    parts.loop.begin(0, 1)
    parts.rollouter._start(parts.rollouter._draw_group()[0])
    parts.engine._running["0/0"][1].extend([11, 12, EOS])
    (one,) = parts.loop.pause()
    assert one["response_ids"].tolist() == [11, 12, EOS]
    assert (int(one["status"]), one["reward"].item()) == (Status.STOP, 3.0)
    assert parts.buffer.num_complete == 1 and len(parts.engine.requests) == 1


def test_a_response_paused_at_the_limit_is_finished():
    """PR03: the budget is used up at the pause: status LENGTH, one reward, no further request."""
    parts = make_parts(FakeEngine(), num_in_flight=1, prompts_per_step=1, max_response_tokens=10)
    parts.loop.begin(0, 1)
    parts.rollouter._start(parts.rollouter._draw_group()[0])
    parts.engine._running["0/0"][1].extend(range(20, 30))
    (one,) = parts.loop.pause()
    assert (int(one["status"]), one["reward"].item()) == (Status.LENGTH, 10.0)
    finished, unfinished = parts.collect(0)
    assert (names(finished), unfinished, len(parts.engine.requests)) == ([(0, 0)], [], 1)


@pytest.mark.parametrize(("mask_older", "expected"), [(True, [0, 0, 0, 1, 1]), (False, [1] * 5)])
def test_older_tokens_leave_the_loss_when_asked(mask_older, expected):
    """PR05: 3 tokens of version 0, then 2 of version 1."""
    engine = FakeEngine(stop_after={"0/0": 5, "1/0": 3, "2/0": 2})
    parts = make_parts(engine, prompts_per_step=1, mask_older=mask_older)
    parts.collect(0)
    (one,), _ = parts.collect(1)
    assert one["policy_version"].tolist() == [0, 0, 0, 1, 1]
    assert one["loss_mask"].int().tolist() == expected


def test_tokens_that_were_not_verified_are_not_resumed():
    parts = make_parts(short_and_long(), must_be_verified=True)
    _, unfinished = parts.collect(0)
    with pytest.raises(UnverifiedTrajectoryError, match="group 1 sample 0 was last verified again"):
        parts.collect(1)
    unfinished[0]["verified_version"] = torch.tensor(1)
    parts.collect(1)


def test_two_runs_make_the_same_requests_and_trajectories():
    def run() -> list[object]:
        parts = make_parts(short_and_long(), num_in_flight=3)
        for version in range(6):
            parts.collect(version)
        return [(r.request_id, r.seed, r.token_ids) for r in parts.engine.requests]

    assert run() == run()


def test_a_switch_to_on_policy_drops_what_is_unfinished_and_its_prompts_come_first():
    parts = make_parts(short_and_long())
    parts.collect(0)
    parts.rollouter.mark_trained()
    parts.rollouter.set_on_policy(True)
    assert (parts.buffer.group_ids(), parts.queue.returned_ids()) == ([], [1])
    assert parts.ledger.counts()["pending"] == 1 and parts.rollouter.num_dropped == 1
    finished, unfinished = parts.collect(1)
    assert (names(finished), unfinished) == ([(1, 0), (3, 0)], [])
    assert finished[0]["policy_version"].unique().tolist() == [1]
    # The dropped attempt used stream 0; the same stream would repeat its draws.
    assert int(finished[0]["seed"]) == request_seed(3, 1, 0, 1)
    parts.rollouter.mark_trained()
    parts.check()
    assert parts.buffer.counts.dropped == 8


def test_a_run_resumed_as_on_policy_drops_what_is_older():
    parts = make_parts(short_and_long())
    parts.collect(0)
    parts.rollouter.mark_trained()
    parts.rollouter.is_on_policy = True
    finished, unfinished = parts.collect(1)
    assert (names(finished), unfinished) == ([(1, 0), (3, 0)], [])
    assert all(t["policy_version"].unique().tolist() == [1] for t in finished)
    assert parts.rollouter.num_dropped == 1


def test_what_an_on_policy_phase_left_when_its_engine_failed_goes_on():
    parts = make_parts(short_and_long(), is_on_policy=True)
    parts.engine.failures = []
    parts.engine.fail_at = {3, 4}
    with pytest.raises(EngineFailedError):
        parts.collect(0)
    assert parts.buffer.num_tokens == 4
    parts.engine.fail_at = set()
    finished, _ = parts.collect(0)
    assert names(finished) == [(0, 0), (1, 0)] and parts.rollouter.num_dropped == 0
    assert finished[1]["response_ids"].tolist()[:4] == [0, 1, 2, 3]


def test_older_tokens_that_were_never_verified_can_be_dropped():
    parts = make_parts(short_and_long())
    _, unfinished = parts.collect(0)
    parts.rollouter.mark_trained()
    unfinished[0]["verified_version"] = torch.tensor(1)
    parts.rollouter.drop_older(1, verified=True)
    assert parts.buffer.group_ids() == [1]
    parts.rollouter.drop_older(2, verified=True)
    assert parts.buffer.group_ids() == [] and parts.queue.returned_ids() == [1]


@pytest.mark.parametrize("is_on_policy", [False, True])
def test_a_request_that_the_engine_refuses_names_its_trajectory(monkeypatch, is_on_policy):
    """The ranks agree on the failure, and what was already running is paused."""
    parts = make_parts(short_and_long(), is_on_policy=is_on_policy)
    real = parts.engine.add_request

    def refuse_the_second(request: GenerationRequest) -> None:
        if request.request_id == "1/0":
            raise ValueError("no room")
        real(request)

    monkeypatch.setattr(parts.engine, "add_request", refuse_the_second)
    with pytest.raises(EngineFailedError, match=r"ValueError: no room.*group 1 sample 0"):
        parts.collect(0)
    assert parts.ledger.counts()["paused"] == 1 and parts.engine.num_unfinished == 0


def test_one_engine_failure_is_retried_without_losing_a_token(monkeypatch):
    parts = make_parts(short_and_long())
    real_step, calls = parts.engine.step, []

    def step() -> list[Completion]:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("kernel failed")
        return real_step()

    monkeypatch.setattr(parts.engine, "step", step)
    finished, unfinished = parts.collect(0)
    assert names(finished) == [(0, 0), (2, 0)]
    assert unfinished[0]["response_ids"].tolist() == list(range(8))
    assert unfinished[0]["segment_ids"].tolist() == [0] * 8  # same version, same segment
    assert int(unfinished[0]["num_requests"]) == 2
    parts.check()


def test_a_second_engine_failure_ends_the_phase_and_names_the_trajectories():
    parts = make_parts(short_and_long())
    parts.engine.failures = [RuntimeError("kernel failed"), RuntimeError("kernel failed again")]
    with pytest.raises(
        EngineFailedError, match=r"again.*2 traj.*: group 0 sample 0, group 1 sample 0"
    ):
        parts.collect(0)
    assert parts.ledger.counts()["paused"] == 2
    parts.check()
    finished, _ = parts.collect(0)
    assert names(finished) == [(0, 0), (2, 0)]


@pytest.mark.parametrize("is_on_policy", [False, True])
def test_a_rollout_that_is_asked_to_stop_pauses_and_goes_on_later(is_on_policy):
    """Three steps of the first phase; afterwards the tokens are those of a run never stopped."""
    whole = make_parts(short_and_long(), is_on_policy=is_on_policy)
    expected = whole.collect(0)
    parts = make_parts(short_and_long(), is_on_policy=is_on_policy)
    parts.rollouter.has_stopped = lambda: parts.engine.num_steps == 3
    with pytest.raises(RolloutStopped):
        parts.collect(0)
    assert parts.engine.num_unfinished == 0 and parts.buffer.num_tokens > 0
    assert parts.ledger.counts()["running"] == 0
    parts.check()
    parts.rollouter.has_stopped = lambda: False
    for ours, theirs in zip(parts.collect(0), expected, strict=True):
        assert names(ours) == names(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one["response_ids"].tolist() == other["response_ids"].tolist()
