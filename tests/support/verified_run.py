"""RollVerify's parts on a real engine and trainer, one data rank; imported by the engine tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.engine_pair import MAX_NUM_SEQS, Pair
from support.tiny_models import EOS_ID, random_documents
from tensordict import TensorDict

from rollverify.config.tables import (
    DynamicSamplingConfig,
    FilterConfig,
    RolloutConfig,
    TrainingConfig,
    VerificationConfig,
)
from rollverify.engine.model_folder import RoutingShape
from rollverify.hooks import StepState
from rollverify.losses.advantages import CreditRule, has_signal
from rollverify.losses.objective import Objective
from rollverify.metrics.json_lines import AuditLog
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger
from rollverify.rollout.prompt_queue import EncodedPrompt, PromptQueue
from rollverify.rollout.requests import RequestLoop, ResumedRouting
from rollverify.rollout.rollouter import Rollouter
from rollverify.training.policy_update import PolicyUpdate
from rollverify.training.scoring import TrajectoryScorer
from rollverify.verification.filters import TrajectoryFilter
from rollverify.verification.scoring import AnchorScoring, OpsScoring, Scored
from rollverify.verification.stage import Verification

TEMPERATURE = 0.8
ZERO_AGE_LIMIT = 1e-5
"""float32 on both sides; measured 3e-6."""

PROMPTS = [
    EncodedPrompt(token_ids=tuple(ids), grade=lambda ids: float(ids[0] % 2), prompt_index=i)
    for i, ids in enumerate(random_documents([4, 7, 12, 5, 9, 6], seed=3))
]


def make_rollouter(
    pair: Pair, buffer: TrajectoryBuffer, routing: ResumedRouting | None = None
) -> Rollouter:
    """Two groups of two per step, more requests than the engine has slots."""

    def batches() -> Iterator[list[EncodedPrompt]]:
        while True:
            yield from ([one] for one in PROMPTS)

    rollout = RolloutConfig(
        prompts_per_step=2, max_response_tokens=60, temperature=TEMPERATURE, count_every=1
    )
    loop = RequestLoop(
        engine=pair.engine,
        buffer=buffer,
        prompts=PROMPTS,
        rollout=rollout,
        stop_token_ids=(EOS_ID,),
        run_seed=0,
        routing=routing,
    )
    return Rollouter(
        loop=loop,
        buffer=buffer,
        queue=PromptQueue(batches=batches(), prompts=PROMPTS, ranks=Ranks()),
        ledger=PromptLedger(),
        rollout=rollout,
        num_in_flight=MAX_NUM_SEQS + 4,
        max_num_seqs=MAX_NUM_SEQS,
        is_on_policy=False,
        must_be_verified=True,
        ranks=Ranks(),
        dynamic_sampling=DynamicSamplingConfig(),
        has_signal=has_signal,
    )


def update(pair: Pair, routing: RoutingShape | None = None) -> PolicyUpdate:
    """Steps that replay the engine's experts if they are given their shape."""
    return PolicyUpdate(
        trainer=pair.trainer,
        objective=Objective(),
        credit=CreditRule(max_response_tokens=60),
        training=TrainingConfig(micro_batch_tokens=512),
        temperature=TEMPERATURE,
        replay="engine" if routing else "off",
        routing=routing,
        ranks=Ranks(),
    )


def scorer_of(pair: Pair, routing: RoutingShape | None = None) -> TrajectoryScorer:
    """Replays recorded experts if it is given their shape."""
    return TrajectoryScorer(
        trainer=pair.trainer,
        micro_batch_tokens=512,
        temperature=TEMPERATURE,
        ranks=Ranks(),
        routing=routing,
    )


class Run:
    """Rollouter, scorer and stages on one pair, with the paper's thresholds (segment, token).

    Given the shape of the model's routing, the engine's experts are recorded and replayed.
    """

    def __init__(
        self,
        pair: Pair,
        folder: Path,
        against: Any = "anchor",
        routing: RoutingShape | None = None,
        on_resume: ResumedRouting = "keep",
        thresholds: tuple[float, float] = (0.01, 2.0),
    ) -> None:
        self.pair = pair
        self.buffer = TrajectoryBuffer(group_size=2)
        self.rollouter = make_rollouter(pair, self.buffer, on_resume if routing else None)
        scorer = scorer_of(pair, routing)
        self.anchors = AnchorScoring(scorer=scorer)
        self._score = OpsScoring(scorer=scorer, against=against, symmetric=False, ranks=Ranks())
        self.verification = Verification(
            score=self.score,  # pyright: ignore[reportArgumentType]
            filter=TrajectoryFilter(
                settings=FilterConfig(),
                buffer=self.buffer,
                ledger=PromptLedger(),
                ranks=Ranks(),
            ),
            settings=VerificationConfig(
                segment_threshold=thresholds[0], token_threshold=thresholds[1]
            ),
            buffer=self.buffer,
            audit_log=AuditLog(folder, rank=0),
            ranks=Ranks(),
        )

    def score(self, state: StepState) -> Scored:
        """Score U_k and remember what was found: `scored`, and `token_ops` of each trajectory."""
        self.scored = self._score(state)
        lengths = self.scored.layout.trajectory_lengths.tolist()
        self.token_ops = list(self.scored.ops.split(lengths))
        return self.scored

    def step(self, version: int, train: Callable[[list[TensorDict]], Any]) -> StepState:
        """Rollout under a version, `train`, verification against the weights after it."""
        state = StepState(step=version + 1, policy_version=version)
        state.finished, state.unfinished = self.rollouter.collect(version)
        self.anchors(state)
        train(state.finished)
        state.policy_version += 1
        self.verification(state)
        self.buffer.check()
        return state
