"""Problems are handed over as soon as they are complete, and the engine stays full."""

import pytest
from support.fakes import FakeEngine

from rollverify.engine.generation import problem_requests, request_name, run_problems
from rollverify.errors import RolloutError


def problems(count: int, num_samples: int = 1):
    """Problems 0, 1, ... with one greedy and `num_samples` sampled responses of up to 4 tokens."""
    for index in range(count):
        requests = problem_requests(
            index,
            [index],
            num_samples=num_samples,
            temperature=0.6,
            top_p=0.95,
            max_response_tokens=4,
            run_seed=3,
        )
        yield index, requests


def test_a_problem_is_handed_over_when_its_last_response_is_done():
    # Problem 1 needs 2 tokens at most, problem 0 needs 4.
    engine = FakeEngine(stop_after={"eval/1/0": 1, "eval/1/1": 2})
    order = [(index, engine.num_steps) for index, _ in run_problems(engine, problems(2), 8)]
    assert order == [(1, 2), (0, 4)]


def test_completions_come_in_the_order_of_the_requests():
    engine = FakeEngine(stop_after={"eval/0/2": 1, "eval/0/0": 3})
    found = dict(run_problems(engine, problems(1, 2), 8))
    assert [one.request_id for one in found[0]] == [request_name(0, s) for s in range(3)]
    assert [len(one.token_ids) for one in found[0]] == [3, 4, 1]


def test_the_next_problem_is_taken_when_a_slot_is_free():
    """5 problems of 2 responses and 3 slots: 4 requests are given out first, then 2 at a time."""
    engine = FakeEngine(max_num_seqs=3)
    most = [len(engine.requests) for _ in run_problems(engine, problems(5), 3)]
    assert len(most) == 5 and most[0] == 4 and most[-1] == 10


def test_without_a_limit_all_problems_are_taken_at_once():
    engine = FakeEngine(max_num_seqs=3)
    assert [len(engine.requests) for _ in run_problems(engine, problems(5))] == [10] * 5
    names = [request_name(index, sample) for index in range(5) for sample in range(2)]
    assert [request.request_id for request in engine.requests] == names


def test_no_problem_asks_for_nothing():
    engine = FakeEngine()
    assert list(run_problems(engine, [], 8)) == [] and engine.num_steps == 0


def test_a_lost_request_is_noticed():
    engine = FakeEngine()
    engine.lost = {"eval/1/0"}
    with pytest.raises(RolloutError, match="engine lost requests"):
        list(run_problems(engine, problems(2), 8))


def test_an_unknown_request_is_noticed():
    engine = FakeEngine()
    engine.add_request(next(problems(7))[1][0])
    with pytest.raises(RolloutError, match="unknown request 'eval/0/0'"):
        list(run_problems(engine, [list(problems(2))[1]], 8))


def test_the_greedy_request_ignores_temperature_and_top_p():
    greedy, sampled = next(problems(1))[1]
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)
    assert (sampled.temperature, sampled.top_p, sampled.max_tokens) == (0.6, 0.95, 4)
