"""Filter baselines (Section 3.3): gives up trajectories of U_k that are too old or too off-policy.

Runs at BEFORE_WEIGHT_SYNC between scoring and verification. What a filtered sample becomes is our
rule: it starts again from its bare prompt, or its whole group is given up for good.
"""

from collections.abc import Callable
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from rollverify.algorithms.filtering import keep_by_ops, keep_by_staleness, trajectory_staleness
from rollverify.algorithms.ops import sequence_ops
from rollverify.metrics.reduction import reduce_metrics
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.stages.ops_scoring import OpsScoring
from rollverify.state import StepState
from rollverify.training.responses import flat

Keep = Callable[[OpsScoring, int], Tensor]
"""(scored trajectories, policy version now) -> [B] bool, True where a trajectory is kept."""


def keep_young(max_staleness: int) -> Keep:
    """Keep trajectories whose oldest segment is at most so many steps old; needs no scores."""

    def keep(scored: OpsScoring, policy_version: int) -> Tensor:
        versions = flat(scored.trajectories, "policy_version")
        return keep_by_staleness(
            trajectory_staleness(versions, scored.layout, policy_version), max_staleness
        )

    return keep


def keep_close(max_ops: float) -> Keep:
    """Keep trajectories whose mean OPS is at most this; needs scores."""

    def keep(scored: OpsScoring, policy_version: int) -> Tensor:
        del policy_version
        return keep_by_ops(sequence_ops(scored.ops, scored.layout), max_ops)

    return keep


class TrajectoryFilter:
    """Hook: discards what `keep` does not keep, and fills `filter/` of the step's metrics."""

    def __init__(
        self,
        *,
        keep: Keep,
        discard: Literal["trajectory", "group"],
        ops_scoring: OpsScoring,
        buffer: TrajectoryBuffer,
        ledger: PromptLedger,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            keep: `keep_young(...)` or `keep_close(...)`.
            discard: "trajectory" starts the sample again from its bare prompt, "group" gives up
                the group of a discarded trajectory.
            ops_scoring: has scored U_k in this step.
            buffer: holds U_k.
            ledger: learns of groups that are given up.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._keep = keep
        self._discard = discard
        self._ops_scoring = ops_scoring
        self._buffer = buffer
        self._ledger = ledger
        self._data_group = data_group

    def __call__(self, state: StepState) -> None:
        """Discard in place. Collective: yes, over the data ranks."""
        scored = self._ops_scoring
        keep_B = self._keep(scored, state.policy_version)
        rejected = [index for index, is_kept in enumerate(keep_B.tolist()) if not is_kept]
        num_before = self._buffer.num_tokens
        groups: set[int] = set()
        if self._discard == "trajectory":
            for index in rejected:
                self._buffer.discard(scored.trajectories[index])
        else:
            groups = {int(scored.trajectories[index]["group_id"]) for index in rejected}
            rejected = self._give_up(groups, state)
        scored.drop(rejected)
        sums = {
            "filter/trajectories_discarded": float(len(rejected)),
            "filter/groups_discarded": float(len(groups)),
            "filter/tokens_discarded": float(num_before - self._buffer.num_tokens),
        }
        if self._data_group is not None:
            sums, _ = reduce_metrics(sums, {}, self._data_group)
        state.metrics |= sums

    def _give_up(self, groups: set[int], state: StepState) -> list[int]:
        """Take the groups out of the buffer and U_k; places of their trajectories."""
        for group_id in sorted(groups):
            self._buffer.pop_group(group_id, "filtered")
            self._ledger.move(group_id, PromptState.FILTERED)
        state.unfinished = [one for one in state.unfinished if int(one["group_id"]) not in groups]
        return [
            index
            for index, one in enumerate(self._ops_scoring.trajectories)
            if int(one["group_id"]) in groups
        ]
