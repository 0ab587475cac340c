"""Rows that belong to no trajectory, so that every rank runs the same number of forward passes.

Does not pack trajectories: see `packing.py`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rollverify.training.packing import PackedRow, TrajectoryRow
from rollverify.training.routing import RoutingShape, spread_experts


def filler_rows(number: int, routing: RoutingShape | None = None) -> list[TrajectoryRow]:
    """Rows of one token without loss, for a rank that has fewer rows than another.

    Args:
        number: how many.
        routing: gives them experts, spread evenly; None leaves the choice to the router.
    """
    zero = torch.zeros(1, dtype=torch.int64)
    # One by one: `split` would make one empty part of none.
    experts = [None] * number if routing is None else spread_experts(number, routing)[:, None]
    return [
        TrajectoryRow(
            tokens=zero,
            positions=zero,
            targets=zero,
            loss_mask=torch.zeros(1, dtype=torch.bool),
            behavior_logprobs=torch.zeros(1),
            anchor_logprobs=torch.full((1,), float("nan")),
            policy_version=torch.full((1,), -1, dtype=torch.int32),
            advantages=torch.zeros(1),
            sequence_ids=zero - 1,
            routed_experts=ids,
        )
        for ids in experts
    ]


def equalize_rows(
    rows: list[TrajectoryRow],
    group: dist.ProcessGroup | None = None,
    device: str = "cpu",
    routing: RoutingShape | None = None,
) -> list[TrajectoryRow]:
    """Append filler rows until every rank has as many as the rank with most.

    FSDP gathers weights in every forward pass, so ranks that run different numbers wait forever.
    Collective: yes, over `group`.

    Args:
        rows: this rank's rows.
        group: data-parallel ranks; None means the world.
        device: where the count is reduced.
        routing: of the fillers, see `filler_rows`.

    Returns:
        The rows, then fillers; at least one row.
    """
    most = max(1, len(rows))
    if dist.is_initialized():
        most = _largest(most, group, device)
    return rows + filler_rows(most - len(rows), routing)


def fill_rows(
    rows: Sequence[PackedRow],
    group: dist.ProcessGroup,
    device: str = "cpu",
    routing: RoutingShape | None = None,
) -> list[PackedRow]:
    """Append filler rows for scoring; like `equalize_rows`, but none where no rank has a row.

    Collective: yes, over `group`.

    Args:
        rows: this rank's rows.
        group: data-parallel ranks.
        device: where the count is reduced.
        routing: of the fillers, see `filler_rows`.

    Returns:
        The rows, then fillers.
    """
    most = _largest(len(rows), group, device)
    return [*rows, *filler_rows(most - len(rows), routing)]


def _largest(count: int, group: dist.ProcessGroup | None, device: str) -> int:
    largest = torch.tensor(count, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest.item())
