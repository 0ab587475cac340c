"""Rows of expert ids: one per fed token, kept with the tokens through pause, resume and cut."""

import pytest
import torch
from support.fakes import FakeEngine, trajectory
from support.rollout_parts import Parts, make_parts
from tensordict import TensorDict
from torch import Tensor

from rollverify.errors import RolloutError
from rollverify.rollout.trajectory import (
    ROUTING,
    append_segment,
    check_routed,
    is_routed,
    join_routing,
    num_changed_rows,
    num_fed_tokens,
    num_rows,
    truncate,
    validate_trajectory,
)


def rows(*experts: int) -> Tensor:
    """Rows of 1 layer with 1 expert each."""
    return torch.tensor([[[one]] for one in experts], dtype=torch.uint8)


def routed(prompt: int = 3, response: int = 4) -> TensorDict:
    """The token at position j went to expert j + 1."""
    made = trajectory(range(prompt), range(response))
    join_routing(made, rows(*range(1, num_fed_tokens(made) + 1)), replace=False)
    return made


def experts(made: TensorDict) -> list[int]:
    return made[ROUTING].flatten().tolist()


def generate(
    parts: Parts, trajectories: list[TensorDict], *, num_steps: int, version: int = 0
) -> None:
    """That many tokens of each, then a pause."""
    parts.engine.version = version
    parts.loop.begin(version, len(trajectories))
    for one in trajectories:
        parts.rollouter._start(one)
    for _ in range(num_steps):
        parts.loop.step()
    if parts.loop.num_in_flight:
        parts.rollouter._pause_all(None)


def test_every_token_but_the_last_has_a_row():
    """RR01: P=3, R=4: 6 rows."""
    made = routed()
    assert experts(made) == [1, 2, 3, 4, 5, 6]
    assert is_routed(made)
    validate_trajectory(made)


@pytest.mark.parametrize("number", [5, 7, 8])
def test_another_number_of_rows_is_refused(number):
    """RR01: 5 or 8 rows for 7 tokens are an error, and so is one for the token not fed."""
    made = trajectory(range(3), range(4))
    with pytest.raises(RolloutError, match=r"group 0 sample 0: routing .* for 6 tokens"):
        join_routing(made, rows(*range(number)), replace=False)
    assert num_rows(made) == 0


def test_a_resumed_response_gets_the_row_of_its_last_token_before_the_pause():
    """RR03: P=3, 2 + 3 response tokens; row 4 was missing at the pause: [1, ..., 7], no 0."""
    made = routed(prompt=3, response=2)
    assert experts(made) == [1, 2, 3, 4]
    append_segment(made, [5, 6, 7], [-1.0] * 3, policy_version=1, seed=0)
    assert not is_routed(made)
    join_routing(made, rows(*range(1, 8)), replace=False)
    assert experts(made) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("replace", "expected"), [(False, [1, 2, 3, 4]), (True, [8, 2, 3, 4])])
def test_rows_of_a_resumed_context_are_kept_or_replaced(replace, expected):
    made = routed(prompt=2, response=2)
    append_segment(made, [5], [-1.0], policy_version=1, seed=0)
    join_routing(made, rows(8, 2, 3, 4), replace=replace)
    assert experts(made) == expected


def test_changed_rows_are_counted_by_their_sets_of_experts():
    made = trajectory([1], [2, 3, 4])
    join_routing(made, torch.tensor([[[0, 1]], [[2, 3]], [[4, 5]]]).byte(), replace=False)
    again = torch.tensor([[[1, 0]], [[2, 4]], [[4, 5]], [[6, 7]]]).byte()
    assert num_changed_rows(made, again) == 1
    assert num_changed_rows(trajectory([1], [2]), again) == 0


def test_rows_are_cut_with_the_tokens():
    """RR07: P=3, R=4, 2 response tokens kept: 5 tokens, 4 rows."""
    made = routed()
    truncate(made, 2)
    assert experts(made) == [1, 2, 3, 4]
    validate_trajectory(made)


def test_a_response_cut_to_nothing_has_no_rows():
    made = routed()
    truncate(made, 0)
    assert ROUTING not in made
    assert is_routed(made)
    validate_trajectory(made)


def test_a_cut_row_leaves_no_memory_behind():
    made = routed()
    truncate(made, 1)
    assert made[ROUTING].untyped_storage().nbytes() == 3  # P + 1 - 1 rows of one byte


