"""Lays the cuts of Algorithm 2 out by trajectory, those that are not cut included."""

from typing import NamedTuple

from torch import Tensor

from rollverify.rollout.layout import PackedLayout
from rollverify.verification.prefix import find_cuts


class Verified(NamedTuple):
    """One value per trajectory."""

    checked_lengths: list[int]
    accepted_lengths: list[int]
    rules: list[str]
    """"none", "segment" or "token"."""
    cut_indices: list[int]
    """First token dropped, -1 where nothing was cut."""
    cut_ops: list[float]


def verify(ops: Tensor, layout: PackedLayout, d_s: float, d_t: float) -> Verified:
    """Verification under two thresholds."""
    cuts = find_cuts(ops, layout, segment_threshold=d_s, token_threshold=d_t)
    assert [cut.index for cut in cuts] == sorted({cut.index for cut in cuts})
    lengths = layout.trajectory_lengths.tolist()
    by_index = {cut.index: cut for cut in cuts}
    every = [by_index.get(index) for index in range(len(lengths))]
    return Verified(
        checked_lengths=lengths,
        accepted_lengths=[
            cut.num_kept if cut else length for cut, length in zip(every, lengths, strict=True)
        ],
        rules=[cut.rule if cut else "none" for cut in every],
        cut_indices=[cut.num_kept if cut else -1 for cut in every],
        cut_ops=[cut.ops if cut else 0.0 for cut in every],
    )
