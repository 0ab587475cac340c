"""Which groups are trained on, their balance over ranks, and partial rollouts on two ranks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import trajectory
from unit.rollout import rank_worker
from unit.rollout.rank_worker import GROUPS_PER_STEP, NUM_PHASES, dynamic_phases, is_silent

from rollverify.ranks import Ranks
from rollverify.rollout.exchange import balance, select_groups, share_of_lowest, work_of


def loads(per_rank: list[dict[int, int]], moves: list[tuple[int, int, int]]) -> list[int]:
    """Tokens of each rank after the moves."""
    after = [sum(groups.values()) for groups in per_rank]
    for group_id, source, target in moves:
        after[source] -= per_rank[source][group_id]
        after[target] += per_rank[source][group_id]
    return after


def test_the_oldest_complete_groups_are_chosen():
    assert select_groups({9: 5, 2: 7, 4: 1}, 2, Ranks()) == [{2: 7, 4: 1}]


def test_spare_groups_are_chosen_only_where_the_others_are_too_few():
    assert select_groups({9: 5, 4: 1}, 2, Ranks(), spare={2: 7}) == [{4: 1, 9: 5}]
    assert select_groups({9: 5, 4: 1}, 3, Ranks(), spare={8: 3, 2: 7}) == [{2: 7, 4: 1, 9: 5}]


def test_one_rank_alone_draws_all_that_is_missing():
    assert share_of_lowest([4, 5, 6], 3, Ranks()) == 3


def test_work_of_a_long_response_grows_with_its_square():
    """8B: 45.4 GFLOP a token in matrices, 12 * 36 * 4096 in attention per token attended to."""
    work = work_of((45_400_000_000, 12 * 36 * 4096))
    whole, part = (work(trajectory([1], [2] * length)) for length in (65536, 4096))
    assert whole / (16 * part) == pytest.approx(2.11, abs=0.01)
    assert work(trajectory([1], [])) == 0
    assert work_of((10, 4))(trajectory([1, 1], [1])) == 10 * 2 + 4 * 2 * 2 // 2


def test_balance_moves_the_group_that_closes_the_gap_best():
    # 100 against 20: a gap of 80; moving 40 leaves 60 and 60, moving 30 or 60 leaves 70 and 50.
    per_rank = [{0: 40, 1: 60}, {2: 20}]
    moves = balance(per_rank)
    assert moves == [(0, 0, 1)] and loads(per_rank, moves) == [60, 60]


def test_balance_leaves_equal_ranks_and_groups_too_large_to_help_alone():
    assert balance([{0: 10}, {1: 10}]) == []
    assert balance([{0: 100}, {}]) == []  # Moving the only group changes sides, nothing else.
    assert balance([{0: 5, 1: 6}]) == []


@given(st.lists(st.lists(st.integers(1, 1000), max_size=8), min_size=1, max_size=5))
def test_balance_never_makes_the_fullest_rank_fuller_and_moves_a_group_once(sizes):
    ids = iter(range(1000))
    per_rank = [{next(ids): size for size in rank} for rank in sizes]
    moves = balance(per_rank)
    before, after = loads(per_rank, []), loads(per_rank, moves)
    assert sum(after) == sum(before) and max(after) <= max(before)
    assert len({group_id for group_id, _, _ in moves}) == len(moves)
    assert all(group_id in per_rank[source] for group_id, source, _ in moves)


@pytest.fixture(scope="module")
def two_ranks(run_gloo_workers) -> list[dict]:
    folder = run_gloo_workers(rank_worker.main, 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_train_on_whole_groups_each_exactly_once(two_ranks):
    trained: list[tuple[int, int]] = []
    for phase in range(NUM_PHASES):
        shares = [rank["phases"][phase]["finished"] for rank in two_ranks]
        groups = [{group for group, _ in share} for share in shares]
        assert not groups[0] & groups[1] and len(groups[0] | groups[1]) == GROUPS_PER_STEP
        assert all(len(share) == 2 * len(own) for share, own in zip(shares, groups, strict=True))
        trained += [tuple(sample) for share in shares for sample in share]
    assert len(trained) == len(set(trained)) == NUM_PHASES * GROUPS_PER_STEP * 2


def test_two_ranks_take_the_same_number_of_steps_and_share_the_tokens(two_ranks):
    """Nobody waits for a straggler: a rank whose groups are long still ends with the others."""
    for phases in zip(*(rank["phases"] for rank in two_ranks), strict=True):
        assert phases[0]["steps"] == phases[1]["steps"] and phases[0]["steps"] % 3 == 0
        tokens = [phase["tokens"] for phase in phases]
        # One group more or less on a side: 4 groups of at most 2 x 40 tokens.
        assert abs(tokens[0] - tokens[1]) <= 80
    moved = [
        (group, rank)
        for rank, seen in enumerate(two_ranks)
        for phase in seen["phases"]
        for group, _ in phase["finished"]
        if group % 2 != rank
    ]
    assert moved, "no group ever changed ranks, so the balance was not tried"


def test_no_group_is_lost_or_held_twice_over_two_ranks(two_ranks):
    last = [rank["phases"][-1] for rank in two_ranks]
    trained, held = sum(r["trained"] for r in last), sum(r["held"] for r in last)
    assert trained == NUM_PHASES * GROUPS_PER_STEP
    assert sum(r["num_added"] for r in last) == trained + held
    left = [tuple(sample) for rank in last for sample in rank["unfinished"]]
    assert len(left) == len(set(left)) == 2 * held


def test_what_waits_is_balanced_over_the_ranks_too(two_ranks):
    """The groups that rank 1 draws are 26 tokens longer a response; scoring them is shared."""
    for phases in zip(*(rank["phases"] for rank in two_ranks), strict=True):
        tokens = [phase["held_tokens"] for phase in phases]
        assert abs(tokens[0] - tokens[1]) <= 2 * 41  # one group more or less
    assert any(
        group % 2 != rank
        for rank, seen in enumerate(two_ranks)
        for phase in seen["phases"]
        for group, _ in phase["unfinished"]
    )


def test_dynamic_sampling_trains_on_the_same_groups_with_two_ranks_as_with_one(two_ranks):
    """On-policy; which rank makes up for a group without signal changes nothing."""
    alone = dynamic_phases(1, is_on_policy=True)
    together = [rank["on_policy"] for rank in two_ranks]
    for phase, one in enumerate(alone):
        shares = [rank[phase]["finished"] for rank in together]
        assert sorted(map(tuple, shares[0] + shares[1])) == one["finished"]
        assert sum(rank[phase]["given_up"] for rank in together) == one["given_up"]
    assert sum(one["given_up"] for one in alone) > GROUPS_PER_STEP


def test_dynamic_sampling_fills_partial_batches_over_two_ranks(two_ranks):
    phases = [rank["partial"] for rank in two_ranks]
    for shares in zip(*phases, strict=True):
        groups = {group for share in shares for group, _ in share["finished"]}
        assert len(groups) == GROUPS_PER_STEP and not any(is_silent(group) for group in groups)
        assert shares[0]["steps"] == shares[1]["steps"]
    filtered = sum(rank[-1]["filtered"] for rank in phases)
    assert filtered == sum(one["given_up"] for rank in phases for one in rank) > 0


def test_both_ranks_stop_where_too_few_groups_have_a_signal(two_ranks):
    """Also the rank all of whose groups have one; the counts are those of all ranks."""
    own, other = (rank["no_signal"] for rank in two_ranks)
    assert own == other and own.startswith("dynamic sampling found 3 groups without signal")
    assert "mean reward of the others is 5:" in own


def test_ranks_of_one_tensor_parallel_group_must_hold_the_same_tokens(two_ranks):
    for rank in two_ranks:
        same, other = rank["twins"]
        assert same == "" and other.startswith("rank 1 sampled other tokens")


def test_the_failure_of_one_engine_ends_the_phase_on_every_rank(two_ranks):
    """Also the rank whose engine is well names the trajectories that were in flight."""
    own, other = two_ranks[1]["failure"], two_ranks[0]["failure"]
    assert own.startswith(
        "the rollout engine failed and a retry did not help (RuntimeError: second"
    )
    assert other == f"another rank: {own}" and "group 1 sample 0" in own
