"""Shares out what a checkpoint's data ranks held over another number of data ranks.

Reads and writes nothing; does not decide when that is needed. With the same number of ranks each
takes its own part back instead, and the run goes on exactly as it would have.

Example, 2 ranks to 1: rank 0 had drawn groups 0, 2, 4 of the stream, rank 1 only group 1. The one
rank holds what was left of 0, 1, 2, 4; group 3, which nobody has drawn, is at the head of its
queue; its stream goes on with group 5.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict

from rollverify.errors import CheckpointError
from rollverify.rollout.trajectory import num_tokens

Part = tuple[list[TensorDict], dict[str, Any]]
"""What one data rank saved: its trajectories, and the states of "buffer", "ledger", "queue" and
"rollouter" under these keys."""


def redistribute(
    parts: Sequence[Part],
    *,
    data_rank: int,
    data_world_size: int,
    prompt_index_of: Callable[[int], int],
) -> Part:
    """Give one rank of a new number of data ranks its part.

    Groups stay whole. The longest goes first, each to the rank with the fewest tokens so far.
    Groups of the stream that no rank had drawn, because the ranks were not equally far, wait in the
    queues together with those that had come back, so that no prompt is skipped. Counts that are
    only ever added up over ranks are added up on rank 0.

    Args:
        parts: of all old data ranks, in the order of their ranks.
        data_rank: the new rank.
        data_world_size: number of new data ranks.
        prompt_index_of: place in the training set of the prompt at a place of the stream; a group's
            id is the place of its prompt.

    Returns:
        The part of `data_rank`, in the form of `parts`. Its values also hold "num_drawn", the
        prompts of the stream before the new ranks' next batch: where the loader has to go on.

    Raises:
        CheckpointError: if the parts do not belong together.

    Source:
        Our choice. All new ranks must be given the same `parts`.
    """
    values = [part[1] for part in parts]
    groups = _groups(parts)
    waiting = {
        group_id: (group_id, prompt_index, num_requests)
        for one in values
        for group_id, prompt_index, num_requests in one["queue"]["returned"]
    }
    live = {group_id: state for one in values for group_id, state in one["ledger"]["live"]}
    num_streamed = [one["queue"]["num_streamed"] for one in values]
    next_batch, undrawn = _go_on_with(num_streamed, data_world_size)
    _check_owners(values, groups, live, undrawn, end=next_batch * data_world_size)
    waiting |= {group_id: (group_id, prompt_index_of(group_id), 0) for group_id in undrawn}
    returned = [list(waiting[group_id]) for group_id in sorted(waiting)][data_rank::data_world_size]
    mine = _share(groups, data_world_size)[data_rank]
    held = sorted({*mine, *(entry[0] for entry in returned)} & live.keys())
    is_first = data_rank == 0
    return [one for group_id in mine for one in groups[group_id]], {
        "buffer": _sums([one["buffer"] for one in values], is_first),
        "ledger": {
            **_sums([one["ledger"] for one in values], is_first),
            "live": [[group_id, live[group_id]] for group_id in held],
        },
        "queue": {"returned": returned, "num_streamed": next_batch},
        "rollouter": _sums([one["rollouter"] for one in values], is_first),
        "num_drawn": next_batch * data_world_size,
    }


def _groups(parts: Sequence[Part]) -> dict[int, list[TensorDict]]:
    """Trajectories by group id, in the order in which their rank had them."""
    groups: dict[int, list[TensorDict]] = {}
    ranks: dict[int, int] = {}
    for rank, (trajectories, _) in enumerate(parts):
        for one in trajectories:
            group_id = int(one["group_id"])
            if ranks.setdefault(group_id, rank) != rank:
                raise _damaged(f"ranks {ranks[group_id]} and {rank} both hold group {group_id}")
            groups.setdefault(group_id, []).append(one)
    return groups


def _go_on_with(num_streamed: Sequence[int], data_world_size: int) -> tuple[int, list[int]]:
    """(number of the next batch of the new stream, groups before it that nobody has drawn).

    Old rank r has drawn groups r, r + W, ... of its W ranks, `num_streamed[r]` of them.
    """
    old_size = len(num_streamed)
    # One past the last group that each old rank has drawn.
    ends = [(count - 1) * old_size + rank + 1 for rank, count in enumerate(num_streamed) if count]
    next_batch = -(-max(ends, default=0) // data_world_size)
    # Before the first round that some rank has not taken part in, all groups are drawn.
    candidates = range(min(num_streamed) * old_size, next_batch * data_world_size)
    return next_batch, [g for g in candidates if g // old_size >= num_streamed[g % old_size]]


def _share(groups: dict[int, list[TensorDict]], data_world_size: int) -> list[list[int]]:
    """Group ids of each new rank, ascending; ties go to the lower id and the lower rank."""
    sizes = {group_id: sum(map(num_tokens, members)) for group_id, members in groups.items()}
    shares: list[list[int]] = [[] for _ in range(data_world_size)]
    loads = [0] * data_world_size
    for group_id in sorted(sizes, key=lambda one: (-sizes[one], one)):
        rank = loads.index(min(loads))
        shares[rank].append(group_id)
        loads[rank] += sizes[group_id]
    return [sorted(share) for share in shares]


def _sums(states: Sequence[dict[str, Any]], is_first: bool) -> dict[str, int]:
    """Sums of the counts, for the first rank; zeros for the others."""
    counts = {key for key, value in states[0].items() if type(value) is int}
    return {key: sum(one[key] for one in states) * is_first for key in sorted(counts)}


def _check_owners(
    values: Sequence[dict[str, Any]],
    groups: dict[int, list[TensorDict]],
    live: dict[int, str],
    undrawn: Sequence[int],
    *,
    end: int,
) -> None:
    """Every group has one place, and buffers, queues and ledgers agree on it."""
    returned = [entry[0] for one in values for entry in one["queue"]["returned"]]
    listed = [entry[0] for one in values for entry in one["ledger"]["live"]]
    for name, owners in (("place", [*groups, *returned, *undrawn]), ("ledger entry", listed)):
        twice = [group_id for group_id, count in Counter(owners).items() if count > 1]
        if twice:
            raise _damaged(f"group {min(twice)} has more than one {name}")
    lost = (groups.keys() - live.keys()) | (live.keys() - groups.keys() - set(returned))
    if lost:
        raise _damaged(f"the ledgers do not agree with the buffers on group {min(lost)}")
    beyond = [group_id for group_id in (*groups, *returned) if group_id >= end]
    if beyond:
        raise _damaged(f"group {min(beyond)} is beyond what the ranks have drawn")


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"the parts of the checkpoint's ranks do not fit together ({what}); resume with as many "
        "ranks as wrote it, or delete its folder to resume from the one before"
    )
