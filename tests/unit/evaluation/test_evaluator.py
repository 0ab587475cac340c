"""Grading beside generation: nobody waits for a slow problem, nothing is lost, errors come out."""

import threading
import time

import pytest
from support.fakes import FakeEngine
from unit.evaluation.examples import Answers, encoded, evaluator

from rollverify.evaluation.records import ProblemRecord

LIMIT_S = 30.0


def test_every_problem_is_kept_once_and_running_waits_for_it():
    kept: list[ProblemRecord] = []

    def slow(ids: list[int]) -> float:
        time.sleep(0.01)
        return 1.0

    stops = {f"eval/{index}/0": 1 + index % 4 for index in range(20)}
    evaluator(FakeEngine(stop_after=stops), encoded(20, slow), Answers(3)).run(kept.append)
    assert sorted(one.index for one in kept) == list(range(20))
    assert all(one.greedy.num_tokens == 1 + one.index % 4 for one in kept)
    assert all(one.greedy.is_right and len(one.sampled) == 2 for one in kept)


def test_a_slow_problem_does_not_hold_up_the_next():
    """Problem 0 is graded only once problem 1 is kept."""
    second_kept = threading.Event()

    def wait(ids: list[int]) -> float:
        assert second_kept.wait(LIMIT_S)
        return 1.0

    def keep(one: ProblemRecord) -> None:
        order.append(one.index)
        if one.index == 1:
            second_kept.set()

    order: list[int] = []
    problems = [encoded(1, wait)[0], encoded(2, lambda _: 1.0)[1]]
    evaluator(FakeEngine(), problems, Answers(2)).run(keep)
    assert order == [1, 0]


def test_without_threads_a_problem_is_graded_and_kept_at_once():
    """Problem 1 gets its slots only when problem 0 is complete, after four steps."""
    engine = FakeEngine(max_num_seqs=3)
    kept: list[tuple[int, str, int]] = []

    def keep(one: ProblemRecord) -> None:
        kept.append((one.index, threading.current_thread().name, engine.num_steps))

    evaluator(engine, encoded(2, lambda _: 1.0), max_num_seqs=3).run(keep)
    name = threading.current_thread().name
    assert kept == [(0, name, 4), (1, name, 8)]


def test_what_grading_raises_reaches_the_caller():
    def broken(ids: list[int]) -> float:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        evaluator(FakeEngine(), encoded(1, broken), Answers(1)).run(print)


class InterruptedEngine(FakeEngine):
    """Problems 0, 1 and 2 are complete after the first step, and the second is Ctrl-C."""

    def __init__(self, begun: threading.Event, may_end: threading.Event) -> None:
        stops = {f"eval/{index}/{sample}": 1 for index in range(3) for sample in range(3)}
        super().__init__(stop_after=stops)
        self._begun, self._may_end = begun, may_end

    def step(self):
        if self.num_steps:
            assert self._begun.wait(LIMIT_S)
            threading.Timer(0.2, self._may_end.set).start()
            raise KeyboardInterrupt
        return super().step()


def test_an_error_on_its_way_drops_what_has_not_begun():
    """Ctrl-C while problem 0 is graded by the only thread: 1 and 2 have no record, as if killed."""
    begun, may_end = threading.Event(), threading.Event()
    kept: list[int] = []

    def grade(ids: list[int]) -> float:
        begun.set()
        assert may_end.wait(LIMIT_S)
        return 1.0

    engine = InterruptedEngine(begun, may_end)
    with pytest.raises(KeyboardInterrupt):
        evaluator(engine, encoded(4, grade), Answers(1)).run(lambda one: kept.append(one.index))
    assert kept == [0]
