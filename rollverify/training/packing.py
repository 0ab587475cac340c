"""Lays trajectories end to end into rows of bounded length.

Per token t of a trajectory the row holds what belongs to the token after it: `targets[t]` is token
t + 1, and every other array is aligned with `targets`. The last token is never fed.

Example: prompt [7, 8], response [5, 6]: tokens [7, 8, 5], targets [8, 5, 6], loss_mask
[False, True, True].
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.engine.model_folder import RoutingShape
from rollverify.rollout.layout import flat
from rollverify.rollout.trajectory import ROUTING, check_routed, num_tokens

ReplayMode = Literal["off", "trainer", "engine"]
"""Whose choice of experts the trainer repeats; see docs/routing_replay.md."""


def spread_experts(num_tokens: int, routing: RoutingShape) -> Tensor:
    """Experts for tokens that count for nothing, so that no expert gets them all.

    Args:
        num_tokens: T.
        routing: layers L, experts per token K.

    Returns:
        [T, L, K] ids; within a layer each expert comes up equally often, or once more. 4 tokens, 4
        experts and 2 per token give [0, 1], [2, 3], [0, 1], [2, 3] in each layer.

    Source:
        Our choice; fillers that all went to expert 0 would fill its rank's memory.
    """
    size = num_tokens * routing.experts_per_token
    ids = (torch.arange(size) % routing.num_experts).view(num_tokens, 1, routing.experts_per_token)
    return ids.to(routing.dtype).repeat(1, routing.num_layers, 1)


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
    open_rows: list[tuple[int, int]] = []  # (room, row), least room first
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(open_rows, (lengths[item], -1))
        if place < len(open_rows):
            room, row = open_rows.pop(place)
        else:
            room, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(item)
        bisect.insort(open_rows, (room - lengths[item], row))
    return [sorted(row) for row in rows]


def even_row_tokens(total: int, max_tokens: int, rows_at_once: int) -> int:
    """Limit of a row so that rows worked on side by side are equally long.

    Args:
        total: tokens of all rows.
        max_tokens: of the rows worked on at the same time, together.
        rows_at_once: how many these are, >= 1.

    Returns:
        At most `max_tokens` / `rows_at_once`, >= 1; half a percent above an equal share, because
        items are whole.

    Source:
        Our choice.
    """
    limit = max(1, max_tokens // rows_at_once)
    num_rows = rows_at_once * -(-total // (rows_at_once * limit))
    return min(limit, total // num_rows + total // (200 * num_rows) + 1) if total else limit


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """One packed row, as a forward pass needs it; all tensors are [T]."""

    tokens: Tensor
    """int64; ids fed to the model."""

    positions: Tensor
    """int64; restart at 0 at each trajectory."""

    targets: Tensor
    """int64; ids that follow."""

    sequence_ids: Tensor
    """int64; index of the trajectory in the list that was packed, -1 in a filler row."""

    routed_experts: Tensor | None = None
    """[T, L, K] uint8 or int16 ids to replay; None leaves the choice to the router."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRow(PackedRow):
    """One packed row, as training needs it; all tensors are [T]."""

    loss_mask: Tensor
    """bool; True where the target is a response token that the loss sums over."""

    behavior_logprobs: Tensor
    """float32 nats; 0 where the target is a prompt token."""

    anchor_logprobs: Tensor
    """float32 nats; NaN where the target is a prompt token or has no anchor yet."""

    policy_version: Tensor
    """int32; version that sampled the target, -1 where it is a prompt token."""

    advantages: Tensor
    """float32; the trajectory's advantage on all its tokens."""


def pack_trajectories(
    trajectories: Sequence[TensorDict],
    advantages: Tensor,
    max_tokens: int,
    *,
    with_routing: bool = False,
) -> list[TrajectoryRow]:
    """Pack this rank's trajectories for training.

    Args:
        trajectories: B of them, each at least 2 tokens long.
        advantages: [B] float32.
        max_tokens: limit of a row in tokens; a longer trajectory gets a row of its own.
        with_routing: put in the recorded experts.

    Returns:
        Rows; every trajectory lies in exactly one.

    Raises:
        ValueError: if the advantages do not fit, or a trajectory is too short to have a target.
        RolloutError: if a token's experts are wanted and were not recorded.
    """
    if advantages.shape != (len(trajectories),):
        raise ValueError(f"{len(trajectories)} trajectories, advantages {list(advantages.shape)}")
    if any(num_tokens(trajectory) < 2 for trajectory in trajectories):
        raise ValueError("a trajectory of fewer than 2 tokens cannot be packed")
    if not trajectories:
        return []
    packed = _pack(trajectories, range(len(trajectories)), max_tokens, with_routing)
    members = [trajectories[index] for index in packed.order]
    size = len(packed.tokens)
    loss_mask = torch.zeros(size, dtype=torch.bool)
    loss_mask[packed.is_response] = flat(members, "loss_mask")
    behavior = torch.zeros(size)
    behavior[packed.is_response] = flat(members, "behavior_logprobs")
    anchor = torch.full((size,), float("nan"))
    anchor[packed.is_response] = flat(members, "anchor_logprobs")
    version = torch.full((size,), -1, dtype=torch.int32)
    version[packed.is_response] = flat(members, "policy_version")
    columns = packed.columns() | {
        "loss_mask": loss_mask,
        "behavior_logprobs": behavior,
        "anchor_logprobs": anchor,
        "policy_version": version,
        "advantages": advantages[packed.sequence_ids],
    }
    return [TrajectoryRow(**row) for row in _split(columns, packed.row_sizes)]


