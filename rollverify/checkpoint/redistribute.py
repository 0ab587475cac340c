"""Shares out what a checkpoint's data ranks held over another number of data ranks.

Example, 2 ranks to 1: rank 0 had drawn groups 0, 2, 4 of the stream, rank 1 only group 1. The one
rank holds what was left of 0, 1, 2, 4; group 3, which nobody has drawn, is at the head of its
queue; its stream goes on with group 5.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict

from rollverify.errors import CheckpointError
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import num_tokens
from rollverify.rollout.twins import deal_out

Part = tuple[list[TensorDict], dict[str, Any]]
"""Trajectories of a data rank, and its states "buffer", "ledger", "queue" and "rollouter"."""


_COUNTED = ("buffer", "ledger", "rollouter")


def redistribute(
    parts: Sequence[Part], ranks: Ranks, prompt_index_of: Callable[[int], int]
) -> Part:
    """The part of one rank of a new number of data ranks, from the parts of all old ones, by rank.

    Groups stay whole, see `deal_out`.
    Groups of the stream that no rank had drawn, because the ranks were not equally far, wait in the
    queues together with those that had come back, so that no prompt is skipped. Counts that are
    only ever added up over ranks are added up on rank 0. "num_drawn" says where the loader goes on.
    `prompt_index_of`: place of the stream, a group's id -> place in the training set.
    """
    saved = [values for _, values in parts]
    groups = _groups(parts)
    live = {group_id: state for values in saved for group_id, state in values["ledger"]["live"]}
    num_streamed = [values["queue"]["num_streamed"] for values in saved]
    next_batch, undrawn = _go_on_with(num_streamed, ranks.size)
    num_drawn = next_batch * ranks.size
    _check_owners(saved, groups, live, undrawn, end=num_drawn)
    waiting = [list(entry) for values in saved for entry in values["queue"]["returned"]]
    waiting += [[group_id, prompt_index_of(group_id), 0] for group_id in undrawn]
    returned = sorted(waiting)[ranks.rank :: ranks.size]
    sizes = {group_id: sum(map(num_tokens, members)) for group_id, members in groups.items()}
    mine = deal_out(sizes, ranks.size)[ranks.rank]
    held = sorted({*mine, *(entry[0] for entry in returned)} & live.keys())
    sums = {key: _sums([values[key] for values in saved], ranks) for key in _COUNTED}
    return [trajectory for group_id in mine for trajectory in groups[group_id]], {
        **sums,
        "ledger": {**sums["ledger"], "live": [[group_id, live[group_id]] for group_id in held]},
        "queue": {"returned": returned, "num_streamed": next_batch},
        "num_drawn": num_drawn,
    }


def _groups(parts: Sequence[Part]) -> dict[int, list[TensorDict]]:
    """Trajectories by group id, in the order in which their rank had them."""
    groups: dict[int, list[TensorDict]] = {}
    ranks: dict[int, int] = {}
    for rank, (trajectories, _) in enumerate(parts):
        for trajectory in trajectories:
            group_id = int(trajectory["group_id"])
            if ranks.setdefault(group_id, rank) != rank:
                raise _damaged(f"ranks {ranks[group_id]} and {rank} both hold group {group_id}")
            groups.setdefault(group_id, []).append(trajectory)
    return groups


def _go_on_with(num_streamed: Sequence[int], num_ranks: int) -> tuple[int, list[int]]:
    """(number of the next batch of the new stream, groups before it that nobody has drawn).

    Old rank r has drawn groups r, r + W, ... of its W ranks, `num_streamed[r]` of them.
    """
    old_size = len(num_streamed)
    # One past the last group that each old rank has drawn.
    ends = [(count - 1) * old_size + rank + 1 for rank, count in enumerate(num_streamed) if count]
    next_batch = -(-max(ends, default=0) // num_ranks)
    # Before the first round that some rank has not taken part in, all groups are drawn.
    candidates = range(min(num_streamed) * old_size, next_batch * num_ranks)
    return next_batch, [g for g in candidates if g // old_size >= num_streamed[g % old_size]]


def _sums(states: Sequence[dict[str, Any]], ranks: Ranks) -> dict[str, int]:
    """Sums of the counts, for the first rank; zeros for the others."""
    counts = {key for key, value in states[0].items() if type(value) is int}
    return {key: sum(s[key] for s in states) * (ranks.rank == 0) for key in sorted(counts)}


def _check_owners(
    saved: Sequence[dict[str, Any]],
    groups: dict[int, list[TensorDict]],
    live: dict[int, str],
    undrawn: Sequence[int],
    *,
    end: int,
) -> None:
    """Every group has one place, and buffers, queues and ledgers agree on it."""
    returned = [entry[0] for values in saved for entry in values["queue"]["returned"]]
    listed = [entry[0] for values in saved for entry in values["ledger"]["live"]]
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
