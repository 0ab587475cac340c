"""On-policy rollouts: shares of ranks, versions, seeds, statuses, rewards."""

from collections.abc import Sequence

import pytest
import torch
from fakes import EOS, FakeEngine
from tensordict import TensorDict

from rollverify.errors import RolloutError
from rollverify.rollout.on_policy import EncodedPrompt, OnPolicyRollouter
from rollverify.rollout.schema import Status, validate_trajectory
from rollverify.rollout.seeds import request_seed


def prompt(number: int) -> EncodedPrompt:
    """Prompt [number]; its reward is the response's length."""
    return EncodedPrompt(token_ids=(number,), grade=lambda ids: float(len(ids)))


def rollouter(
    engine: FakeEngine | None = None,
    *,
    batch_sizes: Sequence[int] = (5, 5),
    group_size: int = 2,
    rank: int = 0,
    world_size: int = 1,
    run_seed: int = 3,
) -> OnPolicyRollouter:
    starts = [sum(batch_sizes[:i]) for i in range(len(batch_sizes))]
    batches = [
        [prompt(start + i) for i in range(size)]
        for start, size in zip(starts, batch_sizes, strict=True)
    ]
    return OnPolicyRollouter(
        engine=engine or FakeEngine(),
        batches=iter(batches),
        group_size=group_size,
        max_response_tokens=4,
        temperature=0.7,
        max_num_seqs=8,
        run_seed=run_seed,
        data_rank=rank,
        data_world_size=world_size,
    )


def names(trajectories: list[TensorDict]) -> list[tuple[int, int]]:
    return [(int(t["group_id"]), int(t["sample_index"])) for t in trajectories]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_ranks_together_make_every_sample_exactly_once(world_size):
    """DH03: 5 groups over 4 ranks (and others), none dropped, none twice, groups whole."""
    parts = [
        names(rollouter(rank=rank, world_size=world_size).collect(0)[0])
        for rank in range(world_size)
    ]
    together = sorted(sample for part in parts for sample in part)
    assert together == [(group, sample) for group in range(5) for sample in range(2)]
    for part in parts:
        assert all(part.count((group, 0)) == part.count((group, 1)) for group in range(5))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sample_has_the_same_seed_and_prompt_whatever_the_world_size(world_size):
    def seen(size: int) -> dict[tuple[int, int], tuple[int, list[int]]]:
        found = {}
        for rank in range(size):
            made = rollouter(rank=rank, world_size=size)
            for t in made.collect(0)[0] + made.collect(1)[0]:
                found[names([t])[0]] = (int(t["seed"]), t["prompt_ids"].tolist())
        return found

    alone = seen(1)
    assert seen(world_size) == alone
    assert alone[(7, 1)] == (request_seed(3, 7, 1, 0), [7])  # Group 7 is the third of batch 2.


def test_requests_carry_seed_temperature_and_limit():
    engine = FakeEngine()
    rollouter(engine, batch_sizes=(2,)).collect(0)
    assert [r.request_id for r in engine.requests] == ["0/0", "0/1", "1/0", "1/1"]
    assert [r.seed for r in engine.requests] == [
        request_seed(3, g, s, 0) for g in range(2) for s in range(2)
    ]
    assert {(r.temperature, r.max_tokens) for r in engine.requests} == {(0.7, 4)}


def test_the_groups_of_one_step_are_whole_ordered_and_numbered_through_the_run():
    made = rollouter(batch_sizes=(2, 3), group_size=2)
    first, unfinished = made.collect(0)
    second, _ = made.collect(1)
    assert names(first) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert names(second) == [(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)]
    assert unfinished == []
    assert made.num_groups_drawn == 5


def test_numbering_goes_on_after_a_resume():
    made = rollouter(batch_sizes=(2,))
    made.num_groups_drawn = 40
    assert names(made.collect(20)[0]) == [(40, 0), (40, 1), (41, 0), (41, 1)]


def test_tokens_log_probs_and_version_are_those_of_sampling():
    """PR17: the version is the one that made the tokens, fixed when the request is sent."""
    engine = FakeEngine(version=3)
    (one,), _ = rollouter(engine, batch_sizes=(1,), group_size=1).collect(3)
    engine.version = 4
    validate_trajectory(one)
    assert one["response_ids"].tolist() == [300, 301, 302, 303]
    assert torch.allclose(one["behavior_logprobs"], torch.full((4,), -0.4))
    assert one["policy_version"].tolist() == [3, 3, 3, 3]
    assert one["segment_ids"].tolist() == [0, 0, 0, 0]


def test_status_and_reward_tell_a_stop_from_the_limit():
    """PR03: a response at the limit has status LENGTH, a reward, and no further request."""
    engine = FakeEngine(stop_after={"0/0": 2, "0/1": 4})
    finished, _ = rollouter(engine, batch_sizes=(1,), group_size=3).collect(0)
    assert [t["response_ids"].tolist() for t in finished] == [
        [0, EOS],
        [0, 1, 2, EOS],
        [0, 1, 2, 3],
    ]
    statuses = [Status(int(t["status"])) for t in finished]
    assert statuses == [Status.STOP, Status.STOP, Status.LENGTH]
    assert [t["reward"].item() for t in finished] == [2.0, 4.0, 4.0]
    assert len(engine.requests) == 3


def test_the_reward_sees_ids_and_nothing_is_tokenised_again():
    """LP07: [0, 1] stays [0, 1] where a tokenizer would make it one token."""
    seen = []
    one = EncodedPrompt(token_ids=(5,), grade=lambda ids: seen.append(list(ids)) or 0.0)
    made = rollouter(FakeEngine(stop_after={"0/0": 3}), batch_sizes=(1,), group_size=1)
    made._batches = iter([[one]])
    (finished,), _ = made.collect(0)
    assert seen == [[0, 1, EOS]] == [finished["response_ids"].tolist()]


def test_stats_are_those_of_the_last_phase_and_this_rank():
    made = rollouter(batch_sizes=(5, 5), rank=1, world_size=2)
    made.collect(0)
    made.collect(1)
    # Rank 1 of 2 has groups 1 and 3 of 5: 4 samples of 4 tokens, in 4 steps.
    assert (made.stats.num_tokens, made.stats.num_steps) == (16, 4)


def test_a_lost_request_ends_the_phase():
    engine = FakeEngine()
    engine.lost = {"1/0"}
    with pytest.raises(RolloutError, match="1/0"):
        rollouter(engine).collect(0)
