"""Another number of ranks goes on with everything: no prompt, token or count is lost or doubled."""

import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes import trajectory
from tensordict import TensorDict

from rollverify.checkpoint.redistribute import Part, redistribute
from rollverify.errors import CheckpointError
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.rollout.prompt_queue import EncodedPrompt, PromptQueue
from rollverify.rollout.trajectory import Status, new_trajectory

NUM_PROMPTS = 5


def prompt_index_of(place: int) -> int:
    return place * 2 % NUM_PROMPTS


def part(
    groups: dict[int, int],
    *,
    returned: tuple[tuple[int, int, int], ...] = (),
    num_streamed: int,
    live: list[list[Any]] | None = None,
    trained: int = 0,
) -> Part:
    """A rank with one trajectory per group: {group id: response tokens}, prompts of 1 token."""
    trajectories = [trajectory([7], [5] * size, group=g) for g, size in groups.items()]
    held = [[g, "paused"] for g in groups] + [[entry[0], "pending"] for entry in returned]
    ledger = {"num_added": num_streamed, "trained": trained, "filtered": 0}
    counts = dict.fromkeys(("cut", "discarded", "dropped"), 0)
    total = sum(groups.values())
    values = {
        "buffer": {"generated": total + 10 * trained, "trained": 10 * trained, **counts},
        "ledger": {"live": held if live is None else live, **ledger},
        "queue": {"returned": [list(entry) for entry in returned], "num_streamed": num_streamed},
        "rollouter": {"num_dropped": 1},
    }
    return trajectories, values


def all_parts(parts: list[Part], size: int) -> list[Part]:
    ranks = [Ranks(rank=rank, size=size) for rank in range(size)]
    return [redistribute(parts, new, prompt_index_of) for new in ranks]


def ids(trajectories: list[TensorDict]) -> list[int]:
    return [int(one["group_id"]) for one in trajectories]


def test_two_ranks_to_one():
    """Rank 0 drew 0, 2, 4 and trained 0; rank 1 drew 1; group 3 was drawn by nobody."""
    old = [part({2: 3, 4: 1}, num_streamed=3, trained=1), part({1: 2}, num_streamed=1)]
    ((trajectories, values),) = all_parts(old, 1)
    assert ids(trajectories) == [1, 2, 4]
    # Place 3 of the stream: prompt 3 * 2 % 5 = 1.
    assert values["queue"] == {"returned": [[3, 1, 0]], "num_streamed": 5}
    assert values["num_drawn"] == 5
    assert values["ledger"]["live"] == [[1, "paused"], [2, "paused"], [4, "paused"]]
    assert (values["ledger"]["num_added"], values["ledger"]["trained"]) == (4, 1)
    assert values["buffer"]["generated"] == 3 + 1 + 2 + 10
    assert values["rollouter"] == {"num_dropped": 2}


def test_one_rank_to_two_goes_on_at_the_next_whole_batch():
    """Groups 0 to 4 are drawn; 2 ranks go on with batch 3 = groups 6, 7, so 5 is waiting."""
    old = [part({3: 2, 4: 9}, num_streamed=5, trained=3)]
    first, second = all_parts(old, 2)
    assert [one[1]["queue"]["num_streamed"] for one in (first, second)] == [3, 3]
    assert [one[1]["num_drawn"] for one in (first, second)] == [6, 6]
    assert first[1]["queue"]["returned"] == [[5, 0, 0]]
    assert second[1]["queue"]["returned"] == []
    assert (ids(first[0]), ids(second[0])) == ([4], [3])


def test_the_longest_group_goes_first_to_the_emptiest_rank():
    """Tokens with the prompt: 10 -> 0; 7, 6 -> 1; 4 -> 0 (10 < 13); 4 -> 1 (13 < 14)."""
    old = [part({0: 9, 1: 6, 2: 5, 3: 3, 4: 3}, num_streamed=5)]
    first, second = all_parts(old, 2)
    assert (ids(first[0]), ids(second[0])) == ([0, 3], [1, 2, 4])


def test_equal_groups_go_to_the_ranks_in_turn():
    old = [part({0: 2, 1: 2, 2: 2, 3: 2}, num_streamed=4)]
    first, second = all_parts(old, 2)
    assert (ids(first[0]), ids(second[0])) == ([0, 2], [1, 3])


def test_prompts_that_came_back_keep_their_streams_and_their_ledger_entry():
    """4 and 1 had come back with 2 and 1 sampling streams used; the ranks take them in turn."""
    old = [part({}, returned=((1, 3, 1), (4, 2, 2)), num_streamed=6, trained=4)]
    first, second = all_parts(old, 2)
    assert first[1]["queue"]["returned"] == [[1, 3, 1]]
    assert second[1]["queue"]["returned"] == [[4, 2, 2]]
    assert second[1]["ledger"]["live"] == [[4, "pending"]]


def test_counts_are_on_the_first_rank_only():
    old = [part({0: 1}, num_streamed=1), part({1: 1}, num_streamed=1, trained=0)]
    _, second, third = all_parts(old, 3)
    for _, values in (second, third):
        assert set(values["buffer"].values()) == {0}
        assert values["rollouter"]["num_dropped"] == values["ledger"]["num_added"] == 0


