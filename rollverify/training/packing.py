"""Lays trajectories end to end into rows of bounded length, and the same rows on every rank.

Per token t of a trajectory the row holds what belongs to the token after it: `targets[t]` is token
t + 1, and every other array is aligned with `targets`. The last token is never fed.

Example: prompt [7, 8], response [5, 6]: tokens [7, 8, 5], targets [8, 5, 6], loss_mask
[False, True, True].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.rollout.schema import num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRow:
    """One packed row; all tensors are [T]."""

    tokens: Tensor
    """int64; ids fed to the model."""

    positions: Tensor
    """int64; restart at 0 at each trajectory."""

    targets: Tensor
    """int64; ids that follow."""

    loss_mask: Tensor
    """bool; True where the target is a response token that the loss sums over."""

    behavior_logprobs: Tensor
    """float32 nats; 0 where the target is a prompt token."""

    advantages: Tensor
    """float32; the trajectory's advantage on all its tokens."""

    sequence_ids: Tensor
    """int64; index of the trajectory in the list that was packed, -1 in a filler row."""


def assign_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put items into rows, longest first into the fullest row that has room.

    Args:
        lengths: tokens of each item, >= 0.
        max_tokens: limit of a row; a longer item gets a row of its own.

    Returns:
        Lists of item indices, each ascending; depends on the lengths alone.

    Source:
        Best-fit decreasing bin packing.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [r for r in range(len(rows)) if room[r] >= lengths[item]]
        if fits:
            row = min(fits, key=lambda r: room[r])
            rows[row].append(item)
            room[row] -= lengths[item]
        else:
            rows.append([item])
            room.append(max_tokens - lengths[item])
    return [sorted(row) for row in rows]


def pack_trajectories(
    trajectories: Sequence[TensorDict], advantages: Tensor, max_tokens: int
) -> list[TrajectoryRow]:
    """Pack this rank's trajectories.

    Args:
        trajectories: B of them, each at least 2 tokens long.
        advantages: [B] float32.
        max_tokens: limit of a row in tokens; a longer trajectory gets a row of its own.

    Returns:
        Rows; every trajectory lies in exactly one.

    Raises:
        ValueError: if the advantages do not fit, or a trajectory is too short to have a target.
    """
    if advantages.shape != (len(trajectories),):
        raise ValueError(f"{len(trajectories)} trajectories, advantages {list(advantages.shape)}")
    lengths = [num_tokens(trajectory) - 1 for trajectory in trajectories]
    if any(length < 1 for length in lengths):
        raise ValueError("a trajectory of fewer than 2 tokens cannot be packed")
    return [
        _row([(i, trajectories[i], advantages[i]) for i in row])
        for row in assign_rows(lengths, max_tokens)
    ]


def _row(members: list[tuple[int, TensorDict, Tensor]]) -> TrajectoryRow:
    columns: dict[str, list[Tensor]] = {name: [] for name in TrajectoryRow.__slots__}
    for index, trajectory, advantage in members:
        prompt, response = trajectory["prompt_ids"], trajectory["response_ids"]
        ids = torch.cat([prompt, response])
        size, context = len(ids) - 1, len(prompt) - 1
        columns["tokens"].append(ids[:-1])
        columns["positions"].append(torch.arange(size))
        columns["targets"].append(ids[1:])
        columns["loss_mask"].append(
            torch.cat([torch.zeros(context, dtype=torch.bool), trajectory["loss_mask"]])
        )
        columns["behavior_logprobs"].append(
            torch.cat([torch.zeros(context), trajectory["behavior_logprobs"]])
        )
        columns["advantages"].append(advantage.expand(size))
        columns["sequence_ids"].append(torch.full((size,), index))
    return TrajectoryRow(**{name: torch.cat(parts) for name, parts in columns.items()})


def filler_row() -> TrajectoryRow:
    """A row of one token without loss, for a rank that has fewer rows than another."""
    zero = torch.zeros(1, dtype=torch.int64)
    return TrajectoryRow(
        tokens=zero,
        positions=zero,
        targets=zero,
        loss_mask=torch.zeros(1, dtype=torch.bool),
        behavior_logprobs=torch.zeros(1),
        advantages=torch.zeros(1),
        sequence_ids=zero - 1,
    )


def equalize_rows(
    rows: list[TrajectoryRow], group: dist.ProcessGroup | None = None, device: str = "cpu"
) -> list[TrajectoryRow]:
    """Append filler rows until every rank has as many as the rank with most.

    FSDP gathers weights in every forward pass, so ranks that run different numbers wait forever.
    Collective: yes, over `group`.

    Args:
        rows: this rank's rows.
        group: data-parallel ranks; None means the world.
        device: where the count is reduced.

    Returns:
        The rows, then fillers; at least one row.
    """
    most = max(1, len(rows))
    if dist.is_initialized():
        count = torch.tensor(most, device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        most = int(count.item())
    return rows + [filler_row() for _ in range(most - len(rows))]
