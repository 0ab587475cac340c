"""Sets up a scored U_k for the tests of the stages that read it."""

from collections.abc import Sequence

from support.fakes import FakeScorer, paused
from tensordict import TensorDict

from rollverify.config.tables import FilterConfig, VerificationConfig
from rollverify.hooks import StepState
from rollverify.metrics.json_lines import AuditLog
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.verification.filters import TrajectoryFilter
from rollverify.verification.scoring import OpsScoring, Scored
from rollverify.verification.stage import Verification

Name = tuple[int, int]
"""(group, sample)."""


def scoring(
    updated: dict[Name, Sequence[float]], *, against: str = "anchor", symmetric: bool = False
) -> OpsScoring:
    """Scoring with given log-probs under the policy after the step."""
    scorer = FakeScorer(updated)
    return OpsScoring(scorer=scorer, against=against, symmetric=symmetric, ranks=Ranks())


def verification(
    score: OpsScoring,
    buffer: TrajectoryBuffer,
    ledger: PromptLedger,
    *,
    filtered: FilterConfig | None = None,
    settings: VerificationConfig | None = None,
    audit_log: AuditLog | None = None,
) -> Verification:
    """The stage on one rank; without an audit log it cuts nothing."""
    return Verification(
        score=score,
        filter=TrajectoryFilter(
            settings=filtered or FilterConfig(), buffer=buffer, ledger=ledger, ranks=Ranks()
        ),
        settings=settings or VerificationConfig(),
        buffer=buffer,
        audit_log=audit_log,
        ranks=Ranks(),
    )


def ops_of(scored: Scored) -> list[list[float]]:
    """OPS of each trajectory's tokens."""
    return [ops.tolist() for ops in scored.ops.split(scored.layout.trajectory_lengths.tolist())]


def held_in(
    groups: dict[int, list[dict[int, Sequence[float]]]], group_size: int
) -> tuple[TrajectoryBuffer, PromptLedger, StepState]:
    """Buffer, ledger and state after a step, with U_k from {group: segments of each sample}.

    The state's policy version is 3, so that tokens of version 2 are one step old.
    """
    buffer, ledger = TrajectoryBuffer(group_size=group_size), PromptLedger()
    for group, samples in groups.items():
        made = [paused(one, group=group, sample=index) for index, one in enumerate(samples)]
        buffer.add_group(made)
        ledger.add(group)
        ledger.move(group, PromptState.RUNNING)
        ledger.move(group, PromptState.PAUSED)
    state = StepState(step=3, policy_version=3, unfinished=buffer.trajectories())
    return buffer, ledger, state


def lengths(trajectories: Sequence[TensorDict]) -> list[int]:
    """Response tokens of each."""
    return [len(one["response_ids"]) for one in trajectories]
