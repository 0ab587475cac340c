"""Where each trajectory and each segment lies in packed rows: flat arrays, back to back.

Does not hold log-probs or decide anything: `ops.py`, `verification.py` and `filtering.py` read it.

Dimensions: B trajectories, T packed positions, N response tokens among them (N = T without prompts
and padding), S segments with at least one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.rollout.trajectory import FIELDS


@dataclass(kw_only=True, frozen=True, slots=True)
class PackedLayout:
    """Offsets of trajectories and segments, counted in response tokens. Made by `pack_layout`.

    Example: trajectory 1 with segments of 2 and 1 tokens, then trajectory 0 with 1 token, of 3
    trajectories in all: trajectory_ids [1, 1, 1, 0] and segment_ids [0, 0, 1, 0] give
    segment_starts [0, 2, 3], segment_lengths [2, 1, 1], segment_owners [1, 1, 0],
    nonempty_trajectories [1, 0], trajectory_lengths [1, 3, 0], trajectory_starts [3, 0, 0].
    """

    num_positions: int
    """T, packed positions."""

    response_positions: Tensor | None
    """[N] int64, ascending; the positions that hold response tokens. None: all of them do."""

    token_owners: Tensor
    """[N] int64; index of the trajectory of each response token."""

    segment_starts: Tensor
    """[S] int64; response token that begins each segment, ascending."""

    segment_lengths: Tensor
    """[S] int64, >= 1; tokens of each segment."""

    segment_owners: Tensor
    """[S] int64; index of the trajectory of each segment."""

    segment_ids: Tensor
    """[S] int64; the segment's own id within its trajectory."""

    nonempty_trajectories: Tensor
    """[at most B] int64; trajectories with at least one token, in packed order."""

    trajectory_starts: Tensor
    """[B] int64; response token that begins each trajectory, 0 for one without tokens."""

    trajectory_lengths: Tensor
    """[B] int64; response tokens of each trajectory."""

    @property
    def num_trajectories(self) -> int:
        """B, those without tokens included.

        Source:
            Our choice.
        """
        return len(self.trajectory_lengths)

    def response_values(self, row: Tensor) -> Tensor:
        """The entries of a packed row that belong to response tokens.

        Args:
            row: [T] any dtype.

        Returns:
            [N] same dtype, in packed order; the row itself if every position holds one.

        Raises:
            ValueError: if the row does not have T entries.

        Source:
            Our choice; the paper does not say how trajectories lie in memory.
        """
        if row.shape != (self.num_positions,):
            raise ValueError(
                f"expected one value for each of {self.num_positions} packed positions, "
                f"got shape {list(row.shape)}"
            )
        return row if self.response_positions is None else row[self.response_positions]

    def name_token(self, index: int) -> str:
        """Say in words which response token this is, for messages.

        Args:
            index: response token, 0 <= index < N, in packed order.

        Returns:
            Such as "trajectory 3, response token 17", both from 0.

        Raises:
            IndexError: if there is no such token.

        Source:
            Our choice.
        """
        owner = int(self.token_owners[index].item())
        return f"trajectory {owner}, response token {index - int(self.trajectory_starts[owner])}"


def pack_layout(trajectory_ids: Tensor, segment_ids: Tensor, num_trajectories: int) -> PackedLayout:
    """Index packed trajectories once, for all functions that read them.

    Trajectories may come in any order as long as the tokens of each lie together; so may a number
    of them have no token at all. Synchronizes with the device.

    Args:
        trajectory_ids: [T] integer, in [0, num_trajectories); index of each token's trajectory.
            Ignored outside the response.
        segment_ids: [T] integer; segment of each response token within its trajectory, never
            falling along it (ids may be skipped: a segment paused before its first token leaves
            none). -1 outside the response.
        num_trajectories: B, >= 0.

    Returns:
        The layout; its tensors are on the device of the arguments.

    Raises:
        ValueError: if shapes or dtypes do not fit, an id is out of range, a trajectory is split in
            two, or its segment ids fall.

    Source:
        Segments as in RollVerify Algorithm 1; the flat layout is our choice.
    """
    for name, ids in (("trajectory_ids", trajectory_ids), ("segment_ids", segment_ids)):
        if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"{name} must be [T] integers, got {list(ids.shape)} {ids.dtype}")
    if trajectory_ids.shape != segment_ids.shape:
        raise ValueError(
            f"trajectory_ids has {len(trajectory_ids)} entries, segment_ids {len(segment_ids)}"
        )
    num_positions = len(segment_ids)
    is_response_T = segment_ids >= 0
    positions_N: Tensor | None = None
    if not bool(is_response_T.all()):
        positions_N = is_response_T.nonzero().squeeze(1)
        trajectory_ids, segment_ids = trajectory_ids[positions_N], segment_ids[positions_N]
    owners_N, segment_ids_N = trajectory_ids.long(), segment_ids.long()
    run_starts, run_lengths = _runs(is_run_start(owners_N))
    run_owners = owners_N[run_starts]
    _check_owners(run_owners, num_trajectories)
    starts_S, lengths_S = _runs(is_run_start(owners_N) | is_run_start(segment_ids_N))
    owners_S, ids_S = owners_N[starts_S], segment_ids_N[starts_S]
    _check_order(owners_S, ids_S)
    empty_B = torch.zeros(num_trajectories, dtype=torch.int64, device=owners_N.device)
    return PackedLayout(
        num_positions=num_positions,
        response_positions=positions_N,
        token_owners=owners_N,
        segment_starts=starts_S,
        segment_lengths=lengths_S,
        segment_owners=owners_S,
        segment_ids=ids_S,
        nonempty_trajectories=run_owners,
        trajectory_starts=empty_B.index_copy(0, run_owners, run_starts),
        trajectory_lengths=empty_B.index_copy(0, run_owners, run_lengths),
    )


def is_run_start(ids: Tensor) -> Tensor:
    """Mark where a value differs from the one before it; the first is always marked.

    Args:
        ids: [N] integer.

    Returns:
        [N] bool.

    Raises:
        RuntimeError: from torch, if ids has no dimension.

    Source:
        Our choice.
    """
    starts_N = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=starts_N[1:])
    return starts_N


def _runs(is_start_N: Tensor) -> tuple[Tensor, Tensor]:
    """Start and length of each run, both int64, one entry per run."""
    starts = is_start_N.nonzero().squeeze(1)
    ends = torch.cat([starts[1:], starts.new_full((min(len(starts), 1),), len(is_start_N))])
    return starts, ends - starts


def _check_owners(run_owners: Tensor, num_trajectories: int) -> None:
    if num_trajectories < 0:
        raise ValueError(f"num_trajectories must be >= 0, got {num_trajectories}")
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
