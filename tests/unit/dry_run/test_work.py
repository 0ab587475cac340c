"""Counts of a settled step against a simulation of slots that are always full."""

import random
from typing import Any

import pytest
import torch

from rollverify.config.load import read_config
from rollverify.config.tables import Config
from rollverify.dry_run.lengths import Lengths
from rollverify.dry_run.memory import Layout
from rollverify.dry_run.work import Assumptions, Pass, Work, work_of

GROUPS = [[2, 2, 30, 4], [8, 20, 8, 8], [5, 5, 5, 5]]
PROMPT = 4
MANY = 10**9


def config_of(method: str = "rollverify", **settings: dict[str, Any]) -> Config:
    rollout = {"prompts_per_step": 16, "group_size": 4, "oversampling": 2.0}
    rollout |= {"max_prompt_tokens": 8 * PROMPT, "max_response_tokens": 30}
    return read_config(settings={"rollout": rollout, "method": {"name": method}, **settings})


def counted(config: Config, acceptance: float, *, cached: int = MANY, shard: int = 4) -> Work:
    lengths = Lengths(torch.tensor(GROUPS, dtype=torch.float64))
    assumed = Assumptions(lengths=lengths, acceptance=acceptance)
    return work_of(config, Layout(shard=shard), cached, assumed)


class Slots:
    """Slots that take the next response of a stream of groups as soon as they are free."""

    def __init__(self, number: int) -> None:
        self.random, self.number, self.time = random.Random(0), number, 0
        self.queue: list[tuple[list[int], int]] = []
        self.running: list[tuple[int, int, list[int], int]] = []
        """(start, end, ends in the group so far, length)."""
        self.finished: list[tuple[int, list[int], int]] = []

    def fill(self) -> None:
        """Start responses in the free slots."""
        while len(self.running) < self.number:
            if not self.queue:
                ends: list[int] = []
                self.queue = [(ends, length) for length in self.random.choice(GROUPS)]
            ends, length = self.queue.pop(0)
            self.running.append((self.time, self.time + length, ends, length))

    def step(self) -> None:
        """One token for each."""
        self.time += 1
        for _, end, ends, length in [one for one in self.running if one[1] == self.time]:
            ends.append(length)
            self.finished.append((end, ends, length))
        self.running = [one for one in self.running if one[1] > self.time]
        self.finished = [one for one in self.finished if len(one[1]) < 4]

    def held(self) -> Pass:
        """Over unfinished responses, each in the middle of a token, and over waiting ones."""
        lengths = [self.time + 0.5 - start for start, *_ in self.running]
        tokens = [PROMPT + length for length in [*lengths, *(n for *_, n in self.finished)]]
        return Pass(tokens=sum(tokens), attended=sum(n * n / 2 for n in tokens))


def test_held_tokens_are_those_of_a_simulation() -> None:
    slots, found = Slots(128), Pass()
    for time in range(1900):
        slots.fill()
        if time >= 400:
            found += slots.held() * (1 / 1500)
        slots.step()
    work = counted(config_of(), 1.0)
    assert work.verification.tokens == pytest.approx(found.tokens, rel=0.01)
    assert work.verification.attended == pytest.approx(found.attended, rel=0.01)
    # 16 groups of mean 34 tokens in 128 slots
    assert work.generated == pytest.approx(16 * 102 / 3)
    assert work.decode_steps == pytest.approx(16 * 102 / 3 / 128)


def test_what_is_cut_is_decoded_again() -> None:
    whole, cut = counted(config_of(), 1.0), counted(config_of(), 0.75)
    prompts = 16 * PROMPT
    held = [128 * sum(n * n for g in GROUPS for n in g) / 2 / 102]
    held.append(128 * sum(n * (max(g) - n) for g in GROUPS for n in g) / 102)
    assert cut.generated - whole.generated == pytest.approx(0.25 * sum(held))
    assert cut.prefill.tokens - prompts == pytest.approx(0.75 * (whole.prefill.tokens - prompts))
    assert cut.training == whole.training


def test_anchors_are_of_what_was_decoded_in_the_step() -> None:
    """A step of 4.25 tokens: who waits for longer has its anchors."""
    work = counted(config_of(), 1.0)
    steps = 16 * 102 / 3 / 128
    fresh = [(n, min(max(g) - n, steps)) for g in GROUPS for n in g]
    waiting = sum((PROMPT + n) * waited for n, waited in fresh) * 128 / 102
    unfinished = 128 * (PROMPT + sum(n * n for g in GROUPS for n in g) / 2 / 102)
    assert work.anchors.tokens == pytest.approx(unfinished + waiting)
    behavior = config_of(verification={"against": "behavior"})
    assert counted(behavior, 1.0).anchors == Pass()


def test_methods_without_verification_score_nothing() -> None:
    plain = {"measure": False, "against": "anchor"}
    partial = counted(config_of("partial_rollout", verification=plain), 0.5)
    assert partial.verification == partial.anchors == Pass()
    assert partial.generated == pytest.approx(16 * 102 / 3)  # nothing is cut


def test_on_policy_waits_for_the_longest() -> None:
    work = counted(config_of("on_policy"), 0.5)
    assert 29 < work.decode_steps <= 30
    assert work.active * work.decode_steps * 4 == pytest.approx(16 * 102 / 3)
    assert work.verification == Pass()
    assert work.prefill.tokens == 16 * PROMPT


def test_a_small_cache_holds_fewer_at_a_time() -> None:
    """A token has 4 of the prompt and 11.3 of the response before it."""
    context = PROMPT + sum(n * n for g in GROUPS for n in g) / 2 / 102
    work = counted(config_of(), 1.0, cached=100)
    assert work.context == pytest.approx(context)
    assert work.active == pytest.approx(100 / context)
    assert counted(config_of(engine={"max_num_seqs": 3}), 1.0).active == 3
