"""What the data ranks agree on in a rollout phase, and moves of whole groups between them.

Everything is a function of counts and ids, never of the clock, so a run can be repeated.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tensordict import TensorDict

from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.rollout.trajectory import num_fed_tokens, num_tokens

Work = Callable[[TensorDict], int]
"""What a trajectory costs to train on or score, in any unit."""


def select_groups(
    complete: dict[int, int],
    num_groups: int,
    ranks: Ranks,
    *,
    spare: Mapping[int, int] = MappingProxyType({}),
) -> list[dict[int, int]]:
    """Of all complete groups those with the lowest ids: work by group id, per rank. Collective.

    The oldest first, so that a group that took long is not passed over again; `spare` ones only
    where the others are too few. Both map this rank's group ids to work.
    """
    gathered = ranks.gather((complete, dict(spare)))
    first, second = ([part[i] for part in gathered] for i in range(2))
    ids = [g for part in (first, second) for g in sorted(g for rank in part for g in rank)]
    chosen = set(ids[:num_groups])
    per_rank = [taught | other for taught, other in gathered]
    return [{g: rank[g] for g in sorted(rank) if g in chosen} for rank in per_rank]


def share_of_lowest(own: Sequence[int], count: int, ranks: Ranks) -> int:
    """How many of the `count` lowest ids of all ranks are among this rank's `own`. Collective.

    Groups drawn by it have the ids that one rank alone would have drawn next; `own` are at least
    `count` ids.
    """
    ids = [
        (group_id, rank) for rank, part in enumerate(ranks.gather(list(own))) for group_id in part
    ]
    return sum(rank == ranks.rank for _, rank in sorted(ids)[:count])


def balance(per_rank: Sequence[dict[int, int]]) -> list[tuple[int, int, int]]:
    """Moves (group id, from, to) from the fullest rank to the emptiest while that helps.

    `per_rank`: work by group id. Greedy and pairwise, so that moves are few; ties go to the lower
    id and rank.
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
    groups: dict[int, list[TensorDict]], moves: Sequence[tuple[int, int, int]], ranks: Ranks
) -> dict[int, list[TensorDict]]:
    """Carry out the moves of `balance`; return this rank's groups by ascending id. Collective."""
    groups = dict(groups)
    for source, target in sorted({(source, target) for _, source, target in moves}):
        if ranks.rank == source:
            ids = [g for g, *pair in moves if pair == [source, target]]
            ranks.send([t.to_dict() for g in ids for t in groups.pop(g)], target)
        elif ranks.rank == target:
            for values in ranks.receive(source):
                member = TensorDict(values, batch_size=[])
                groups.setdefault(int(member["group_id"]), []).append(member)
    return dict(sorted(groups.items()))


def work_of(flops: tuple[int, int]) -> Work:
    """Floating point operations of a pass over a trajectory.

    `flops`: of a token in matrices, and in attention per token attended to, of which causal
    attention needs half. Of one response of 64K tokens 2.1 times those of 16 with 4K, at 8B.
    """
    matrices, attention = flops

    def work(trajectory: TensorDict) -> int:
        length = num_fed_tokens(trajectory)
        return matrices * length + attention * length * length // 2

    return work


def sizes_of(groups: dict[int, list[TensorDict]], work: Work = num_tokens) -> dict[int, int]:
    """Work of each group, by group id."""
    return {g: sum(map(work, members)) for g, members in groups.items()}


def balance_buffers(
    buffer: TrajectoryBuffer, ledger: PromptLedger, ranks: Ranks, work: Work = num_tokens
) -> None:
    """Even out work on paused groups, so that no rank waits for another to score. Collective."""
    if ranks.size == 1:
        return
    held = {group_id: buffer.group(group_id) for group_id in buffer.group_ids()}
    moves = balance(ranks.gather(sizes_of(held, work)))
    leaving = [group_id for group_id, source, _ in moves if source == ranks.rank]
    parcel = {group_id: held[group_id] for group_id in leaving}
    states = {group_id: str(ledger.release(group_id)) for group_id in leaving}
    for group_id in leaving:
        buffer.pop_group(group_id, "moved")
    all_states = {g: state for part in ranks.gather(states) for g, state in part.items()}
    for group_id, members in exchange(parcel, moves, ranks).items():
        buffer.add_group(members)
        ledger.adopt(group_id, PromptState(all_states[group_id]))
