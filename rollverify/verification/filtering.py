"""Filters that discard whole trajectories, by age or by OPS: the baselines of Section 3.3.

Does not discard anything: it returns masks. What happens to the group and the prompt of a discarded
trajectory is the caller's rule.

Dimensions: B trajectories, T packed positions, N response tokens among them, S segments.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rollverify.hooks import StepState
from rollverify.ranks import reduce_metrics
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.layout import flat
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.verification.ops import sequence_ops, trajectory_staleness
from rollverify.verification.scoring import OpsScoring


def keep_by_staleness(staleness: Tensor, max_staleness: int) -> Tensor:
    """Keep trajectories whose oldest segment is at most max_staleness steps old.

    Exclusive: a trajectory is discarded when its staleness is above the limit, kept at it.

    Args:
        staleness: [B] integer, steps, >= 0; from `trajectory_staleness`.
        max_staleness: s, steps, >= 0; 0 keeps only what the policy now has made.

    Returns:
        [B] bool; True where the trajectory is kept.

    Raises:
        ValueError: if max_staleness is negative, which nothing could pass, or staleness is not
            [B] integers.

    Source:
        RollVerify, Section 3.3. The limit itself is kept: our choice where the paper is silent.
    """
    if max_staleness < 0:
        raise ValueError(f"max_staleness must be >= 0 steps, got {max_staleness}")
    if staleness.ndim != 1 or staleness.is_floating_point():
        raise ValueError(
            f"staleness must be [B] integers, got {list(staleness.shape)} {staleness.dtype}"
        )
    return staleness <= max_staleness


def keep_by_ops(sequence_ops: Tensor, max_ops: float) -> Tensor:
    """Keep trajectories whose sequence OPS is at most max_ops.

    Exclusive: a trajectory is discarded when its OPS is above the limit, kept at it (unlike
    verification, which cuts at its thresholds). Compared in the dtype of the OPS.

    Args:
        sequence_ops: [B] float32 or float64, dimensionless, >= 0.
        max_ops: gamma, dimensionless, > 0; inf keeps all.

    Returns:
        [B] bool; True where the trajectory is kept.

    Raises:
        ValueError: if max_ops is not > 0, sequence_ops is not [B] floats, or one of them is NaN;
            names the trajectory.

    Source:
        RollVerify, Section 3.3. The limit itself is kept: our choice where the paper is silent.
    """
    if not max_ops > 0.0:
        raise ValueError(f"max_ops must be > 0 (inf keeps all), got {max_ops}")
    if sequence_ops.ndim != 1 or sequence_ops.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"sequence_ops must be [B] float32 or float64, "
            f"got {list(sequence_ops.shape)} {sequence_ops.dtype}"
        )
    is_nan_B = sequence_ops.isnan()
    if bool(is_nan_B.any()):
        raise ValueError(f"sequence OPS of trajectory {int(is_nan_B.nonzero()[0])} is NaN")
    return sequence_ops <= torch.tensor(max_ops, dtype=sequence_ops.dtype)


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