def pack_for_scoring(
    trajectories: Sequence[TensorDict],
    max_tokens: int,
    *,
    rows_at_once: int = 1,
    with_routing: bool = False,
) -> list[PackedRow]:
    """Pack what has a response; the rest of the list costs nothing.

    Args:
        trajectories: B of them.
        max_tokens: limit in tokens of the rows scored at the same time, together; a trajectory
            longer than one's share gets a row of its own.
        rows_at_once: how many these are.
        with_routing: put in the recorded experts.

    Returns:
        Rows; every trajectory with a response lies in exactly one.

    Raises:
        RolloutError: if a token's experts are wanted and were not recorded.
    """
    places = [i for i, one in enumerate(trajectories) if one["response_ids"].numel()]
    if not places:
        return []
    packed = _pack(trajectories, places, max_tokens, with_routing, rows_at_once)
    return [PackedRow(**row) for row in _split(packed.columns(), packed.row_sizes)]


def trajectory_values(
    rows: Sequence[PackedRow], values: Sequence[Tensor], num_trajectories: int
) -> list[Tensor | None]:
    """What a forward pass gave for the fed tokens, prompt included, back per trajectory.

    Args:
        rows: rows packed from the trajectories, fillers included.
        values: per row [T, ...].
        num_trajectories: length of the list that was packed.

    Returns:
        One [F, ...] per trajectory, dtype of the values; None where it was not packed.
    """
    found: list[Tensor | None] = [None] * num_trajectories
    for row, row_values in zip(rows, values, strict=True):
        owners, sizes = row.sequence_ids.unique_consecutive(return_counts=True)
        for owner, part in zip(owners.tolist(), row_values.split(sizes.tolist()), strict=True):
            if owner >= 0:
                found[owner] = part
    return found


def response_values(
    rows: Sequence[PackedRow], values: Sequence[Tensor], trajectories: Sequence[TensorDict]
) -> Tensor:
    """What a forward pass gave for the response tokens, back in the order of the list.

    Args:
        rows: rows packed from the trajectories, fillers included.
        values: per row [T], such as the log-probs of its targets.
        trajectories: the list that was packed.

    Returns:
        [N] dtype of the values; the response tokens of all trajectories end to end.
    """
    if not rows:
        return torch.zeros(0)
    values_T = torch.cat(list(values))
    # A trajectory lies in one row, so its tokens are one run; its response is the end of the run.
    owners, fed = torch.cat([row.sequence_ids for row in rows]).unique_consecutive(
        return_counts=True
    )
    ends = fed.cumsum(0)[owners >= 0]
    owners = owners[owners >= 0]
    sizes = [one["response_ids"].numel() for one in trajectories]
    sizes_B = torch.tensor(sizes, dtype=torch.int64)  # also where this rank has fillers only
    shifts_B = torch.zeros_like(sizes_B).index_copy_(0, owners, ends) - sizes_B.cumsum(0)
    places = torch.arange(int(sizes_B.sum())) + shifts_B.repeat_interleave(sizes_B)
    return values_T[places.to(values_T.device)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """Rows end to end, before they are split: [T] tensors over all rows."""

    order: list[int]
    """Index of each trajectory, in the order they lie in."""

    row_sizes: list[int]
    tokens: Tensor
    positions: Tensor
    targets: Tensor
    sequence_ids: Tensor
    is_response: Tensor
    routed_experts: Tensor | None

    def columns(self) -> dict[str, Tensor]:
        names = ("tokens", "positions", "targets", "sequence_ids", "routed_experts")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def _pack(
    trajectories: Sequence[TensorDict],
    places: Sequence[int],
    max_tokens: int,
    with_routing: bool,
    rows_at_once: int = 1,
) -> _Packed:
    """Lay out the trajectories at these places, of which there is at least one."""
    prompts = [trajectories[place]["prompt_ids"] for place in places]
    responses = [trajectories[place]["response_ids"] for place in places]
    # numel, not len: five times as fast, and there are hundreds of trajectories.
    lengths = [p.numel() + r.numel() - 1 for p, r in zip(prompts, responses, strict=True)]
    if rows_at_once > 1:
        max_tokens = even_row_tokens(sum(lengths), max_tokens, rows_at_once)
    rows = assign_rows(lengths, max_tokens)
    items = [item for row in rows for item in row]
    order = [places[item] for item in items]
    ids = torch.cat([piece for item in items for piece in (prompts[item], responses[item])])
    sizes = torch.tensor([lengths[item] + 1 for item in items])
    contexts = torch.tensor([prompts[item].numel() - 1 for item in items])
    ends = sizes.cumsum(0)
    is_first, is_last = torch.zeros(2, len(ids), dtype=torch.bool)
    is_first[ends - sizes] = True
    is_last[ends - 1] = True
    fed = sizes - 1
    positions = torch.arange(len(ids) - len(sizes)) - (fed.cumsum(0) - fed).repeat_interleave(fed)
    return _Packed(
        order=order,
        row_sizes=[sum(lengths[item] for item in row) for row in rows],
        tokens=ids[~is_last],
        positions=positions,
        targets=ids[~is_first],
        sequence_ids=torch.tensor(order).repeat_interleave(fed),
        is_response=positions >= contexts.repeat_interleave(fed),
        routed_experts=_routing([trajectories[i] for i in order]) if with_routing else None,
    )


def _routing(trajectories: Sequence[TensorDict]) -> Tensor:
    """[T, L, K]: a trajectory has a row for each token that is fed, so they line up as they are."""
    for one in trajectories:
        check_routed(one)
    return torch.cat([one[ROUTING] for one in trajectories])


def _split(columns: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    """One dict per row."""
    parts = zip(*(column.split(sizes) for column in columns.values()), strict=True)
    return [dict(zip(columns, part, strict=True)) for part in parts]


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


def _largest(count: int, group: dist.ProcessGroup | None, device: str) -> int:
    largest = torch.tensor(count, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest.item())
