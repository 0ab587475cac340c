"""What the ranks tell each other in a rollout phase, and moves of whole groups between them.

Everything is a function of counts and ids, never of the clock, so a run can be repeated. Does not
decide when a phase ends.
"""

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict

from rollverify.errors import RolloutError
from rollverify.rollout.schema import num_tokens

T = TypeVar("T")


def sum_over_ranks(values: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """Add up counts over the data ranks.

    Args:
        values: the same number of counts on every rank.
        group: the data ranks; None where there is one.

    Returns:
        The sums, equal on every rank.

    Source:
        Collective: yes, over `group`; one all-reduce.
    """
    if group is None:
        return list(values)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    counts = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(counts, group=group)
    return counts.tolist()


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """What each data rank has to say, in the order of the ranks.

    Args:
        value: anything that can be pickled.
        group: the data ranks; None where there is one.

    Returns:
        One value per rank, equal on every rank.

    Source:
        Collective: yes, over `group`.
    """
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree_on_failure(failure: Exception | None) -> str | None:
    """Tell all ranks of the world, those of one tensor-parallel group included, of a failure.

    Args:
        failure: this rank's, if it failed.

    Returns:
        The message of the first rank that failed; None if none did.

    Source:
        Collective: yes, over the world.
    """
    message = None if failure is None else str(failure)
    messages = gather(message, dist.group.WORLD if dist.is_initialized() else None)
    return next((one for one in messages if one is not None), None)


def check_twins(data_rank: int, data_world_size: int, trajectories: Sequence[TensorDict]) -> None:
    """Make sure that ranks of one tensor-parallel group hold the same trajectories.

    Each has an engine of its own; one that differs would spoil every shared matrix product.

    Args:
        data_rank: equal for ranks that must agree.
        data_world_size: number of data ranks; without tensor parallelism that of all ranks.
        trajectories: what they train on.

    Raises:
        RolloutError: on every rank, if two of them differ.

    Source:
        Collective: yes, over the world, where there is tensor parallelism.
    """
    if not dist.is_initialized() or dist.get_world_size() == data_world_size:
        return
    digest = hashlib.blake2b(digest_size=8)
    for one in trajectories:
        digest.update(one["response_ids"].numpy().tobytes())
    seen = gather((data_rank, digest.hexdigest()), dist.group.WORLD)
    if len(set(seen)) != data_world_size:
        raise RolloutError(
            "ranks of one tensor-parallel group sampled different tokens; their engines must be "
            "started with the same settings"
        )


def select_groups(
    complete: dict[int, int],
    num_groups: int,
    group: dist.ProcessGroup | None,
    *,
    spare: Mapping[int, int] = MappingProxyType({}),
) -> list[dict[int, int]]:
    """Choose the groups to train on: of all complete ones those with the lowest ids.

    The oldest first, so that a group that took long is not passed over again.

    Args:
        complete: tokens of this rank's complete groups by group id.
        num_groups: how many to choose, at most the number there is over all ranks.
        group: the data ranks; None where there is one.
        spare: tokens of this rank's groups that are taken only where the others are too few.

    Returns:
        Per data rank, tokens of its chosen groups by group id, ascending; equal on every rank.

    Raises:
        ValueError: if there are not enough.

    Source:
        Collective: yes, over `group`. The order is our choice; the paper does not name one.
    """
    gathered = gather((complete, dict(spare)), group)
    first, second = ([part[i] for part in gathered] for i in range(2))
    ids = [g for part in (first, second) for g in sorted(g for rank in part for g in rank)]
    if len(ids) < num_groups:
        raise ValueError(f"{num_groups} complete groups are needed, there are {len(ids)}")
    chosen = set(ids[:num_groups])
    per_rank = [one | other for one, other in zip(first, second, strict=True)]
    return [{g: rank[g] for g in sorted(rank) if g in chosen} for rank in per_rank]


def share_of_lowest(
    own: Sequence[int], count: int, rank: int, group: dist.ProcessGroup | None
) -> int:
    """How many of the lowest ids of all ranks are this rank's.

    Groups drawn by it have the ids that one rank alone would have drawn next.

    Args:
        own: ids that this rank would draw next, at least `count` of them.
        count: ids to be drawn over all ranks.
        rank: this rank's place among the data ranks.
        group: the data ranks; None where there is one.

    Returns:
        A number that adds up to `count` over the ranks.

    Source:
        Collective: yes, over `group`.
    """
    ids = [(one, of) for of, ids in enumerate(gather(list(own), group)) for one in ids]
    return sum(of == rank for _, of in sorted(ids)[:count])


def balance(per_rank: Sequence[dict[int, int]]) -> list[tuple[int, int, int]]:
    """Plan moves of whole groups from the fullest rank to the emptiest while that helps.

    Args:
        per_rank: tokens of each rank's groups by group id.

    Returns:
        (group id, from rank, to rank), each group at most once; no move leaves the two ranks it
        joins with a larger maximum than before.

    Source:
        Our choice: greedy pairwise balancing, few moves; ties go to the lower id and rank.
    """
    loads = [sum(groups.values()) for groups in per_rank]
    at_home = [dict(groups) for groups in per_rank]
    moves: list[tuple[int, int, int]] = []
    while True:
        full = max(range(len(loads)), key=lambda rank: (loads[rank], -rank))
        empty = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        gap = loads[full] - loads[empty]
        fits = [(abs(gap - 2 * size), g) for g, size in at_home[full].items() if 0 < size < gap]
        if not fits:
            return moves
        group_id = min(fits)[1]
        size = at_home[full].pop(group_id)
        loads[full] -= size
        loads[empty] += size
        moves.append((group_id, full, empty))


def exchange(
    groups: dict[int, list[TensorDict]],
    moves: Sequence[tuple[int, int, int]],
    rank: int,
    group: dist.ProcessGroup | None,
) -> dict[int, list[TensorDict]]:
    """Carry out moves.

    Args:
        groups: this rank's trajectories by group id.
        moves: from `balance`, equal on every rank.
        rank: this rank's place among the data ranks.
        group: the data ranks; None where there is one.

    Returns:
        This rank's groups afterwards, by ascending id.

    Source:
        Collective: yes, over `group`; one message per pair of ranks that exchange anything.
    """
    groups = dict(groups)
    for source, target in sorted({(source, target) for _, source, target in moves}):
        ids = [g for g, *pair in moves if pair == [source, target]]
        if rank == source:
            parcel = [[one.to_dict() for one in groups.pop(g)] for g in ids]
            dist.send_object_list(
                [parcel], dst=dist.get_global_rank(_world(group), target), group=group
            )
        elif rank == target:
            box: list[list[list[dict[str, torch.Tensor]]]] = [[]]
            dist.recv_object_list(box, src=dist.get_global_rank(_world(group), source), group=group)
            for g, members in zip(ids, box[0], strict=True):
                groups[g] = [TensorDict(one, batch_size=[]) for one in members]
    return dict(sorted(groups.items()))


def _world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "one data rank has nobody to exchange groups with"
    return group


def tokens_of(groups: dict[int, list[TensorDict]]) -> dict[int, int]:
    """Prompt and response tokens of each group.

    Args:
        groups: trajectories by group id.

    Returns:
        Tokens by group id.
    """
    return {g: sum(map(num_tokens, members)) for g, members in groups.items()}
