"""Off-policy shift (OPS): how far the updated policy has moved on tokens sampled before.

Does not score tokens and does not cut anything: see `verification.py`.

The reference is the log-prob of the policy that sampled the token: the anchor (the trainer's own
score, the paper's choice) or the behavior (the engine's, which adds the engine's mismatch).

Dimensions: B trajectories, T packed positions, N response tokens among them, S segments.
"""

import torch
from torch import Tensor

from rollverify.rollout.layout import PackedLayout

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped at +20 nats, so that an OPS is at most 4.9e8 and never inf (exp overflows
float32 at 88.7). Below 0 nothing needs a clamp: the OPS of a vanished token tends to 1."""


def token_ops(
    updated_logprobs: Tensor,
    reference_logprobs: Tensor,
    layout: PackedLayout,
    *,
    symmetric: bool = False,
) -> Tensor:
    """Token-level off-policy shift |p_updated / p_reference - 1|.

    Taken as |expm1(updated - reference)|, which stays exact near 0 where a ratio minus 1 would
    not, in the dtype of the log-probs. Positions outside the response are 0 and never reach the
    exponential, whatever they hold (-inf and NaN included). Log ratios are clamped at +20 nats,
    so a token threshold above 4.9e8 never fires. Synchronizes with the device.

    Args:
        updated_logprobs: [T] float32 or float64, nats; trainer policy after the step.
        reference_logprobs: [T] same dtype, nats; under the policy that sampled each token.
        layout: where the response tokens lie.
        symmetric: True gives max(r, 1 / r) - 1 instead, which also grows without bound for tokens
            that the updated policy no longer produces; |r - 1| stays below 1 there.

    Returns:
        [T] same dtype, dimensionless, >= 0; 0 means on-policy.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a log-prob of a response token is not
            finite; names the trajectory and the token.

    Source:
        RollVerify, Section 3.2 Eq. 3 and Algorithm 1. The clamp and the symmetric form are our
        choice.
    """
    rows = {"updated_logprobs": updated_logprobs, "reference_logprobs": reference_logprobs}
    for name, row in rows.items():
        if row.dtype not in (torch.float32, torch.float64):
            # bfloat16 log-probs are spaced 0.008 apart near -1.5: as coarse as the thresholds.
            raise ValueError(f"{name} must be float32 or float64, got {row.dtype}")
    if updated_logprobs.dtype != reference_logprobs.dtype:
        raise ValueError(
            f"log-probs must have one dtype, got {updated_logprobs.dtype} and "
            f"{reference_logprobs.dtype}"
        )
    values_N = {name: layout.response_values(row.detach()) for name, row in rows.items()}
    shift_N = values_N["updated_logprobs"] - values_N["reference_logprobs"]
    if not bool(shift_N.isfinite().all()):
        _raise_not_finite(values_N, layout)
    if symmetric:
        ops_N = shift_N.abs_().clamp_(max=LOG_RATIO_LIMIT).expm1_()
    else:
        ops_N = shift_N.clamp_(max=LOG_RATIO_LIMIT).expm1_().abs_()
    if layout.response_positions is None:
        return ops_N
    return torch.zeros_like(updated_logprobs).index_copy(0, layout.response_positions, ops_N)


def segment_ops(token_ops: Tensor, layout: PackedLayout) -> Tensor:
    """Mean OPS of each segment over its own response tokens.

    Summed in float64 and rounded once, so the mean of equal values is that value and a long
    segment loses nothing. Segments without a token do not appear. Synchronizes with the device.

    Args:
        token_ops: [T] float32 or float64, dimensionless, >= 0; ignored outside the response.
        layout: where the segments lie.

    Returns:
        [S] same dtype, dimensionless, >= 0; in packed order, like `layout.segment_owners`.

    Raises:
        ValueError: if the shape or dtype does not fit, or an OPS is not finite or below 0; names
            the trajectory and the token.

    Source:
        RollVerify, Section 4.2 (segment mean) and Algorithm 2.
    """
    return means_of_runs(check_ops(token_ops, layout), layout.segment_lengths)


def sequence_ops(token_ops: Tensor, layout: PackedLayout) -> Tensor:
    """Mean OPS of each trajectory over its response tokens.

    Trajectories without a token, paused before their first, have 0: nothing in them is
    off-policy. Synchronizes with the device.

    Args:
        token_ops: [T] float32 or float64, dimensionless, >= 0; ignored outside the response.
        layout: where the trajectories lie.

    Returns:
        [B] same dtype, dimensionless, >= 0; by trajectory index, whatever the packed order.

    Raises:
        ValueError: if the shape or dtype does not fit, or an OPS is not finite or below 0; names
            the trajectory and the token.

    Source:
        RollVerify, Section 3.2. The value 0 without tokens is our choice.
    """
    ops_N = check_ops(token_ops, layout)
    means = means_of_runs(ops_N, layout.trajectory_lengths[layout.nonempty_trajectories])
    zeros_B = ops_N.new_zeros(layout.num_trajectories)
    return zeros_B.index_copy(0, layout.nonempty_trajectories, means)


def check_ops(token_ops: Tensor, layout: PackedLayout) -> Tensor:
    """OPS of the response tokens, after making sure that each is a number >= 0.

    A NaN would pass every threshold, since each comparison with it is false. Synchronizes with
    the device.

    Args:
        token_ops: [T] float32 or float64, dimensionless.
        layout: where the response tokens lie.

    Returns:
        [N] same dtype; in packed order.

    Raises:
        ValueError: if the shape or dtype does not fit, or an OPS of a response token is not finite
            or below 0; names the trajectory and the token.

    Source:
        Our choice; the paper does not treat values that are not finite.
    """
    if token_ops.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"token_ops must be float32 or float64, got {token_ops.dtype}")
    ops_N = layout.response_values(token_ops)
    if len(ops_N) == 0:
        return ops_N
    low, high = ops_N.aminmax()  # Both are NaN as soon as one value is.
    if not (float(low) >= 0.0 and float(high) < float("inf")):
        token = int((~(ops_N >= 0.0) | ops_N.isinf()).nonzero()[0])
        raise ValueError(
            f"OPS of {layout.name_token(token)} is {ops_N[token].item()}, must be finite and >= 0"
        )
    return ops_N


def means_of_runs(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean of each run of consecutive values.

    Args:
        values: [N] float32 or float64; the runs back to back.
        lengths: [S] int64, >= 1, adding up to N.

    Returns:
        [S] dtype of the values; summed in float64 in the order of the values.

    Raises:
        RuntimeError: from torch, if a length is negative.

    Source:
        Our choice.
    """
    if len(lengths) == 0:
        return values.new_zeros(0)
    # Unlike index_add, segment_reduce has one order of summation on every device.
    sums_S = torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)
    return (sums_S / lengths).to(values.dtype)


def _raise_not_finite(values_N: dict[str, Tensor], layout: PackedLayout) -> None:
    for name, row_N in values_N.items():
        bad = (~row_N.isfinite()).nonzero()
        if len(bad):
            token = int(bad[0])
            raise ValueError(
                f"{name} of {layout.name_token(token)} is {row_N[token].item()}; "
                "log-probs of sampled tokens must be finite"
            )
    raise ValueError("log-probs are finite, but updated - reference overflows their dtype")


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
