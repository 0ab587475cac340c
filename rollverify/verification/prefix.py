"""Two-stage prefix verification: how much of each unfinished trajectory may be kept.

Does not score tokens and does not cut any array: it returns lengths, the caller truncates.

First whole segments by their mean OPS, then single tokens of what is left. RollVerify Section 4.2,
Algorithm 2.

Dimensions: B trajectories, T packed positions, N response tokens among them, S segments.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from rollverify.rollout.layout import PackedLayout, is_run_start
from rollverify.verification.ops import check_ops, means_of_runs


class CutRule(IntEnum):
    """Why a trajectory ends where it does after verification."""

    NONE = 0
    """Nothing was cut."""

    SEGMENT = 1
    """The mean OPS of a segment reached the segment threshold."""

    TOKEN = 2
    """The OPS of a token in the kept segments reached the token threshold."""


@dataclass(kw_only=True, frozen=True, slots=True)
class VerificationResult:
    """What to keep of each trajectory, by trajectory index, and why."""

    checked_lengths: Tensor
    """[B] int64; response tokens that were checked, 0 for a trajectory without any."""

    accepted_lengths: Tensor
    """[B] int64, <= checked_lengths; response tokens to keep. 0: start again from the prompt."""

    rules: Tensor
    """[B] int64; value of the `CutRule` that set the accepted length. TOKEN if both stages cut,
    since the second only looks at what the first has kept."""

    cut_indices: Tensor
    """[B] int64; first response token dropped (the accepted length), -1 where nothing was cut."""

    cut_ops: Tensor
    """[B] dtype of the OPS; the value that reached its threshold: the mean of the segment for
    SEGMENT, the OPS of the token for TOKEN, 0 for NONE."""


def verify_prefixes(
    token_ops: Tensor,
    layout: PackedLayout,
    *,
    segment_threshold: float,
    token_threshold: float,
) -> VerificationResult:
    """Find the longest prefix of each trajectory that passes both stages of verification.

    Stage 1 drops the first segment whose mean OPS is >= segment_threshold and all after it. Stage 2
    drops the first token of the rest whose OPS is >= token_threshold and all after it. Both bounds
    are inclusive and compared in the dtype of the OPS; inf turns a stage off. A value of 0 never
    reaches a threshold, however small. Trajectories without tokens are verified and not cut.
    Synchronizes with the device.

    Args:
        token_ops: [T] float32 or float64, dimensionless, >= 0; ignored outside the response.
        layout: where trajectories and segments lie.
        segment_threshold: d_s, dimensionless, > 0.
        token_threshold: d_t, dimensionless, > 0.

    Returns:
        The result; its tensors are on the device of token_ops.

    Raises:
        ValueError: if a threshold is not > 0, the shape or dtype does not fit, or an OPS is not
            finite or below 0; names the trajectory and the token.

    Source:
        RollVerify, Section 4.2 and Algorithm 2; defaults in Section 5.1.
    """
    for name, threshold in (("segment", segment_threshold), ("token", token_threshold)):
        if not threshold > 0.0:
            raise ValueError(f"{name}_threshold must be > 0 (inf turns it off), got {threshold}")
    ops_N = check_ops(token_ops, layout)
    means_S = means_of_runs(ops_N, layout.segment_lengths)
    bad_S = _reaching(means_S, segment_threshold)
    bad_N = _reaching(ops_N, token_threshold)
    num_tokens = len(ops_N)
    first_bad_segment_B = _first_of_each_owner(bad_S, layout.segment_owners, layout)
    first_bad_token_B = _first_of_each_owner(bad_N, layout.token_owners, layout)
    # Padded, so that "none" (the index one past the last) can be looked up like any other.
    starts = torch.cat([layout.segment_starts, layout.segment_starts.new_tensor([num_tokens])])
    segment_cut_B = starts[first_bad_segment_B]
    is_segment_B = first_bad_segment_B < len(means_S)
    is_token_B = first_bad_token_B < segment_cut_B
    # From here on a trajectory cut by neither may hold any index.
    is_segment_B = is_segment_B & ~is_token_B
    is_cut_B = is_segment_B | is_token_B
    kept_B = torch.minimum(segment_cut_B, first_bad_token_B) - layout.trajectory_starts
    lengths_B = layout.trajectory_lengths
    segment_values_B = _pad(means_S)[first_bad_segment_B]
    token_values_B = _pad(ops_N)[first_bad_token_B]
    return VerificationResult(
        checked_lengths=lengths_B,
        accepted_lengths=torch.where(is_cut_B, kept_B, lengths_B),
        rules=is_segment_B * int(CutRule.SEGMENT) + is_token_B * int(CutRule.TOKEN),
        cut_indices=torch.where(is_cut_B, kept_B, -1),
        cut_ops=segment_values_B * is_segment_B + token_values_B * is_token_B,
    )


def _reaching(values: Tensor, threshold: float) -> Tensor:
    """Indices, ascending, of the values >= threshold, which is rounded to their dtype first.

    0.01 as float32 is below 0.01 as float64: unrounded, a value at the threshold would pass.
    """
    bound = torch.tensor(threshold, dtype=values.dtype).clamp(min=torch.finfo(values.dtype).tiny)
    return (values >= bound).nonzero().squeeze(1)


def _first_of_each_owner(indices: Tensor, owners: Tensor, layout: PackedLayout) -> Tensor:
    """[B] int64; lowest of the ascending indices that each trajectory owns, len(owners) if none.

    The tokens of a trajectory lie together, so its lowest index is the one after another owner's.
    """
    index_owners = owners[indices]
    is_first = is_run_start(index_owners)
    none_B = torch.full_like(layout.trajectory_lengths, len(owners))
    return none_B.index_copy(0, index_owners[is_first], indices[is_first])


def _pad(values: Tensor) -> Tensor:
    return torch.cat([values, values.new_zeros(1)])
