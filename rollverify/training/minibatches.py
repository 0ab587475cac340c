"""What one optimizer step of several is taken on: whole groups, counted over all ranks.

Does not pack rows and computes no loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.algorithms.aggregation import Normalizer
from rollverify.metrics.reduction import gather_values
from rollverify.training.objective import RowGiven
from rollverify.training.packing import TrajectoryRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """What one optimizer step is taken on, on this rank."""

    members: list[TensorDict]
    rows: list[TrajectoryRow]
    normalizer: Normalizer
    given: list[RowGiven]
    """One per row."""


def with_given(one: Minibatch, **values: Sequence[Tensor | float]) -> Minibatch:
    """The minibatch with one more value per row.

    Args:
        one: left as it is.
        values: by the name of a field of `RowGiven`, one per row.

    Returns:
        A new minibatch that shares the rest.
    """
    given = [
        replace(given, **{name: value[i] for name, value in values.items()})
        for i, given in enumerate(one.given)
    ]
    return replace(one, given=given)


def assign_groups(
    group_ids: Tensor, num_minibatches: int, data_group: dist.ProcessGroup | None
) -> list[list[int]]:
    """Places of each minibatch's trajectories: by group id, as many groups each.

    Groups are counted over all ranks, so the number of ranks does not change a minibatch.

    Args:
        group_ids: [B] int64 of this rank's trajectories.
        num_minibatches: optimizer steps.
        data_group: ranks that hold different trajectories; None where there is one.

    Returns:
        Per minibatch, indices into `group_ids`.

    Source:
        Our choice; collective: yes, over `data_group`, with more than one minibatch.
    """
    if num_minibatches == 1:
        return [list(range(len(group_ids)))]
    every = group_ids
    if data_group is not None:
        every = gather_values([group_ids], data_group)[0]
    order = every.unique(sorted=True)
    number = torch.searchsorted(order, group_ids) * num_minibatches // max(1, len(order))
    return [(number == part).nonzero().squeeze(1).tolist() for part in range(num_minibatches)]
