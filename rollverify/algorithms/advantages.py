"""Group-relative advantages: a response is judged against the other responses to its prompt.

Knows nothing about tokens, ratios or losses; every token of a trajectory gets its advantage.

Dimensions: B trajectories, G groups.
"""

from typing import Literal, cast

import torch
from torch import Tensor

StdKind = Literal["unbiased", "population", "none"]

STD_EPS = 1e-6


def group_advantages(rewards: Tensor, group_ids: Tensor, std: StdKind = "unbiased") -> Tensor:
    """Advantage of each trajectory within its group, (R - mean) / (std + 1e-6).

    A group whose rewards are all equal, and so every group of one, gives exactly 0: the test is
    on the rewards themselves, not on a rounded deviation. Groups may lie in any order and their
    ids may be any integers.

    Args:
        rewards: [B] floating point; one reward per trajectory.
        group_ids: [B] integer; equal for the trajectories of one prompt.
        std: "unbiased" divides by the sample deviation (n - 1), "population" by the deviation
            over n, "none" only centres the rewards.

    Returns:
        [B] float32, dimensionless ("none": in units of the reward).

    Raises:
        ValueError: if shapes or dtypes do not fit, a reward is not finite, or std is unknown.

    Source:
        DAPO Eq. 4 and 9 for the form; the papers leave n or n - 1 open, "unbiased" is our choice.
        "none" is the Dr. GRPO advantage.
    """
    if std not in ("unbiased", "population", "none"):
        raise ValueError(f"std must be 'unbiased', 'population' or 'none', got {std!r}")
    _check(rewards, group_ids)
    values_B = rewards.to(torch.float64)
    group_B, sizes_G = _group_index(group_ids)
    zeros_G = torch.zeros(len(sizes_G), dtype=torch.float64, device=rewards.device)

    mean_G = zeros_G.index_add(0, group_B, values_B) / sizes_G
    centred_B = values_B - mean_G[group_B]
    if std == "none":
        advantages_B = centred_B
    else:
        divisor_G = (sizes_G - 1).clamp(min=1) if std == "unbiased" else sizes_G
        std_G = (zeros_G.index_add(0, group_B, centred_B.square()) / divisor_G).sqrt()
        advantages_B = centred_B / (std_G[group_B] + STD_EPS)

    has_signal_B = _has_signal(values_B, group_B, len(sizes_G))[group_B]
    return torch.where(has_signal_B, advantages_B, 0.0).to(torch.float32)


def count_zero_signal_groups(rewards: Tensor, group_ids: Tensor) -> int:
    """Number of groups that teach nothing, because all their rewards are equal.

    A group of one counts. Synchronizes with the device.

    Args:
        rewards: [B] floating point; one reward per trajectory.
        group_ids: [B] integer; equal for the trajectories of one prompt.

    Returns:
        A count between 0 and the number of distinct group ids.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a reward is not finite.

    Source:
        The groups that DAPO's dynamic sampling (Section 3.2) would replace.
    """
    _check(rewards, group_ids)
    group_B, sizes_G = _group_index(group_ids)
    has_signal_G = _has_signal(rewards.to(torch.float64), group_B, len(sizes_G))
    return int((~has_signal_G).sum().item())


def _check(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            "rewards and group_ids must both have shape [B], "
            f"got {list(rewards.shape)} and {list(group_ids.shape)}"
        )
    if not rewards.is_floating_point():
        raise ValueError(f"rewards must be floating point, got {rewards.dtype}")
    if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
        raise ValueError(f"group_ids must be integers, got {group_ids.dtype}")
    finite_B = rewards.isfinite()
    if not bool(finite_B.all()):
        index = int(finite_B.logical_not().nonzero()[0].item())
        raise ValueError(f"reward {index} is {rewards[index].item()}; a reward must be finite")


def _group_index(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """[B] index of each trajectory's group from 0, and the [G] group sizes."""
    # torch declares no types for unique.
    _, group_B, sizes_G = cast(
        "tuple[Tensor, Tensor, Tensor]",
        torch.unique(group_ids, return_inverse=True, return_counts=True),  # pyright: ignore[reportUnknownMemberType]
    )
    return group_B, sizes_G


def _has_signal(values_B: Tensor, group_B: Tensor, num_groups: int) -> Tensor:
    """[G] bool; True where a group's rewards are not all equal."""
    highest_G = values_B.new_full((num_groups,), -torch.inf)
    highest_G = highest_G.scatter_reduce(0, group_B, values_B, "amax")
    lowest_G = values_B.new_full((num_groups,), torch.inf)
    lowest_G = lowest_G.scatter_reduce(0, group_B, values_B, "amin")
    return highest_G > lowest_G
