"""Ranks that hold the same trajectories, because one engine or tensor-parallel group spans them.

They roll out together and each of the data ranks among them trains on, and scores, a part.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.errors import TwinsError
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import num_tokens


@dataclass(frozen=True, kw_only=True)
class Twins:
    """The twins of this rank and itself; by default it has none."""

    ranks: Ranks = field(default_factory=Ranks)
    num_parts: int = 1
    """Data ranks among them; the ranks of each follow each other."""

    def own_groups(self, trajectories: Sequence[TensorDict]) -> list[TensorDict]:
        """This rank's part of them, groups whole, about as many tokens as the others."""
        sizes: dict[int, int] = {}
        for trajectory in trajectories:
            group_id = int(trajectory["group_id"])
            sizes[group_id] = sizes.get(group_id, 0) + num_tokens(trajectory)
        own = set(deal_out(sizes, self.num_parts)[self._part_of(self.ranks.rank)])
        return [t for t in trajectories if int(t["group_id"]) in own]

    def own_places(self, trajectories: Sequence[TensorDict]) -> list[int]:
        """Places of this rank's part, which need not hold whole groups."""
        return self._places(trajectories)[self._part_of(self.ranks.rank)]

    def join(
        self,
        own: Sequence[Tensor],
        trajectories: Sequence[TensorDict],
        lengths: Sequence[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Values of each trajectory from those of `own_places`, on the CPU. Collective.

        `own`: one-dimensional, of `dtype`; `lengths`: how many values each trajectory has.
        """
        if self.num_parts == 1:
            return list(own)
        values = torch.cat([torch.zeros(0, dtype=dtype), *own])
        # As bytes: gloo knows few types.
        joined = self.ranks.join([values.view(torch.uint8)])[0].view(dtype)
        places = self._places(trajectories)
        order = [place for rank in range(self.ranks.size) for place in places[self._part_of(rank)]]
        parts = joined.split([lengths[place] for place in order])
        by_place = dict(zip(order, parts, strict=True))
        return [by_place[place] for place in range(len(trajectories))]

    def check(self, trajectories: Sequence[TensorDict]) -> None:
        """Make sure that all hold the same responses and rewards. Collective."""
        if self.ranks.size == 1:
            return
        digest = hashlib.blake2b(digest_size=8)
        for trajectory in trajectories:
            digest.update(trajectory["response_ids"].numpy().tobytes())
            digest.update(trajectory["reward"].numpy().tobytes())
        seen = self.ranks.gather(digest.hexdigest())
        others = [self.ranks.world_rank(i) for i, one in enumerate(seen) if one != seen[0]]
        if others:
            raise TwinsError(
                f"rank {', '.join(map(str, others))} sampled other tokens or has other rewards "
                f"than rank {self.ranks.world_rank(0)}, which must hold the same responses; all "
                "ranks need the same packages, GPUs and settings; go on with --resume"
            )

    def _places(self, trajectories: Sequence[TensorDict]) -> list[list[int]]:
        return deal_out(dict(enumerate(map(num_tokens, trajectories))), self.num_parts)

    def _part_of(self, rank: int) -> int:
        return rank * self.num_parts // self.ranks.size


def deal_out(sizes: Mapping[int, int], num_parts: int) -> list[list[int]]:
    """Keys of each part, ascending: the largest first, each to the part that has least so far.

    Ties go to the lower key and the lower part.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        part = loads.index(min(loads))
        parts[part].append(key)
        loads[part] += sizes[key]
    return [sorted(part) for part in parts]


def roll_out_ranks(
    engine_ranks: int, tensor_ranks: int, *, timeout_s: float
) -> tuple[Ranks, Twins]:
    """(ranks with different responses, this rank's twins) of the world. Collective.

    `engine_ranks` hold one engine, `tensor_ranks` train on the same sequences; one divides the
    other, and their ranks follow each other.
    """
    size = max(engine_ranks, tensor_ranks)
    world = Ranks.world()
    if size == 1:
        return world, Twins()
    units = [list(range(first, first + size)) for first in range(0, world.size, size)]
    across = [list(ranks) for ranks in zip(*units, strict=True)]
    twins = Twins(ranks=_own_ranks(units, timeout_s), num_parts=size // tensor_ranks)
    return _own_ranks(across, timeout_s), twins


def _own_ranks(groups: list[list[int]], timeout_s: float) -> Ranks:
    """The one of these groups, which share out the world, that holds this rank. Collective."""
    timeout = timedelta(seconds=timeout_s)
    group: Any = dist.new_subgroups_by_enumeration(groups, timeout=timeout)[0]
    return Ranks.of(group)