def test_ranks_that_have_drawn_nothing_start_at_the_beginning():
    (_, values), _ = all_parts([part({}, num_streamed=0) for _ in range(4)], 2)
    assert values["queue"] == {"returned": [], "num_streamed": 0}


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        (
            [part({0: 1}, num_streamed=1), part({0: 1}, num_streamed=1)],
            "ranks 0 and 1 both hold group 0",
        ),
        ([part({0: 1}, returned=((0, 0, 1),), num_streamed=1)], "group 0 has more than one place"),
        (
            # Rank 1 has drawn nothing, yet holds group 1.
            [part({0: 1, 2: 1}, num_streamed=2), part({1: 1}, num_streamed=0)],
            "group 1 has more than one place",
        ),
        (
            [part({0: 1}, num_streamed=1), part({}, num_streamed=1, live=[[0, "paused"]])],
            "group 0 has more than one ledger entry",
        ),
        ([part({0: 1}, num_streamed=1, live=[])], "do not agree with the buffers on group 0"),
        ([part({}, num_streamed=1, live=[[0, "paused"]])], "do not agree with the buffers on gr"),
        ([part({7: 1}, num_streamed=1)], "group 7 is beyond what the ranks have drawn"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(old, reason):
    with pytest.raises(CheckpointError) as caught:
        all_parts(old, 1)
    message = str(caught.value)
    assert reason in message and "delete its folder to resume from the one before" in message
    assert "\n" not in message


class Rank:
    """Real queue, buffer and ledger of one rank, with groups of one trajectory."""

    def __init__(self, rank: int, size: int, saved: Part | None) -> None:
        start = saved[1]["num_drawn"] if saved else 0
        prompts = [
            EncodedPrompt(token_ids=(i,), grade=lambda _: 0.0, prompt_index=i)
            for i in range(NUM_PROMPTS)
        ]
        stream = (prompts[prompt_index_of(place)] for place in range(start, 10_000))
        batches = iter(lambda: list(islice(stream, size)), [])
        self.queue = PromptQueue(
            batches=batches, prompts=prompts, ranks=Ranks(rank=rank, size=size)
        )
        self.buffer, self.ledger = TrajectoryBuffer(group_size=1), PromptLedger()
        self.num_dropped = 0
        if saved is not None:
            trajectories, values = saved
            self.queue.load_state_dict(values["queue"])
            self.ledger.load_state_dict(values["ledger"])
            self.buffer.load_state_dict(values["buffer"])
            for one in trajectories:
                self.buffer.add_group([one])

    def draw(self) -> tuple[int, int]:
        """Draw a group and pause it with some tokens; returns its id and prompt."""
        drawn = self.queue.draw()
        made = new_trajectory(
            prompt_ids=drawn.prompt.token_ids,
            group_id=drawn.group_id,
            prompt_index=drawn.prompt.prompt_index,
            sample_index=0,
        )
        self.buffer.add_group([made])
        size = drawn.group_id % 4
        self.buffer.append(made, [3] * size, [-1.0] * size, policy_version=0, seed=0)
        if drawn.group_id not in self.ledger:
            self.ledger.add(drawn.group_id)
        self.ledger.move(drawn.group_id, PromptState.RUNNING)
        self.ledger.move(drawn.group_id, PromptState.PAUSED)
        return drawn.group_id, drawn.prompt.prompt_index

    def train(self, group_id: int) -> None:
        (one,) = self.buffer.group(group_id)
        self.buffer.set_outcome(one, Status.STOP, 0.0)
        self.buffer.pop_group(group_id, "trained")
        self.ledger.move(group_id, PromptState.FINISHED)
        self.ledger.move(group_id, PromptState.TRAINED)

    def drop(self, group_id: int) -> None:
        (one,) = self.buffer.pop_group(group_id, "dropped")
        self.ledger.move(group_id, PromptState.PENDING)
        self.queue.put_back(group_id, int(one["prompt_index"]), 1)

    def saved(self) -> Part:
        return self.buffer.trajectories(), {
            "buffer": self.buffer.state_dict(),
            "ledger": self.ledger.state_dict(),
            "queue": self.queue.state_dict(),
            "rollouter": {"num_dropped": 0},
        }


def act(rank: Rank, choose: random.Random) -> list[int]:
    """Do one thing at random; returns the group trained on, if any."""
    held = rank.buffer.group_ids()
    action = choose.choice(["draw", "draw", "train", "drop"]) if held else "draw"
    if action == "draw":
        group_id, prompt_index = rank.draw()
        assert prompt_index == prompt_index_of(group_id)
        return []
    group_id = choose.choice(held)
    rank.train(group_id) if action == "train" else rank.drop(group_id)
    return [group_id] if action == "train" else []


def check(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.buffer.check()
        rank.ledger.check()
    assert sum(rank.buffer.num_moved_in for rank in ranks) == 0
    assert sum(rank.ledger.num_moved_in for rank in ranks) == 0


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 10_000))
def test_every_place_of_the_stream_is_trained_once_whatever_the_ranks(sizes, seed):
    """DC03, DC11, DH03: ranks draw, train and drop at their own pace and change in number."""
    choose = random.Random(seed)
    trained: Counter[int] = Counter()
    saved: list[Part | None] = [None] * sizes[0]
    for size in sizes:
        parts = [one for one in saved if one is not None]
        saved = all_parts(parts, size) if parts else [None] * size
        ranks = [Rank(rank, size, saved[rank]) for rank in range(size)]
        check(ranks)
        for _ in range(choose.randrange(25)):
            trained.update(act(choose.choice(ranks), choose))
        check(ranks)
        saved = [rank.saved() for rank in ranks]
    # One rank alone trains on all that is left: every place below the stream's position, once.
    ((trajectories, values),) = all_parts(saved, 1)
    left = [*ids(trajectories), *(entry[0] for entry in values["queue"]["returned"])]
    trained.update(left)
    assert trained == Counter(range(values["num_drawn"]))
