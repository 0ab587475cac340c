"""What ranks do together where one of them may fail: all of them learn of it, and none hangs.

Does not decide what is done; without a process group there is one rank.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rollverify.errors import CheckpointError

T = TypeVar("T")


def from_rank_0(value: bool) -> bool:
    """Rank 0's value: other ranks may see a shared folder late.

    Args:
        value: this rank's.

    Source:
        Collective: yes, over the world.
    """
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_every_rank(action: Callable[[], T]) -> list[T]:
    """Run `action` and learn whether it failed on any rank, so that none waits for one that did.

    Args:
        action: not a collective; its result can be pickled.

    Returns:
        What it returned on each rank, by rank.

    Raises:
        CheckpointError: naming a rank, where it failed on another.
        Exception: what it raised on this rank.

    Source:
        Collective: yes, over the world.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcome = (result, None if failure is None else one_line(failure))
    outcomes = [outcome]
    if dist.is_initialized():
        outcomes *= dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise CheckpointError(f"rank {rank}: {reason}")
    return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType]


def rank_and_size() -> tuple[int, int]:
    """(global rank, number of ranks)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def one_line(error: BaseException) -> str:
    """What was wrong; where DCP has collected the failures of all ranks, the first of them.

    Args:
        error: any exception.
    """
    if isinstance(error, CheckpointException):
        error = next((failure for failure, _ in error.failures.values()), error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
