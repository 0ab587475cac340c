"""Verification with a real engine and a real trainer: what is of zero age is never cut."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_pair import MAX_NUM_SEQS, Pair, make_pair
from tensordict import TensorDict
from tiny_models import EOS_ID, random_documents

from rollverify.metrics.audit_log import AuditLog
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger
from rollverify.rollout.prompt_queue import EncodedPrompt, PromptQueue
from rollverify.rollout.request_loop import RequestLoop
from rollverify.rollout.rollouter import Rollouter
from rollverify.rollout.schema import Status
from rollverify.stages.anchor_scoring import AnchorScoring
from rollverify.stages.ops_scoring import OpsScoring
from rollverify.stages.verification import Verification
from rollverify.state import StepState
from rollverify.training.credit import CreditRule
from rollverify.training.objective import Objective
from rollverify.training.policy_update import PolicyUpdate
from rollverify.training.scoring import TrajectoryScorer

pytestmark = pytest.mark.vllm

TEMPERATURE = 0.8
ZERO_AGE_LIMIT = 1e-5
"""float32 on both sides; measured 3e-6."""

PROMPTS = [
    EncodedPrompt(token_ids=tuple(ids), grade=lambda ids: float(ids[0] % 2), prompt_index=i)
    for i, ids in enumerate(random_documents([4, 7, 12, 5, 9, 6], seed=3))
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = make_pair(tmp_path_factory.mktemp("verification"), tied=True)
    made.sync.push(0)
    yield made
    made.engine.close()


def make_rollouter(pair: Pair, buffer: TrajectoryBuffer) -> Rollouter:
    """Two groups of two per step, more requests than the engine has slots."""

    def batches() -> Iterator[list[EncodedPrompt]]:
        while True:
            yield from ([one] for one in PROMPTS)

    loop = RequestLoop(
        engine=pair.engine,
        buffer=buffer,
        prompts=PROMPTS,
        max_response_tokens=60,
        stop_token_id=EOS_ID,
        temperature=TEMPERATURE,
        run_seed=0,
        mask_older=False,
    )
    return Rollouter(
        loop=loop,
        buffer=buffer,
        queue=PromptQueue(batches=batches(), prompts=PROMPTS, data_rank=0, data_world_size=1),
        ledger=PromptLedger(),
        prompts_per_step=2,
        group_size=2,
        num_in_flight=MAX_NUM_SEQS + 4,
        max_num_seqs=MAX_NUM_SEQS,
        count_every=1,
        is_on_policy=False,
        must_be_verified=True,
        data_rank=0,
        data_world_size=1,
        data_group=None,
    )


def update(pair: Pair) -> PolicyUpdate:
    return PolicyUpdate(
        trainer=pair.trainer,
        objective=Objective(),
        credit=CreditRule(max_response_tokens=60),
        micro_batch_tokens=512,
        temperature=TEMPERATURE,
        aggregation="token_mean",
        constant_length=60,
        data_group=None,
    )


class Run:
    """Rollouter, scorer and stages on one pair, with the paper's thresholds."""

    def __init__(self, pair: Pair, folder: Path, reference: Any = "anchor") -> None:
        self.pair = pair
        self.buffer = TrajectoryBuffer(group_size=2)
        self.rollouter = make_rollouter(pair, self.buffer)
        scorer = TrajectoryScorer(
            trainer=pair.trainer, micro_batch_tokens=512, temperature=TEMPERATURE, data_group=None
        )
        self.anchors = AnchorScoring(scorer)
        self.scoring = OpsScoring(
            scorer=scorer, reference=reference, symmetric=False, data_group=None
        )
        self.verification = Verification(
            ops_scoring=self.scoring,
            buffer=self.buffer,
            segment_threshold=0.01,
            token_threshold=2.0,
            audit_log=AuditLog(folder, rank=0),
            data_group=None,
        )

    def step(self, version: int, train: Callable[[list[TensorDict]], Any]) -> StepState:
        """Rollout under a version, `train`, verification against the weights after it."""
        state = StepState(step=version + 1, policy_version=version)
        state.finished, state.unfinished = self.rollouter.collect(version)
        self.anchors(state)
        train(state.finished)
        state.policy_version += 1
        self.scoring(state)
        self.verification(state)
        self.buffer.check()
        return state


@pytest.mark.parametrize("reference", ["anchor", "behavior"])
def test_nothing_of_zero_age_is_cut(pair: Pair, tmp_path: Path, reference: str) -> None:
    """Paused and scored before any update; the engine's own log-probs are as good a reference."""
    run = Run(pair, tmp_path, reference)
    state = run.step(0, train=lambda finished: None)
    tokens = torch.cat(run.scoring.token_ops)
    assert len(tokens) > 100 and tokens.max() <= ZERO_AGE_LIMIT
    if reference == "behavior":
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
        for ops, one in zip(run.scoring.token_ops, run.scoring.trajectories, strict=True)
    ]
    assert torch.cat(fresh).max() <= ZERO_AGE_LIMIT
