"""Off-policy shift (OPS): how far the policy has moved. Section 3.2, Eq. 3 and Algorithm 1.

B trajectories, N response tokens of all of them, S segments with at least one token.
"""

import torch
from torch import Tensor

from rollverify.rollout.layout import PackedLayout

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped at +20 nats, so that an OPS is at most 4.9e8 and never inf (exp overflows
float32 at 88.7). Below 0 nothing needs a clamp: the OPS of a vanished token tends to 1."""


def token_ops(
    updated_logprobs: Tensor,
    sampled_logprobs: Tensor,
    layout: PackedLayout,
    *,
    symmetric: bool = False,
) -> Tensor:
    """Off-policy shift |p_updated / p_sampled - 1| of each token, [N], dimensionless (Eq. 3).

    Taken as |expm1(updated - sampled)|, which stays exact near 0. Both are [N], float32 or float64,
    nats; `sampled_logprobs` are the anchors (the trainer's score, the paper's choice) or the
    behavior (the engine's, with its mismatch). `symmetric`, not in the paper: max(r, 1 / r) - 1,
    which grows without bound for tokens that the updated policy no longer produces.
    """
    shift = updated_logprobs.detach() - sampled_logprobs.detach()
    bad = (~shift.isfinite()).nonzero()
    if len(bad):
        token, place = int(bad[0]), layout.name_token(int(bad[0]))
        raise ValueError(
            f"updated_logprobs of {place} is {updated_logprobs[token].item()}, sampled_logprobs of "
            f"{place} is {sampled_logprobs[token].item()}; one of them is not finite, or their "
            "difference overflows"
        )
    if symmetric:
        return shift.abs_().clamp_(max=LOG_RATIO_LIMIT).expm1_()
    return shift.clamp_(max=LOG_RATIO_LIMIT).expm1_().abs_()


def segment_ops(token_ops: Tensor, layout: PackedLayout) -> Tensor:
    """[S] mean of token OPS [N] over each segment, in packed order (Section 4.2)."""
    check_ops(token_ops, layout)
    return means_of_runs(token_ops, layout.segment_lengths)


def sequence_ops(token_ops: Tensor, layout: PackedLayout) -> Tensor:
    """[B] mean of token OPS [N] over each trajectory; 0 for one without tokens (Section 3.2)."""
    check_ops(token_ops, layout)
    means = means_of_runs(token_ops, layout.trajectory_lengths[layout.nonempty_trajectories])
    zeros_B = token_ops.new_zeros(len(layout.trajectory_lengths))
    return zeros_B.index_copy(0, layout.nonempty_trajectories, means)


def check_ops(token_ops: Tensor, layout: PackedLayout) -> None:
    """Refuse OPS [N] coarser than float32, or no number >= 0: a NaN passes any threshold."""
    if token_ops.dtype not in (torch.float32, torch.float64):
        # bfloat16 log-probs are spaced 0.008 apart near -1.5: as coarse as the thresholds.
        raise ValueError(f"token_ops must be float32 or float64, got {token_ops.dtype}")
    bad = (~((token_ops >= 0.0) & token_ops.isfinite())).nonzero()
    if len(bad):
        place, ops = layout.name_token(int(bad[0])), token_ops[int(bad[0])].item()
        raise ValueError(f"OPS of {place} is {ops}, must be finite and >= 0")


def means_of_runs(values: Tensor, lengths: Tensor) -> Tensor:
    """[S] mean of each run of consecutive values [N], given the run lengths [S], each >= 1.

    Summed in float64 and rounded once: the mean of equal values is that value.
    """
    if len(lengths) == 0:
        return values.new_zeros(0)
    # Unlike index_add, segment_reduce has one order of summation on every device.
    sums_S = torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)
    return (sums_S / lengths).to(values.dtype)


def trajectory_staleness(versions: Tensor, layout: PackedLayout, policy_version: int) -> Tensor:
    """[B] int64 steps since the oldest segment, 0 without tokens; versions [N] (Section 3.3)."""
    versions_S = versions[layout.segment_starts].long()
    staleness_S = policy_version - versions_S
    if bool((staleness_S < 0).any()):
        newest = int(versions_S.argmax())
        raise ValueError(
            f"trajectory {int(layout.segment_owners[newest])} holds tokens of version "
            f"{int(versions_S[newest])}, but the policy now is version {policy_version}"
        )
    fresh_B = torch.zeros_like(layout.trajectory_lengths)
    return fresh_B.scatter_reduce(0, layout.segment_owners, staleness_S, reduce="amax")
