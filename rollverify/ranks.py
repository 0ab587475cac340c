"""What ranks tell each other; one rank alone exchanges nothing.

Means and percentiles cannot be added up: sum numerators and denominators, or join the values.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rollverify.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks with different data, or the world; all but properties, `send`, `receive` collective."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """None for one rank, or for the whole world."""

    num_entered: ClassVar[int] = 0
    """Times that this process has told others something, or waits to."""

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

    @classmethod
    def patient(cls) -> "Ranks":
        """All ranks of the run, for waits that may take long, see `make_patient`."""
        world = cls.world()
        return cls(rank=world.rank, size=world.size, group=_patient.get("group"))

    @property
    def device(self) -> str:
        """Where tensors must lie to be exchanged."""
        return "cuda" if self.size > 1 and dist.get_backend(self.group) == "nccl" else "cpu"

    def reduce(
        self, sums: Mapping[str, float], maxima: Mapping[str, float] | None = None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over ranks, by key, in float64."""
        maxima = maxima or {}
        if self.size == 1:
            return dict(sums), dict(maxima)
        sum_keys, max_keys = sorted(sums), sorted(maxima)
        # If all ranks agree, the largest checksum is also the smallest.
        checksum = float(zlib.crc32("\n".join([*sum_keys, "", *max_keys]).encode()))
        largest = [*(maxima[key] for key in max_keys), checksum, -checksum]
        *max_values, highest, negated_lowest = self._all_reduced(largest, dist.ReduceOp.MAX)
        if highest != -negated_lowest:
            raise RuntimeError("ranks try to reduce different metric keys; all must pass the same")
        totals = self._all_reduced([sums[key] for key in sum_keys]) if sum_keys else []
        return (
            dict(zip(sum_keys, totals, strict=True)),
            dict(zip(max_keys, max_values, strict=True)),
        )

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums by key, in float64."""
        return self.reduce(values)[0]

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Sums of as many counts on every rank, in int64."""
        return list(counts) if self.size == 1 else self._all_reduced(counts, dtype=torch.int64)

    def largest(self, count: int) -> int:
        """The largest of one number per rank."""
        if self.size == 1:
            return count
        return self._all_reduced([count], dist.ReduceOp.MAX, torch.int64)[0]

    def are_equal(self, number: int) -> bool:
        """Whether all ranks pass the same number, of at most 63 bits."""
        if self.size == 1:
            return True
        highest, negated_lowest = self._all_reduced(
            [number, -number], dist.ReduceOp.MAX, torch.int64
        )
        return highest == -negated_lowest

    def join(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Lists of values [N_i] of one dtype -> each list over all ranks, by rank, on the CPU.

        Every rank passes as many lists; their lengths may differ.
        """
        if self.size == 1:
            return [row.cpu() for row in rows]
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        sizes = [part.tolist() for part in self._all_gathered(lengths)]
        joined = torch.cat(list(rows))
        padded = joined.new_zeros(max(map(sum, sizes)), device=self.device)
        padded[: len(joined)] = joined
        parts = [
            values.cpu()[: sum(size)].split(size)
            for values, size in zip(self._all_gathered(padded), sizes, strict=True)
        ]
        return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]

    def gather(self, value: T) -> list[T]:
        """What each rank has to say, by rank; anything that can be pickled."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        Ranks.num_entered += 1
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: T) -> T:
        """The first rank's value; anything that can be pickled."""
        return self.gather(value)[0]

    def send(self, items: Sequence[dict[str, Tensor]], to: int) -> None:
        """Send named CPU tensors to one of these ranks, which calls `receive`.

        Their bytes go as one tensor: pickled, 25 MB took ten times as long.
        """
        layout = [{name: (t.dtype, tuple(t.shape)) for name, t in item.items()} for item in items]
        parts = [_bytes_of(tensor) for item in items for tensor in item.values()]
        dist.send_object_list([layout], group=self.group, dst=self.world_rank(to))
        dist.send(torch.cat([_NOTHING, *parts]), self.world_rank(to), group=self.group)

    def receive(self, source: int) -> list[dict[str, Tensor]]:
        """What one of these ranks sends."""
        box: list[Any] = [None]
        dist.recv_object_list(box, group=self.group, src=self.world_rank(source))
        layout: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = box[0]
        sizes = [
            math.prod(shape) * dtype.itemsize for item in layout for dtype, shape in item.values()
        ]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.recv(received, self.world_rank(source), group=self.group)
        parts = iter(received.split(sizes))
        # Copies: each tensor begins where its type may, and keeps no more than itself alive.
        return [
            {
                name: next(parts).clone().view(dtype).view(shape)
                for name, (dtype, shape) in item.items()
            }
            for item in layout
        ]

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank, results by rank; none waits for one on which it failed.

        Results are pickled; `action` must not communicate. A failure elsewhere is a CheckpointError
        that names the rank.
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

    def _all_reduced(
        self,
        values: Sequence[float],
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        dtype: torch.dtype = torch.float64,
    ) -> list[Any]:
        row = torch.tensor(values, dtype=dtype, device=self.device)
        Ranks.num_entered += 1
        dist.all_reduce(row, op=op, group=self.group)
        return row.tolist()

    def _all_gathered(self, row: Tensor) -> list[Tensor]:
        """Rows of one shape, by rank."""
        rows = [torch.zeros_like(row) for _ in range(self.size)]
        Ranks.num_entered += 1
        dist.all_gather(rows, row, group=self.group)
        return rows

    def world_rank(self, rank: int) -> int:
        """One of these ranks -> its number in the world."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


_patient: dict[str, dist.ProcessGroup] = {}


def make_patient(timeout_s: float) -> None:
    """Give `Ranks.patient` a group of its own, whose waits end after `timeout_s`. Collective."""
    if Ranks.world().size > 1:
        group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        _patient["group"] = group


def one_line(error: BaseException) -> str:
    """What was wrong."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
