"""Running requests to their end: nothing lost, nothing twice."""

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
    completions = run_requests(engine, [request("a"), request("b"), request("c", 1)])
    assert completions["a"].token_ids == [100, 101, 102, 103]
    assert completions["b"].token_ids == [100, EOS]
    assert completions["c"].token_ids == [100]
    assert [completions[name].finish_reason for name in "abc"] == ["length", "stop", "length"]


def test_no_requests_give_nothing():
    engine = FakeEngine()
    assert run_requests(engine, []) == {} and engine.num_steps == 0


def test_a_lost_request_is_an_error_that_names_it():
    engine = FakeEngine()
    engine.lost = {"b"}
    with pytest.raises(RolloutError, match=r"lost requests \['b'\]"):
        run_requests(engine, [request("a"), request("b")])


def test_two_requests_of_one_name_are_refused():
    with pytest.raises(RolloutError, match="two requests are called 'a'"):
        run_requests(FakeEngine(), [request("a"), request("a")])


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
    with pytest.raises(RolloutError, match="unknown request 'a-x7'"):
        run_requests(RenamingEngine(), [request("a")])


class RepeatingEngine(FakeEngine):
    """Returns each completion twice."""

    def step(self) -> list[Completion]:
        return [one for one in super().step() for _ in range(2)]


def test_a_request_answered_twice_is_an_error():
    """PR11: repeated output must not be counted, or kept, twice."""
    with pytest.raises(RolloutError, match="'a' came back twice"):
        run_requests(RepeatingEngine(), [request("a")])
