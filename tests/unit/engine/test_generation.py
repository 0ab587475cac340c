"""Running requests to their end: nothing lost, nothing twice, costs counted."""

import pytest
from support.fakes import EOS, FakeEngine

from rollverify.engine.engine import Completion, GenerationRequest
from rollverify.engine.generation import run_requests
from rollverify.errors import RolloutError


def request(name: str, max_tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, token_ids=(1,), max_tokens=max_tokens, seed=0, temperature=1.0
    )


def test_every_request_comes_back_under_its_own_id():
    engine = FakeEngine(version=1, stop_after={"b": 2})
    completions, _ = run_requests(engine, [request("a"), request("b"), request("c", 1)], 8)
    assert completions["a"].token_ids == [100, 101, 102, 103]
    assert completions["b"].token_ids == [100, EOS]
    assert completions["c"].token_ids == [100]
    assert [completions[name].finish_reason for name in "abc"] == ["length", "stop", "length"]


def test_costs_are_counted():
    # Lengths 4, 2 and 1: 7 tokens in 4 steps. Running 3, 2, 1, 1 requests on 2 slots: 2+2+1+1 = 6
    # of the 2 * 4 = 8 that the slots could have done.
    requests = [request("a"), request("b", 2), request("c", 1)]
    _, stats = run_requests(FakeEngine(), requests, max_num_seqs=2)
    assert (stats.num_tokens, stats.num_steps) == (7, 4)
    assert (stats.slot_steps, stats.capacity) == (6, 8)


def test_slots_beyond_the_requests_do_not_count_as_idle():
    # One request of 4 tokens on an engine with 256 slots is busy all the time.
    _, stats = run_requests(FakeEngine(), [request("a")], max_num_seqs=256)
    assert stats.slot_steps == stats.capacity == 4


def test_no_requests_give_nothing():
    completions, stats = run_requests(FakeEngine(), [], 8)
    assert completions == {}
    assert (stats.num_tokens, stats.num_steps, stats.capacity) == (0, 0, 0)


def test_a_lost_request_is_an_error_that_names_it():
    engine = FakeEngine()
    engine.lost = {"b"}
    with pytest.raises(RolloutError, match=r"lost requests \['b'\]"):
        run_requests(engine, [request("a"), request("b")], 8)


def test_two_requests_of_one_name_are_refused():
    with pytest.raises(RolloutError, match="two requests are called 'a'"):
        run_requests(FakeEngine(), [request("a"), request("a")], 8)


class RenamingEngine(FakeEngine):
    """Returns ids as `<id>-x7`."""

    def step(self) -> list[Completion]:
        return [
            Completion(
                request_id=f"{one.request_id}-x7",
                token_ids=one.token_ids,
                logprobs=one.logprobs,
                finish_reason=one.finish_reason,
            )
            for one in super().step()
        ]


def test_an_engine_that_renames_requests_is_an_error():
    """PR09: an id that the engine changed is not quietly dropped."""
    with pytest.raises(
        RolloutError, match=r"lost requests \['a'\] and returned unknown \['a-x7'\]"
    ):
        run_requests(RenamingEngine(), [request("a")], 8)


class RepeatingEngine(FakeEngine):
    """Returns each completion twice."""

    def step(self) -> list[Completion]:
        return [one for one in super().step() for _ in range(2)]


def test_a_request_answered_twice_is_an_error():
    """PR11: repeated output must not be counted, or kept, twice."""
    with pytest.raises(RolloutError, match="'a' came back twice"):
        run_requests(RepeatingEngine(), [request("a")], 8)
