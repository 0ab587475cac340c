"""The prompt queue: what came back goes first, every rank has its share, nothing is skipped."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollverify.errors import CheckpointError
from rollverify.ranks import Ranks
from rollverify.rollout.prompt_queue import DrawnPrompt, EncodedPrompt, PromptQueue

NUM_PROMPTS = 5
PROMPTS = [
    EncodedPrompt(token_ids=(10 + index,), grade=lambda ids: float(len(ids)), prompt_index=index)
    for index in range(NUM_PROMPTS)
]


def stream(world_size: int, first_batch: int = 0) -> Iterator[list[EncodedPrompt]]:
    """Prompts 0, 1, ... over and over, `world_size` in each batch."""
    batch = first_batch
    while True:
        yield [PROMPTS[(batch * world_size + i) % NUM_PROMPTS] for i in range(world_size)]
        batch += 1


def make_queue(rank: int = 0, world_size: int = 1, first_batch: int = 0) -> PromptQueue:
    return PromptQueue(
        batches=stream(world_size, first_batch),
        prompts=PROMPTS,
        ranks=Ranks(rank=rank, size=world_size),
    )


def ids(drawn: list[DrawnPrompt]) -> list[tuple[int, int]]:
    """(group id, prompt index) of each."""
    return [(one.group_id, one.prompt.prompt_index) for one in drawn]


def test_the_ranks_share_the_stream_without_gap_or_overlap():
    """Two ranks, three draws each: groups 0 to 5 of prompts 0, 1, 2, 3, 4, 0."""
    queues = [make_queue(rank, 2) for rank in range(2)]
    first, second = ([queue.draw() for _ in range(3)] for queue in queues)
    assert ids(first) == [(0, 0), (2, 2), (4, 4)]
    assert ids(second) == [(1, 1), (3, 3), (5, 0)]
    assert [one.num_requests for one in first + second] == [0] * 6


def test_ranks_may_be_at_different_places_of_the_stream():
    fast, slow = make_queue(0, 2), make_queue(1, 2)
    assert ids([fast.draw() for _ in range(4)])[-1] == (6, 1)
    assert ids([slow.draw()]) == [(1, 1)]
    assert [fast.num_streamed, slow.num_streamed] == [4, 1]


def test_prompts_that_came_back_are_drawn_before_the_stream_by_group_id():
    queue = make_queue()
    drawn = [queue.draw() for _ in range(4)]
    for group_id, num_requests in ((3, 1), (1, 6), (2, 2)):
        queue.put_back(group_id, drawn[group_id].prompt.prompt_index, num_requests)
    assert len(queue.returned_ids()) == 3
    again = [queue.draw() for _ in range(4)]
    assert ids(again) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [one.num_requests for one in again] == [6, 2, 1, 0]
    assert again[0].prompt is PROMPTS[1]
    assert (queue.returned_ids(), queue.num_streamed) == ([], 5)


def test_a_prompt_may_come_back_again_after_it_was_drawn():
    queue = make_queue()
    queue.draw()
    for num_requests in (1, 2):
        queue.put_back(0, 0, num_requests)
        assert queue.draw().num_requests == num_requests


def test_a_prompt_cannot_come_back_twice_at_once():
    queue = make_queue()
    queue.put_back(4, 2, 1)
    with pytest.raises(ValueError, match="group 4 was put back twice"):
        queue.put_back(4, 2, 1)


@pytest.mark.parametrize(("group", "prompt", "requests"), [(-1, 0, 0), (0, 5, 0), (0, 0, -1)])
def test_numbers_out_of_range_are_refused(group, prompt, requests):
    with pytest.raises(ValueError, match=f"group {group} cannot be put back with prompt {prompt}"):
        make_queue().put_back(group, prompt, requests)


def test_the_state_comes_back_from_json():
    """The stream itself goes on at batch 4, where the loader's own state puts it."""
    queue = make_queue()
    for _ in range(4):
        queue.draw()
    for group_id in (3, 0):
        queue.put_back(group_id, group_id, 2)
    state = json.loads(json.dumps(queue.state_dict()))
    again = make_queue(first_batch=4)
    again.load_state_dict(state)
    assert again.state_dict() == queue.state_dict() == state
    expected = [(0, 0, 2), (3, 3, 2), (4, 4, 0), (5, 0, 0)]
    drawn = [again.draw() for _ in range(4)]
    assert [(one.group_id, one.prompt.prompt_index, one.num_requests) for one in drawn] == expected


def test_loading_replaces_what_came_back_before():
    queue = make_queue()
    queue.put_back(1, 1, 1)
    queue.load_state_dict({"returned": [[2, 2, 3]], "num_streamed": 7})
    assert queue.state_dict() == {"returned": [[2, 2, 3]], "num_streamed": 7}


@pytest.mark.parametrize(
    ("returned", "message"),
    [([[0, 0, 1], [7, 99, 1]], "prompt 99 of 5"), ([[3, 0, 1], [3, 0, 1]], "put back twice")],
)
def test_a_state_of_another_training_set_is_refused_and_changes_nothing(returned, message):
    queue = make_queue()
    queue.put_back(1, 1, 1)
    with pytest.raises(CheckpointError, match=message):
        queue.load_state_dict({"returned": returned, "num_streamed": 7})
    assert queue.state_dict() == {"returned": [[1, 1, 1]], "num_streamed": 0}


@given(st.lists(st.integers(-1, 3), max_size=60))
def test_whatever_comes_back_no_prompt_is_lost_or_drawn_twice(choices):
    """-1 draws; n >= 0 puts back the n-th of the groups that are out, if there are so many."""
    queue, out = make_queue(), {}
    for choice in choices:
        if choice == -1:
            one = queue.draw()
            assert one.group_id not in out and one.prompt.prompt_index == one.group_id % NUM_PROMPTS
            out[one.group_id] = one
        elif choice < len(out):
            one = out.pop(sorted(out)[choice])
            queue.put_back(one.group_id, one.prompt.prompt_index, one.num_requests + 1)
        assert len(out) + len(queue.returned_ids()) == queue.num_streamed
    rest = [queue.draw().group_id for _ in range(len(queue.returned_ids()))]
    assert rest == sorted(rest) and sorted([*out, *rest]) == list(range(queue.num_streamed))


def test_upcoming_groups_are_those_drawn_next():
    made = make_queue(rank=1, world_size=2)
    made.draw()
    made.put_back(1, 0, 1)
    ahead = made.upcoming(3)
    assert ahead == [1, 3, 5] and ahead == [made.draw().group_id for _ in range(3)]
