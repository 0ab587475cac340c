"""Verification with a real engine and a real trainer: what is of zero age is never cut."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine_pair import Pair, make_pair
from support.verified_run import ZERO_AGE_LIMIT, Run, update

from rollverify.rollout.trajectory import Status

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = make_pair(tmp_path_factory.mktemp("verification"), tied=True)
    made.sync.push(0)
    yield made
    made.engine.close()


@pytest.mark.parametrize("against", ["anchor", "behavior"])
def test_nothing_of_zero_age_is_cut(pair: Pair, tmp_path: Path, against: str) -> None:
    """Paused and scored before any update; the engine's own log-probs are as good a reference."""
    run = Run(pair, tmp_path, against)
    state = run.step(0, train=lambda finished: None)
    tokens = torch.cat(run.token_ops)
    assert len(tokens) > 100 and tokens.max() <= ZERO_AGE_LIMIT
    if against == "behavior":
        assert tokens.max() > 0.0  # Two forward passes of different code: not the same bits.
    assert state.metrics["verification/acceptance_rate"] == 1.0
    assert (tmp_path / "cuts.jsonl").read_text() == ""
    unfinished = [one for one in state.unfinished if int(one["status"]) == Status.UNFINISHED]
    assert any(len(one["response_ids"]) for one in unfinished)


def test_a_large_update_cuts_and_what_is_left_goes_on(pair: Pair, tmp_path: Path) -> None:
    run = Run(pair, tmp_path)
    trainer = update(pair)
    state = run.step(0, train=lambda finished: trainer.train_step(finished, 0))
    pair.sync.push(1)
    cuts = [json.loads(line) for line in (tmp_path / "cuts.jsonl").read_text().splitlines()]
    assert cuts and state.metrics["verification/acceptance_rate"] < 1.0
    assert sum(cut["cut_tokens"] for cut in cuts) == run.buffer.counts.cut
    second = run.step(1, train=lambda finished: None)
    kept = [one for one in second.unfinished if len(one["segment_ids"])]
    for one in kept:
        # Anchors of version 0 were kept, those of version 1 taken now: both are the trainer's.
        assert torch.isfinite(one["anchor_logprobs"]).all()
        gap = (one["anchor_logprobs"] - one["behavior_logprobs"]).abs().max()
        assert gap <= ZERO_AGE_LIMIT
    fresh = [
        ops[one["policy_version"] == 1]
        for ops, one in zip(run.token_ops, run.scored.trajectories, strict=True)
    ]
    assert torch.cat(fresh).max() <= ZERO_AGE_LIMIT
