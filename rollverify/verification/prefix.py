"""Two-stage prefix verification: where unfinished trajectories are cut. Section 4.2, Algorithm 2.

B trajectories, N response tokens of all of them, S segments with at least one token.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollverify.rollout.layout import PackedLayout, is_run_start
from rollverify.verification.ops import check_ops, means_of_runs


class Cut(NamedTuple):
    """Where one trajectory is cut, and why."""

    index: int
    num_kept: int
    """Tokens accepted; 0: start again from the prompt."""
    rule: Literal["segment", "token"]
    """Stage that cut. "token" if both did, since the second only looks at what the first kept."""
    ops: float
    """What reached its threshold: the mean of the segment, or the OPS of the token."""


def find_cuts(
    token_ops: Tensor,
    layout: PackedLayout,
    *,
    segment_threshold: float,
    token_threshold: float,
) -> list[Cut]:
    """Cuts of the trajectories to their longest prefix that passes both stages (Algorithm 2).

    Stage 1 drops the first segment whose mean OPS is >= segment_threshold (d_s) and all after it,
    stage 2, of the rest, the first token whose OPS is >= token_threshold (d_t) and all after it.
    Both bounds are inclusive, > 0 and compared in the dtype of the OPS [N]; inf turns a stage off.
    What is accepted whole has no cut. Synchronizes with the device.
    """
    check_ops(token_ops, layout)
    means_S = means_of_runs(token_ops, layout.segment_lengths)
    # Both stages give the index one past the last for "none"; padded, it can be looked up too.
    bad_segments = _reaching(means_S, segment_threshold)
    segment_B = _first_of_each_owner(bad_segments, layout.segment_owners, layout)
    starts = torch.cat([layout.segment_starts, layout.segment_starts.new_tensor([len(token_ops)])])
    stage_1_B = starts[segment_B]
    bad_tokens = _reaching(token_ops, token_threshold)
    token_B = _first_of_each_owner(bad_tokens, layout.token_owners, layout)
    is_token_B = token_B < stage_1_B
    cut_B = torch.minimum(stage_1_B, token_B)
    kept_B = cut_B - layout.trajectory_starts
    ops_B = torch.where(is_token_B, _pad(token_ops)[token_B], _pad(means_S)[segment_B])
    columns = (row.tolist() for row in (cut_B < len(token_ops), kept_B, is_token_B, ops_B))
    return [
        Cut(index, num_kept, "token" if is_token else "segment", ops)
        for index, (is_cut, num_kept, is_token, ops) in enumerate(zip(*columns, strict=True))
        if is_cut
    ]


def _reaching(values: Tensor, threshold: float) -> Tensor:
    """Indices, ascending, of the values >= threshold, which is rounded to their dtype first.

    0.01 as float32 is below 0.01 as float64: unrounded, a value at the threshold would pass.
    """
    bound = torch.tensor(threshold, dtype=values.dtype).clamp(min=torch.finfo(values.dtype).tiny)
    return (values >= bound).nonzero().squeeze(1)


def _first_of_each_owner(indices: Tensor, owners: Tensor, layout: PackedLayout) -> Tensor:
    """[B] int64; lowest of the ascending indices that each trajectory owns, len(owners) if none."""
    index_owners = owners[indices]
    is_first = is_run_start(index_owners)
    none_B = torch.full_like(layout.trajectory_lengths, len(owners))
    return none_B.index_copy(0, index_owners[is_first], indices[is_first])


def _pad(values: Tensor) -> Tensor:
    return torch.cat([values, values.new_zeros(1)])
