"""Sets up a scored U_k for the tests of the stages that read it."""

from collections.abc import Sequence

from support.fakes import FakeScorer, paused
from tensordict import TensorDict

from rollverify.hooks import StepState
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.verification.scoring import OpsScoring

Name = tuple[int, int]
"""(group, sample)."""


def scoring(
    updated: dict[Name, Sequence[float]], *, reference: str = "anchor", symmetric: bool = False
) -> OpsScoring:
    """The stage with given log-probs under the policy after the step."""
    return OpsScoring(
        scorer=FakeScorer(updated), reference=reference, symmetric=symmetric, data_group=None
    )


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
