"""Reduce per-rank numbers to the numbers of the whole run.

Knows nothing of means: add up numerators and denominators and divide afterwards. Percentiles cannot
be added up: gather the values.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rollverify.errors import CheckpointError


def reduce_metrics(
    sums: dict[str, float],
    maxima: dict[str, float],
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Add up `sums` and take the largest of `maxima` over ranks.

    Collective: yes, over `group`; two all-reduces, float64, keys in sorted order. Every rank
    must pass the same keys. Without a process group the values come back unchanged.

    Args:
        sums: values to add.
        maxima: values to take the maximum of.
        group: the ranks that hold different data; None means all.

    Returns:
        The two reduced dicts, equal on every rank of the group.

    Raises:
        RuntimeError: if ranks pass as many keys but not the same ones.
    """
    if not dist.is_initialized():
        return dict(sums), dict(maxima)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    sum_keys, max_keys = sorted(sums), sorted(maxima)
    # If all ranks agree, the largest checksum is also the smallest.
    checksum = float(zlib.crc32("\n".join([*sum_keys, "", *max_keys]).encode()))
    row = [*(maxima[key] for key in max_keys), checksum, -checksum]
    max_row = torch.tensor(row, dtype=torch.float64, device=device)
    dist.all_reduce(max_row, op=dist.ReduceOp.MAX, group=group)
    *max_values, highest, negated_lowest = max_row.tolist()
    if highest != -negated_lowest:
        raise RuntimeError("ranks try to reduce different metric keys; all must pass the same")

    sum_row = torch.tensor([sums[key] for key in sum_keys], dtype=torch.float64, device=device)
    if sum_keys:
        dist.all_reduce(sum_row, op=dist.ReduceOp.SUM, group=group)
    return (
        dict(zip(sum_keys, sum_row.tolist(), strict=True)),
        dict(zip(max_keys, max_values, strict=True)),
    )


def gather_values(rows: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Join lists of values over ranks, in the order of the ranks.

    Collective: yes, over `group`; two all-gathers, whatever the number of lists.

    Args:
        rows: [N_i] tensors of one dtype; the same number of them on every rank, lengths may differ.
        group: the ranks that hold different values.

    Returns:
        [sum of N_i over ranks] per list, same dtype, on the CPU; equal on every rank.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    lengths = torch.tensor([len(row) for row in rows], device=device)
    all_lengths = [torch.zeros_like(lengths) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_lengths, lengths, group=group)
    sizes = [part.tolist() for part in all_lengths]
    joined = torch.cat(list(rows))
    padded = joined.new_zeros(max(map(sum, sizes)), device=device)
    padded[: len(joined)] = joined
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    parts = [
        values.cpu()[: sum(size)].split(size) for values, size in zip(gathered, sizes, strict=True)
    ]
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that hold different data, or the whole world; one rank alone exchanges nothing.

    Every method but the properties is collective over these ranks and blocks.
    """

    rank: int = 0
    """Place of this rank among them."""
    size: int = 1
    group: dist.ProcessGroup | None = None
    """None for one rank, or for the whole world."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Ranks":
        """The ranks of a group; one rank alone where there is none."""
        if group is None:
            return cls()
        return cls(rank=dist.get_rank(group), size=dist.get_world_size(group), group=group)

    @classmethod
    def world(cls) -> "Ranks":
        """All ranks of the run."""
        if not dist.is_initialized():
            return cls()
        return cls(rank=dist.get_rank(), size=dist.get_world_size())

    @property
    def device(self) -> str:
        """Where tensors must lie to be exchanged."""
        return "cuda" if self.size > 1 and dist.get_backend(self.group) == "nccl" else "cpu"

    def reduce(
        self, sums: Mapping[str, float], maxima: Mapping[str, float] | None = None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over ranks, by key, in float64.

        Raises:
            RuntimeError: if ranks pass as many keys but not the same ones.
        """
        if self.size == 1:
            return dict(sums), dict(maxima or {})
        return reduce_metrics(dict(sums), dict(maxima or {}), self.group)

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums by key, in float64."""
        return self.reduce(values)[0]

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Sums of as many counts on every rank, in int64."""
        if self.size == 1:
            return list(counts)
        row = torch.tensor(counts, dtype=torch.int64, device=self.device)
        dist.all_reduce(row, group=self.group)
        return row.tolist()

    def largest(self, count: int) -> int:
        """The largest of one number per rank."""
        if self.size == 1:
            return count
        row = torch.tensor(count, dtype=torch.int64, device=self.device)
        dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.group)
        return int(row.item())

    def join(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Lists of values [N_i] of one dtype -> each list over all ranks, by rank, on the CPU.

        Every rank passes as many lists; their lengths may differ.
        """
        if self.size == 1:
            return [row.cpu() for row in rows]
        return gather_values(rows, self.group)

    def gather(self, value: T) -> list[T]:
        """What each rank has to say, by rank; anything that can be pickled."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: T) -> T:
        """The first rank's value; anything that can be pickled."""
        return self.gather(value)[0]

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; none waits for one on which it failed.

        Returns:
            What it returned, by rank; can be pickled. It must not communicate itself.

        Raises:
            CheckpointError: naming a rank, where it failed on another.
            Exception: what it raised on this rank.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        outcomes = self.gather((result, None if failure is None else one_line(failure)))
        if failure is not None:
            raise failure
        for rank, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise CheckpointError(f"rank {rank}: {reason}")
        return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType]


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


def _world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "one data rank has nobody to exchange groups with"
    return group


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
