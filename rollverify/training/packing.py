"""Lays trajectories end to end into rows of bounded length.

Row arrays are aligned with `targets`, the token that follows. Prompt [7, 8], response [5, 6]:
tokens [7, 8, 5], targets [8, 5, 6], loss_mask [False, True, True].
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.engine.model_folder import RoutingShape
from rollverify.losses.inputs import RowInputs
from rollverify.ranks import Ranks
from rollverify.rollout.layout import flat
from rollverify.rollout.trajectory import ROUTING, check_routed

ReplayMode = Literal["off", "trainer", "engine"]
"""Whose choice of experts the trainer repeats; see docs/routing_replay.md."""


def spread_experts(num_tokens: int, routing: RoutingShape) -> Tensor:
    """Experts for tokens that count for nothing, [T, L, K] ids, evenly spread.

    Fillers that all went to expert 0 would fill its rank's memory. 4 tokens, 4 experts and 2 per
    token give [0, 1], [2, 3], [0, 1], [2, 3] in each layer.
    """
    size = num_tokens * routing.experts_per_token
    ids = (torch.arange(size) % routing.num_experts).view(num_tokens, 1, routing.experts_per_token)
    return ids.to(routing.dtype).repeat(1, routing.num_layers, 1)


def assign_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: rows of ascending item indices.

    An item longer than a row's `max_tokens` gets one of its own.
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

    Half a percent above an equal share of `total`, because items are whole; `max_tokens` is that of
    all rows at once.
    """
    limit = max(1, max_tokens // rows_at_once)
    num_rows = rows_at_once * -(-total // (rows_at_once * limit))
    return min(limit, total // num_rows + total // (200 * num_rows) + 1) if total else limit


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """One packed row for a forward pass; all tensors are [T]."""

    tokens: Tensor  # int64; ids fed to the model
    positions: Tensor  # int64; restart at 0 at each trajectory
    targets: Tensor  # int64; ids that follow
    sequence_ids: Tensor  # int64; index in the list that was packed, -1 in a filler row
    routed_experts: Tensor | None = None  # [T, L, K] uint8 or int16; None: the router's choice


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRow(PackedRow):
    """One packed row for training."""

    loss: RowInputs
    """Outside the response and in fillers behavior log-probs are 0, sampling anchors NaN."""


def pack_trajectories(
    trajectories: Sequence[TensorDict],
    advantages: Tensor,
    max_tokens: int,
    *,
    policy_version: int = 0,
    with_routing: bool = False,
) -> list[TrajectoryRow]:
    """Pack this rank's trajectories, whole, for training; `advantages` are [B] float32.

    A trajectory over `max_tokens` gets a row of its own. RolloutError if a token's experts are
    wanted and were not recorded.
    """
    if not trajectories:
        return []
    packed = _pack(trajectories, range(len(trajectories)), max_tokens, with_routing)
    members = [trajectories[index] for index in packed.order]

    def column(key: str, outside: float) -> Tensor:
        """[T] over all rows; `outside` where the target is a prompt token."""
        values = flat(members, key)
        column = torch.full((len(packed.tokens),), outside, dtype=values.dtype)
        column[packed.is_response] = values
        return column

    loss = {
        "behavior_logprobs": column("behavior_logprobs", 0.0),
        "sampling_anchor_logprobs": column("anchor_logprobs", float("nan")),
        "advantages": advantages[packed.sequence_ids],
        "ages": policy_version - column("policy_version", policy_version),
        "loss_mask": column("loss_mask", False),
        "sequence_ids": packed.sequence_ids,
    }
    rows = _split(packed.columns(), packed.row_sizes)
    inputs = _split(loss, packed.row_sizes)
    return [
        TrajectoryRow(**row, loss=RowInputs(**values, num_sequences=len(trajectories)))
        for row, values in zip(rows, inputs, strict=True)
    ]


def pack_for_scoring(
    trajectories: Sequence[TensorDict],
    max_tokens: int,
    *,
    rows_at_once: int = 1,
    with_routing: bool = False,
) -> list[PackedRow]:
    """Pack what has a response; `max_tokens` is that of all `rows_at_once` rows together.

    RolloutError if a token's experts are wanted and were not recorded.
    """
    places = [i for i, trajectory in enumerate(trajectories) if trajectory["response_ids"].numel()]
    if not places:
        return []
    packed = _pack(trajectories, places, max_tokens, with_routing, rows_at_once)
    return [PackedRow(**row) for row in _split(packed.columns(), packed.row_sizes)]


def trajectory_values(
    rows: Sequence[PackedRow], values: Sequence[Tensor], num_trajectories: int
) -> list[Tensor | None]:
    """[T, ...] per row, fillers included, back to [F, ...] fed tokens per trajectory of the list.

    None where it was not packed.
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
    """[T] per row, fillers included, back to [N] response tokens in the order of the list."""
    if not rows:
        return torch.zeros(0)
    values_T = torch.cat(list(values))
    # A trajectory lies in one row, so its tokens are one run; its response is the end of the run.
    owners, fed = torch.cat([row.sequence_ids for row in rows]).unique_consecutive(
        return_counts=True
    )
    ends = fed.cumsum(0)[owners >= 0]
    owners = owners[owners >= 0]
    sizes = [trajectory["response_ids"].numel() for trajectory in trajectories]
    sizes_B = torch.tensor(sizes, dtype=torch.int64)  # also where this rank has fillers only
    shifts_B = torch.zeros_like(sizes_B).index_copy_(0, owners, ends) - sizes_B.cumsum(0)
    places = torch.arange(int(sizes_B.sum())) + shifts_B.repeat_interleave(sizes_B)
    return values_T[places.to(values_T.device)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """Rows end to end, before they are split: [T] tensors over all rows."""

    order: list[int]  # index of each trajectory, in the order they lie in
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
    for trajectory in trajectories:
        check_routed(trajectory)
    return torch.cat([trajectory[ROUTING] for trajectory in trajectories])


def _split(columns: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Any]]:
    """One dict per row."""
    parts = zip(*(column.split(sizes) for column in columns.values()), strict=True)
    return [dict(zip(columns, part, strict=True)) for part in parts]


def filler_rows(number: int, routing: RoutingShape | None = None) -> list[TrajectoryRow]:
    """Rows of one token without loss; `routing` gives them experts, spread evenly."""
    zero = torch.zeros(1, dtype=torch.int64)
    loss = RowInputs(
        behavior_logprobs=torch.zeros(1),
        sampling_anchor_logprobs=torch.full((1,), float("nan")),
        advantages=torch.zeros(1),
        ages=torch.zeros(1, dtype=torch.int32),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        sequence_ids=zero - 1,
        num_sequences=1,
    )
    # One by one: `split` would make one empty part of none.
    experts = [None] * number if routing is None else spread_experts(number, routing)[:, None]
    return [
        TrajectoryRow(
            tokens=zero,
            positions=zero,
            targets=zero,
            sequence_ids=zero - 1,
            routed_experts=ids,
            loss=loss,
        )
        for ids in experts
    ]


def equalize_rows(
    rows: list[TrajectoryRow], ranks: Ranks, routing: RoutingShape | None = None
) -> list[TrajectoryRow]:
    """Append filler rows until every rank has as many as the one with most, at least 1. Collective.

    FSDP gathers weights in every forward pass, so ranks that run different numbers wait forever.
    """
    most = max(1, ranks.largest(len(rows)))
    return rows + filler_rows(most - len(rows), routing)