@pytest.mark.parametrize(
    ("held", "except_version", "expected"),
    [
        (6, None, True),
        (5, None, False),
        # Tokens of version 1 get theirs later: 3 + 2 - 1 rows for those of version 0.
        (4, 1, True),
        (3, 1, False),
        (0, 1, False),
        (6, 1, True),
        (4, 2, False),
    ],
)
def test_only_tokens_of_the_version_left_out_may_lack_their_rows(held, except_version, expected):
    made = trajectory(range(3), [1, 2])
    append_segment(made, [3, 4], [-1.0] * 2, policy_version=1, seed=0)
    if held:
        made[ROUTING] = rows(*range(held))
    assert is_routed(made, except_version=except_version) is expected


def test_a_response_under_the_version_left_out_alone_needs_no_row():
    assert is_routed(trajectory(range(3), [1, 2]), except_version=0)
    assert is_routed(trajectory(range(3), []), except_version=1)


def test_groups_without_the_rows_of_their_tokens_start_again(caplog):
    """One response of group 0 lost its rows, as in a phase without replay; 2 has not begun."""
    parts = make_parts(FakeEngine(records_routing=True), routing="keep", group_size=2)
    for _ in range(3):
        parts.rollouter._draw_group()
    begun = parts.buffer.trajectories()[:4]
    generate(parts, begun, num_steps=2)
    del begun[1][ROUTING]
    with caplog.at_level("INFO"):
        parts.rollouter.drop_unrouted(recorded_later=None)
    assert parts.buffer.group_ids() == [1, 2]
    assert parts.queue.returned_ids() == [0] and parts.rollouter.num_dropped == 1
    assert "1 unfinished groups are dropped and start again: the experts of some" in caplog.text
    parts.check()


def test_ids_above_255_are_kept():
    """RR09: expert 300 stays 300; one byte would make it 44."""
    made = trajectory([1], [2])
    join_routing(made, torch.tensor([[[300]]], dtype=torch.int16), replace=False)
    assert experts(made) == [300]


def test_rows_that_do_not_go_on_from_the_held_ones_are_refused():
    made = routed(prompt=1, response=1)
    append_segment(made, [5], [-1.0], policy_version=0, seed=0)
    with pytest.raises(RolloutError, match=r"\[1, 2\] torch.uint8 per token does not go on"):
        join_routing(made, torch.zeros(2, 1, 2, dtype=torch.uint8), replace=False)


def test_missing_rows_are_an_error_and_never_expert_0():
    made = routed(prompt=1, response=1)
    append_segment(made, [5], [-1.0], policy_version=0, seed=0)
    with pytest.raises(RolloutError, match="group 0 sample 0: 1 rows of expert ids for 2 tokens"):
        check_routed(made)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(7, 1, 1, dtype=torch.uint8), "at most 6 rows"),
        (torch.zeros(6, 1, dtype=torch.uint8), "at most 6 rows"),
        (torch.zeros(6, 1, 1), "must be uint8 or int16, got torch.float32"),
    ],
)
def test_rows_that_fit_no_token_are_invalid(value, message):
    made = trajectory(range(3), range(4))
    made[ROUTING] = value
    with pytest.raises(ValueError, match=message):
        validate_trajectory(made)


def resumed_once(parts: Parts) -> TensorDict:
    """One response: 2 tokens under version 0, paused, 2 more under version 1."""
    parts.rollouter._draw_group()
    (one,) = parts.buffer.trajectories()
    for version in (0, 1):
        generate(parts, [one], num_steps=2, version=version)
    return one


@pytest.mark.parametrize(
    ("on_resume", "expected"), [("keep", [1, 2, 13, 14]), ("replace", [11, 12, 13, 14])]
)
def test_routing_goes_with_the_tokens_from_the_engine_on(on_resume, expected):
    """Prompt of 1. Version 0 routes position j to j + 1, version 1 to j + 11; 2 rows were held."""
    engine = FakeEngine(records_routing=True)
    parts = make_parts(engine, routing=on_resume, max_response_tokens=4)
    one = resumed_once(parts)
    assert one[ROUTING][:, 0, 0].tolist() == expected
    assert (parts.loop.stats.num_held_rows, parts.loop.stats.num_changed_rows) == (2, 2)


def test_tokens_without_their_experts_are_refused():
    parts = make_parts(FakeEngine(), routing="keep")
    parts.rollouter._draw_group()
    parts.loop.begin(0, 1)
    parts.loop.start(parts.buffer.trajectories()[0])
    parts.loop.step()
    with pytest.raises(RolloutError, match="tokens without their experts"):
        parts.loop.pause()
