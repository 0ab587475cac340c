"""Response tokens of a list of trajectories, laid end to end, and what belongs to each of them.

Does not pack rows for a forward pass: see `packing.py`, which also brings values back from there.

Example: responses of 2, 0 and 3 tokens give N = 5; token 3 is the second one of trajectory 2.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.algorithms.packed_layout import PackedLayout, pack_layout
from rollverify.rollout.schema import FIELDS


def flat(trajectories: Sequence[TensorDict], key: str) -> Tensor:
    """[N] values of a per-token key of the response, end to end.

    Args:
        trajectories: in the order wanted.
        key: a key of `FIELDS` with one value per response token.

    Returns:
        [N], the key's dtype.
    """
    return torch.cat([torch.zeros(0, dtype=FIELDS[key].dtype), *(one[key] for one in trajectories)])


def response_layout(trajectories: Sequence[TensorDict], mask: Tensor | None = None) -> PackedLayout:
    """Where trajectories and segments lie when response tokens are laid end to end as by `flat`.

    Args:
        trajectories: B of them.
        mask: [N] bool; tokens that are to belong to a segment. None: all.

    Returns:
        The layout; trajectory index is the place in the list.
    """
    lengths = torch.tensor([one["response_ids"].numel() for one in trajectories], dtype=torch.int64)
    owners = torch.arange(len(trajectories)).repeat_interleave(lengths)
    segments = flat(trajectories, "segment_ids")
    if mask is not None:
        segments = torch.where(mask, segments, -1)
    return pack_layout(owners, segments, len(trajectories))
