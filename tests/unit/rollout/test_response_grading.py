"""Grading beside the engine: it overlaps, changes nothing that is generated, and loses nothing."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.fakes import FakeEngine
from support.rollout_parts import NUM_PROMPTS, Parts, make_parts, names

from rollverify.config.tables import DynamicSamplingConfig
from rollverify.engine.engine import Completion
from rollverify.rollout.prompt_queue import EncodedPrompt
from rollverify.rollout.requests import ResponseGrading
from rollverify.rollout.trajectory import stacked

LIMIT_S = 30.0


def prompts(grade: Callable[[Sequence[int]], float]) -> list[EncodedPrompt]:
    return [
        EncodedPrompt(token_ids=(number,), grade=grade, prompt_index=number)
        for number in range(NUM_PROMPTS)
    ]


class NoticedEngine(FakeEngine):
    """Sets an event in its step of number 3."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.third_step = threading.Event()

    def step(self) -> list[Completion]:
        if self.num_steps + 1 == 3:
            self.third_step.set()
        return super().step()


def test_the_engine_goes_on_while_a_response_is_graded():
    """Response 0/0 ends in step 1; its grading ends only after step 3 has begun."""
    engine = NoticedEngine(stop_after={"0/0": 1, "1/0": 5})

    def grade(ids: Sequence[int]) -> float:
        assert engine.third_step.wait(LIMIT_S)
        return float(len(ids))

    parts = make_parts(engine, prompts=prompts(grade), num_graders=1, is_on_policy=True)
    finished, _ = parts.collect(0)
    assert stacked(finished, "reward").tolist() == [1.0, 5.0]
    parts.check()


def slowly(ids: Sequence[int]) -> float:
    """Short responses take longest."""
    time.sleep(0.01 / len(ids))
    return float(len(ids))


def run(num_graders: int) -> list[tuple[list[tuple[int, int]], list[float], Any]]:
    """Four partial phases with dynamic sampling, which looks at rewards before a phase ends."""
    stop_after = {f"{g}/{s}": 2 + (g * 7 + s * 3 * (g % 3)) % 11 for g in range(90) for s in (0, 1)}
    parts: Parts = make_parts(
        FakeEngine(stop_after=stop_after),
        prompts=prompts(slowly),
        num_graders=num_graders,
        group_size=2,
        num_in_flight=6,
        dynamic_sampling=DynamicSamplingConfig(enable=True, max_dropped_batches=50.0),
    )
    phases = []
    for version in range(4):
        finished, unfinished = parts.collect(version)
        parts.rollouter.mark_trained()
        parts.check()
        rewards = [*stacked(finished, "reward").tolist(), *stacked(unfinished, "reward").tolist()]
        phases.append((names(finished) + names(unfinished), rewards, parts.rollouter.given_up))
    return phases


def test_threads_change_neither_what_is_generated_nor_its_reward():
    in_place = run(0)
    assert run(1) == in_place and run(3) == in_place
    assert any(given_up.num_groups for *_, given_up in in_place)


def test_what_a_grading_raises_ends_the_phase():
    def broken(ids: Sequence[int]) -> float:
        raise ZeroDivisionError

    parts = make_parts(FakeEngine(stop_after={"0/0": 1}), prompts=prompts(broken), num_graders=1)
    with pytest.raises(ZeroDivisionError):
        parts.collect(0)


def test_without_threads_a_reward_is_there_at_once():
    found: list[float] = []
    ResponseGrading(0).begin(lambda: 2.0, found.append)
    assert found == [2.0]


def test_settling_stores_every_reward_once_and_in_order():
    grading, found = ResponseGrading(4), []
    for number in range(20):
        grading.begin(lambda n=number: slowly(torch.arange(1 + n % 3).tolist()) + n, found.append)
    grading.settle()
    grading.settle()
    assert found == [1 + n % 3 + n for n in range(20)]
