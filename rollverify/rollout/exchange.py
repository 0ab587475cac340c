"""What the ranks tell each other in a rollout phase, and moves of whole groups between them.

Everything is a function of counts and ids, never of the clock, so a run can be repeated. Does not
decide when a phase ends.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from tensordict import TensorDict

from rollverify.errors import RolloutError
from rollverify.ranks import _world, gather
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.rollout.prompt_queue import PromptQueue
from rollverify.rollout.trajectory import new_trajectory, num_tokens


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


def tokens_of(groups: dict[int, list[TensorDict]]) -> dict[int, int]:
    """Prompt and response tokens of each group.

    Args:
        groups: trajectories by group id.

    Returns:
        Tokens by group id.
    """
    return {g: sum(map(num_tokens, members)) for g, members in groups.items()}


logger = logging.getLogger(__name__)


def draw_group(
    queue: PromptQueue, buffer: TrajectoryBuffer, ledger: PromptLedger, group_size: int
) -> list[TensorDict]:
    """Draw a prompt and enter its group, without a token.

    Args:
        queue: gives the prompt.
        buffer: gets the group.
        ledger: learns of it, unless it was drawn before and came back.
        group_size: responses of a group.

    Returns:
        The trajectories by sample.
    """
    drawn = queue.draw()
    group = [
        new_trajectory(
            prompt_ids=drawn.prompt.token_ids,
            group_id=drawn.group_id,
            prompt_index=drawn.prompt.prompt_index,
            sample_index=sample,
            num_requests=drawn.num_requests,
        )
        for sample in range(group_size)
    ]
    buffer.add_group(group)
    if drawn.group_id not in ledger:
        ledger.add(drawn.group_id)
    return group


def drop_groups(
    buffer: TrajectoryBuffer,
    ledger: PromptLedger,
    queue: PromptQueue,
    may_go_on: Callable[[TensorDict], bool],
    why: str,
) -> int:
    """Give up groups in which some trajectory may not go on; their prompts return to the queue.

    They are its head, and start again with sampling streams that were not used before.

    Args:
        buffer: holds paused groups only; loses those.
        ledger: books them as pending.
        queue: gets their prompts.
        may_go_on: asked of each trajectory, finished or not.
        why: the reason, for the log.

    Returns:
        How many groups were dropped.
    """
    dropped = [g for g in buffer.group_ids() if not all(map(may_go_on, buffer.group(g)))]
    for group_id in dropped:
        group = buffer.pop_group(group_id, "dropped")
        ledger.move(group_id, PromptState.PENDING)
        num_requests = max(int(one["num_requests"]) for one in group)
        queue.put_back(group_id, int(group[0]["prompt_index"]), num_requests)
    if dropped:
        logger.info("%d unfinished groups are dropped and start again: %s", len(dropped), why)
    return len(dropped)


def balance_buffers(
    buffer: TrajectoryBuffer, ledger: PromptLedger, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Even out the tokens that the ranks' buffers hold, so that none waits for another to score.

    Args:
        buffer: this rank's, with paused groups only.
        ledger: this rank's.
        rank: this rank's place among the data ranks.
        group: the data ranks; None where there is one.

    Source:
        Our choice; collective: yes, over `group`.
    """
    if group is None:
        return
    held = {group_id: buffer.group(group_id) for group_id in buffer.group_ids()}
    moves = balance(gather(tokens_of(held), group))
    leaving = [group_id for group_id, source, _ in moves if source == rank]
    parcel = {group_id: held[group_id] for group_id in leaving}
    states = {group_id: str(ledger.release(group_id)) for group_id in leaving}
    for group_id in leaving:
        buffer.pop_group(group_id, "moved")
    all_states = {g: state for part in gather(states, group) for g, state in part.items()}
    for group_id, members in exchange(parcel, moves, rank, group).items():
        buffer.add_group(members)
        ledger.adopt(group_id, PromptState(all_states[group_id]))
