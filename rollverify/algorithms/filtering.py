"""Filters that discard whole trajectories, by age or by OPS: the baselines of Section 3.3.

Does not discard anything: it returns masks. What happens to the group and the prompt of a discarded
trajectory is the caller's rule.

Dimensions: B trajectories, T packed positions, N response tokens among them, S segments.
"""

import torch
from torch import Tensor

from rollverify.algorithms.packed_layout import PackedLayout


def trajectory_staleness(
    policy_versions: Tensor, layout: PackedLayout, policy_version: int
) -> Tensor:
    """Steps between the policy now and the one that made the oldest segment.

    Synchronizes with the device.

    Args:
        policy_versions: [T] integer; version that sampled each response token, equal along a
            segment; ignored outside the response.
        layout: where trajectories and segments lie.
        policy_version: version now, at least that of every token.

    Returns:
        [B] int64, >= 0; 0 for a trajectory without tokens.

    Raises:
        ValueError: if the shape or dtype does not fit, or a token is newer than the policy now.

    Source:
        Kimi k1.5 as read by RollVerify, Section 3.3.
    """
    if policy_versions.is_floating_point() or policy_versions.dtype == torch.bool:
        raise ValueError(f"policy_versions must be integers, got {policy_versions.dtype}")
    versions_S = layout.response_values(policy_versions)[layout.segment_starts].long()
    staleness_S = policy_version - versions_S
    if bool((staleness_S < 0).any()):
        owner = int(layout.segment_owners[staleness_S < 0][0])
        raise ValueError(
            f"trajectory {owner} holds tokens of version {int(versions_S[staleness_S < 0][0])}, "
            f"but the policy now is version {policy_version}"
        )
    fresh_B = torch.zeros_like(layout.trajectory_lengths)
    return fresh_B.scatter_reduce(0, layout.segment_owners, staleness_S, reduce="amax")


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
