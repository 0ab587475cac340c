"""Where each trajectory and each segment lies when response tokens are laid end to end.

Dimensions: B trajectories, N response tokens of all of them, S segments with at least one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.rollout.trajectory import FIELDS


@dataclass(kw_only=True, frozen=True, slots=True)
class PackedLayout:
    """Offsets of trajectories and segments, counted in tokens. Made by `pack_layout`.

    Example: trajectory 1 with segments of 2 and 1 tokens, then trajectory 0 with 1 token, of 3
    trajectories in all: trajectory_ids [1, 1, 1, 0] and segment_ids [0, 0, 1, 0] give
    segment_starts [0, 2, 3], segment_lengths [2, 1, 1], segment_owners [1, 1, 0],
    nonempty_trajectories [1, 0], trajectory_lengths [1, 3, 0], trajectory_starts [3, 0, 0].
    """

    token_owners: Tensor
    """[N] int64; index of the trajectory of each token."""
    segment_starts: Tensor
    """[S] int64, ascending."""
    segment_lengths: Tensor
    """[S] int64, >= 1."""
    segment_owners: Tensor
    """[S] int64; index of the trajectory of each segment."""
    nonempty_trajectories: Tensor
    """[at most B] int64; trajectories with at least one token, in packed order."""
    trajectory_starts: Tensor
    """[B] int64; 0 for one without tokens."""
    trajectory_lengths: Tensor
    """[B] int64."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_owners)

    def name_token(self, index: int) -> str:
        """A token in words, such as "trajectory 3, response token 17", both from 0."""
        owner = int(self.token_owners[index])
        return f"trajectory {owner}, response token {index - int(self.trajectory_starts[owner])}"


def pack_layout(trajectory_ids: Tensor, segment_ids: Tensor, num_trajectories: int) -> PackedLayout:
    """Index packed trajectories, in any order, once for all functions that read them.

    trajectory_ids: [N] integer, in [0, B); the tokens of a trajectory lie together.
    segment_ids: [N] integer; never falling along a trajectory. A segment paused before its first
    token leaves its id out.
    """
    for name, ids in (("trajectory_ids", trajectory_ids), ("segment_ids", segment_ids)):
        if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"{name} must be [N] integers, got {list(ids.shape)} {ids.dtype}")
    if trajectory_ids.shape != segment_ids.shape:
        raise ValueError(
            f"trajectory_ids has {len(trajectory_ids)} entries, segment_ids {len(segment_ids)}"
        )
    owners_N = trajectory_ids.long()
    run_starts, run_lengths = _runs(is_run_start(owners_N))
    run_owners = owners_N[run_starts]
    _check_owners(run_owners, num_trajectories)
    starts_S, lengths_S = _runs(is_run_start(owners_N) | is_run_start(segment_ids))
    owners_S = owners_N[starts_S]
    _check_order(owners_S, segment_ids[starts_S])
    empty_B = torch.zeros(num_trajectories, dtype=torch.int64, device=owners_N.device)
    return PackedLayout(
        token_owners=owners_N,
        segment_starts=starts_S,
        segment_lengths=lengths_S,
        segment_owners=owners_S,
        nonempty_trajectories=run_owners,
        trajectory_starts=empty_B.index_copy(0, run_owners, run_starts),
        trajectory_lengths=empty_B.index_copy(0, run_owners, run_lengths),
    )


def is_run_start(ids: Tensor) -> Tensor:
    """[N] bool; where ids [N] differ from the one before; the first is always marked."""
    starts_N = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=starts_N[1:])
    return starts_N


def _runs(is_start_N: Tensor) -> tuple[Tensor, Tensor]:
    """Start and length of each run, both int64, one entry per run."""
    starts = is_start_N.nonzero().squeeze(1)
    ends = torch.cat([starts[1:], starts.new_full((min(len(starts), 1),), len(is_start_N))])
    return starts, ends - starts


def _check_owners(run_owners: Tensor, num_trajectories: int) -> None:
    is_bad = (run_owners < 0) | (run_owners >= num_trajectories)
    if bool(is_bad.any()):
        raise ValueError(
            f"trajectory id {int(run_owners[is_bad][0])} is not in [0, {num_trajectories})"
        )
    runs_B = run_owners.bincount(minlength=num_trajectories)
    if bool((runs_B > 1).any()):
        raise ValueError(
            f"trajectory {int((runs_B > 1).nonzero()[0])} is split: "
            "the tokens of a trajectory must lie together"
        )


def _check_order(owners_S: Tensor, ids_S: Tensor) -> None:
    is_bad = (owners_S[1:] == owners_S[:-1]) & (ids_S[1:] < ids_S[:-1])
    if bool(is_bad.any()):
        raise ValueError(
            f"segment ids of trajectory {int(owners_S[1:][is_bad][0])} fall: segments must lie in "
            "the order in which they were generated"
        )


def flat(trajectories: Sequence[TensorDict], key: str) -> Tensor:
    """[N] values of a per-token key of the response, trajectories end to end."""
    empty = torch.zeros(0, dtype=FIELDS[key].dtype)
    return torch.cat([empty, *(trajectory[key] for trajectory in trajectories)])


def response_layout(trajectories: Sequence[TensorDict], mask: Tensor | None = None) -> PackedLayout:
    """Layout of tokens laid end to end as by `flat`; of those that a mask [all tokens] keeps."""
    lengths = torch.tensor([len(t["response_ids"]) for t in trajectories], dtype=torch.int64)
    owners = torch.arange(len(trajectories)).repeat_interleave(lengths)
    segments = flat(trajectories, "segment_ids")
    if mask is not None:
        owners, segments = owners[mask], segments[mask]
    return pack_layout(owners, segments, len(trajectories))
