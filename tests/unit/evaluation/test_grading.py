"""Grading beside generation: nobody waits for a slow problem, nothing is lost, errors come out."""

import threading
import time
from collections.abc import Sequence

import pytest

from rollverify.engine.engine import Completion
from rollverify.evaluation.grading import BackgroundGrading
from rollverify.evaluation.records import ProblemRecord, ResponseRecord

LIMIT_S = 30.0


def record(index: int, completions: Sequence[Completion]) -> ProblemRecord:
    """A record whose responses are as long as the completions."""
    responses = [
        ResponseRecord(reward=1.0, num_tokens=len(one.token_ids), finish_reason="stop", answer=None)
        for one in completions
    ]
    return ProblemRecord(
        index=index, problem_id="q", gold="1", greedy=responses[0], sampled=tuple(responses[1:])
    )


def completions(*lengths: int) -> list[Completion]:
    return [
        Completion(request_id="r", token_ids=[1] * n, logprobs=[0.0] * n, finish_reason="stop")
        for n in lengths
    ]


def test_every_problem_is_written_once_and_leaving_waits_for_it():
    written: list[ProblemRecord] = []

    def slow(index: int, answers: Sequence[Completion]) -> ProblemRecord:
        time.sleep(0.01)
        return record(index, answers)

    with BackgroundGrading(slow, written.append, 3) as grading:
        for index in range(20):
            grading.add(index, completions(index, 1))
    assert sorted(one.index for one in written) == list(range(20))
    assert all(one.greedy.num_tokens == one.index for one in written)


def test_a_slow_problem_does_not_hold_up_the_next():
    """Problem 0 is graded only once problem 1 is written."""
    second_written = threading.Event()

    def grade(index: int, answers: Sequence[Completion]) -> ProblemRecord:
        assert index == 1 or second_written.wait(LIMIT_S)
        return record(index, answers)

    def write(one: ProblemRecord) -> None:
        order.append(one.index)
        if one.index == 1:
            second_written.set()

    order: list[int] = []
    with BackgroundGrading(grade, write, 2) as grading:
        grading.add(0, completions(1))
        grading.add(1, completions(1))
    assert order == [1, 0]


def test_without_threads_a_problem_is_graded_and_written_at_once():
    written: list[tuple[int, str]] = []

    def write(one: ProblemRecord) -> None:
        written.append((one.index, threading.current_thread().name))

    with BackgroundGrading(record, write, 0) as grading:
        grading.add(7, completions(1))
        assert written == [(7, threading.current_thread().name)]


def test_what_grading_raises_reaches_the_caller():
    def broken(index: int, answers: Sequence[Completion]) -> ProblemRecord:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), BackgroundGrading(broken, print, 1) as grading:
        grading.add(0, completions(1))


def test_an_error_on_its_way_drops_what_has_not_begun():
    """Ctrl-C while problem 0 is graded by the only thread: 1 and 2 have no record, as if killed."""
    begun, may_end = threading.Event(), threading.Event()
    written: list[int] = []

    def grade(index: int, answers: Sequence[Completion]) -> ProblemRecord:
        begun.set()
        assert may_end.wait(LIMIT_S)
        return record(index, answers)

    with (
        pytest.raises(KeyboardInterrupt),
        BackgroundGrading(grade, lambda one: written.append(one.index), 1) as grading,
    ):
        for index in range(3):
            grading.add(index, completions(1))
        assert begun.wait(LIMIT_S)
        threading.Timer(0.2, may_end.set).start()
        raise KeyboardInterrupt
    assert written == [0]
