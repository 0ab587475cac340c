"""The ledger: every drawn prompt is in one state, changes are checked, counts add up."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollverify.errors import CheckpointError, LedgerError
from rollverify.rollout.ledger import TERMINAL, PromptLedger, PromptState

S = PromptState

LIVE = [state for state in S if state not in TERMINAL]

PATHS: dict[PromptState, list[PromptState]] = {
    S.PENDING: [],
    S.RUNNING: [S.RUNNING],
    S.PAUSED: [S.RUNNING, S.PAUSED],
    S.FINISHED: [S.RUNNING, S.FINISHED],
    S.TRAINED: [S.RUNNING, S.FINISHED, S.TRAINED],
    S.FILTERED: [S.RUNNING, S.PAUSED, S.FILTERED],
}
"""Moves that bring a new group into each state."""

MOVES = {
    (S.PENDING, S.RUNNING),
    (S.RUNNING, S.PAUSED),
    (S.RUNNING, S.FINISHED),
    (S.PAUSED, S.RUNNING),
    (S.PAUSED, S.FINISHED),
    (S.PAUSED, S.PENDING),
    (S.PAUSED, S.FILTERED),
    (S.FINISHED, S.TRAINED),
}


def ledger_of(*states: PromptState) -> PromptLedger:
    """Group i is in the i-th state."""
    ledger = PromptLedger()
    for group_id, state in enumerate(states):
        ledger.add(group_id)
        for to in PATHS[state]:
            ledger.move(group_id, to)
    return ledger


def counts_of(ledger: PromptLedger) -> dict[str, int]:
    """States that hold a group."""
    return {str(state): count for state, count in ledger.counts().items() if count}


def test_every_state_is_counted():
    ledger = ledger_of(*S, S.TRAINED)
    assert ledger.counts() == {state: 2 if state is S.TRAINED else 1 for state in S}
    assert ledger.num_added == 7
    ledger.check()


@pytest.mark.parametrize("to", S)
@pytest.mark.parametrize("state", LIVE)
def test_only_the_listed_changes_are_allowed(state, to):
    ledger = ledger_of(S.TRAINED, state)
    if (state, to) in MOVES:
        ledger.move(1, to)
        assert to in TERMINAL or ledger.state_of(1) is to
    else:
        with pytest.raises(LedgerError, match=f"group 1 cannot go from {state} to {to}"):
            ledger.move(1, to)
        assert ledger.state_of(1) is state
    ledger.check()


@pytest.mark.parametrize("state", TERMINAL)
def test_a_group_that_ended_is_never_used_again(state):
    """A group trained on twice, or trained on after it was filtered, is an error."""
    ledger = ledger_of(state)
    with pytest.raises(LedgerError, match="group 0 was never drawn here, has left, or has ended"):
        ledger.move(0, S.TRAINED)
    assert counts_of(ledger) == {str(state): 1}


def test_a_group_is_not_entered_twice():
    ledger = ledger_of(S.PAUSED)
    with pytest.raises(LedgerError, match="group 0 is paused and was entered again"):
        ledger.add(0)
    with pytest.raises(LedgerError, match="group 0 is paused and was entered again"):
        ledger.adopt(0, S.FINISHED)
    assert ledger.num_added == 1


def test_a_group_that_moves_between_ranks_is_counted_where_it_is():
    giver, taker = ledger_of(S.PAUSED, S.FINISHED), PromptLedger()
    taker.adopt(1, giver.release(1))
    assert taker.state_of(1) is S.FINISHED
    assert [counts_of(one) for one in (giver, taker)] == [{"paused": 1}, {"finished": 1}]
    assert [one.num_added for one in (giver, taker)] == [2, 0]
    assert [one.num_moved_in for one in (giver, taker)] == [-1, 1]
    giver.check()
    taker.check()
    with pytest.raises(LedgerError, match="group 1 was never drawn here, has left"):
        giver.release(1)


def test_a_lost_group_is_noticed():
    ledger = ledger_of(S.PAUSED, S.RUNNING, S.TRAINED)
    del ledger._live[1]
    with pytest.raises(LedgerError, match=r"holds 2 groups \(.*paused 1.*\); 3 drawn and 0 moved"):
        ledger.check()


def test_a_group_counted_twice_is_noticed():
    ledger = ledger_of(S.TRAINED)
    ledger._ended[S.TRAINED] += 1
    with pytest.raises(LedgerError, match="holds 2 groups"):
        ledger.check()


def test_the_state_comes_back_from_json():
    ledger = ledger_of(*S, S.TRAINED)
    again = PromptLedger()
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again.counts() == ledger.counts() and again.num_added == 7
    assert again.state_dict() == ledger.state_dict()
    assert [again.state_of(i) for i, state in enumerate(S) if state in LIVE] == LIVE
    assert again.num_moved_in == 0
    again.move(2, S.FILTERED)  # of the type the ledger works with, not plain text
    again.check()


def test_the_ledger_of_two_ranks_may_be_divided_anew_at_a_restart():
    """Counts added up on one rank, groups wherever they are: all ranks together add up."""
    first, second = PromptLedger(), PromptLedger()
    counts = {"num_added": 9, "trained": 5, "filtered": 1}
    first.load_state_dict({"live": [[1, "paused"]]} | counts)
    nothing = dict.fromkeys(counts, 0)
    second.load_state_dict({"live": [[0, "pending"], [3, "paused"]]} | nothing)
    for one in (first, second):
        one.check()
    assert [first.num_moved_in, second.num_moved_in] == [1 + 5 + 1 - 9, 2]
    second.load_state_dict({"live": [[0, "pending"]]} | nothing)
    assert first.num_moved_in + second.num_moved_in == -1  # group 3 was lost


@pytest.mark.parametrize(
    ("live", "message"),
    [
        ([[1, "lost"]], "'lost' is not a valid PromptState"),
        ([[1, "trained"]], "listed twice or has ended"),
        ([[1, "paused"], [1, "pending"]], "listed twice or has ended"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(live, message):
    ledger = ledger_of(S.PAUSED)
    before = ledger.state_dict()
    with pytest.raises(CheckpointError, match=message):
        ledger.load_state_dict({"live": live, "num_added": 1, "trained": 0, "filtered": 0})
    assert ledger.state_dict() == before


def call_on(ranks: tuple[PromptLedger, ...], rank: int, group_id: int, call: str) -> bool:
    """Whether the call was accepted. "give" moves a group to the other rank."""
    try:
        if call == "add":
            ranks[rank].add(group_id)
        elif call == "give":
            ranks[1 - rank].adopt(group_id, ranks[rank].release(group_id))
        else:
            ranks[rank].move(group_id, PromptState(call))
    except LedgerError:
        return False
    return True


def place_after(place: tuple[int, str] | None, call: str) -> tuple[int, str] | None:
    """The model: (rank, state) after a call, None if it has to be refused."""
    if place is None:
        return (0, "pending") if call == "add" else None
    rank, state = place
    if call == "give":
        return None if state in TERMINAL else (1 - rank, state)
    return (rank, call) if (state, call) in MOVES else None


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["add", "give", *S])), max_size=60))
def test_whatever_happens_every_group_is_in_one_state_on_one_rank(calls):
    ranks = (PromptLedger(), PromptLedger())
    places: dict[int, tuple[int, str]] = {}
    for group_id, call in calls:
        place = places.get(group_id)
        if call == "add" and place and place[1] in TERMINAL:
            continue  # group ids are unique in a run, so the ledger forgets those that ended
        after = place_after(place, call)
        assert call_on(ranks, place[0] if place else 0, group_id, call) == (after is not None)
        if after is not None:
            places[group_id] = after
        for rank, ledger in enumerate(ranks):
            ledger.check()
            expected = Counter(state for at, state in places.values() if at == rank)
            assert counts_of(ledger) == expected
    assert sum(one.num_moved_in for one in ranks) == 0
