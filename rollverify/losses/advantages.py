"""Group-relative advantages; B trajectories, G groups."""

from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.config.tables import AdvantageConfig
from rollverify.rollout.trajectory import Status, stacked

StdKind = Literal["unbiased", "population", "none"]
Baseline = Literal["group_mean", "leave_one_out"]

STD_EPS = 1e-6


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    std: StdKind = "unbiased",
    baseline: Baseline = "group_mean",
) -> Tensor:
    """Advantage within the group, (R - mean) / (std + 1e-6), [B] float32; DAPO Eq. 4 and 9.

    `group_ids`, [B] integer, may lie in any order. Groups with equal `rewards`, [B], give exactly
    0. std "unbiased" divides by n - 1, "population" by n, "none" only centres (Dr. GRPO). baseline
    "leave_one_out" takes the mean of the others (RLOO, arXiv 2402.14740), with std "none".
    ValueError if a reward is not finite.
    """
    finite_B = rewards.isfinite()
    if not bool(finite_B.all()):
        index = int(finite_B.logical_not().nonzero()[0].item())
        raise ValueError(f"reward {index} is {rewards[index].item()}; a reward must be finite")
    values_B = rewards.to(torch.float64)
    group_B, sizes_G = _group_index(group_ids)
    zeros_G = torch.zeros(len(sizes_G), dtype=torch.float64, device=rewards.device)

    mean_G = zeros_G.index_add(0, group_B, values_B) / sizes_G
    centred_B = values_B - mean_G[group_B]
    if baseline == "leave_one_out":
        advantages_B = centred_B * (sizes_G / (sizes_G - 1).clamp(min=1))[group_B]
    elif std == "none":
        advantages_B = centred_B
    else:
        divisor_G = (sizes_G - 1).clamp(min=1) if std == "unbiased" else sizes_G
        std_G = (zeros_G.index_add(0, group_B, centred_B.square()) / divisor_G).sqrt()
        advantages_B = centred_B / (std_G[group_B] + STD_EPS)

    has_signal_B = _has_signal(values_B, group_B, len(sizes_G))[group_B]
    return torch.where(has_signal_B, advantages_B, 0.0).to(torch.float32)


def count_zero_signal_groups(rewards: Tensor, group_ids: Tensor) -> int:
    """Groups whose `rewards`, [B], are all equal; a group of one counts. Synchronizes."""
    group_B, sizes_G = _group_index(group_ids)
    has_signal_G = _has_signal(rewards.to(torch.float64), group_B, len(sizes_G))
    return int((~has_signal_G).sum().item())


def has_signal(rewards: Tensor) -> bool:
    """Whether not all `rewards`, [n], of one prompt are equal (DAPO Section 3.2)."""
    return len(rewards) > 1 and bool((rewards != rewards[0]).any())


def overlong_penalty(
    response_tokens: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Tensor:
    """DAPO Eq. 13: 0 up to max - buffer, then falling to -factor at max; [B] float32.

    For example, max 20480, buffer 4096: 16384 gives 0, 17408 -0.25, 18432 -0.5, 20480 -1.
    """
    excess_B = (response_tokens - (max_tokens - buffer_tokens)).to(torch.float32) / buffer_tokens
    return -factor * excess_B.clamp(0.0, 1.0)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditRule:
    """How finished trajectories are judged."""

    settings: AdvantageConfig = field(default_factory=AdvantageConfig)
    max_response_tokens: int
    mask_truncated: bool = False  # leave responses cut at the length limit out of the loss

    def advantages(self, finished: list[TensorDict]) -> Tensor:
        """Advantage of each trajectory, [B] float32; groups are whole."""
        if not finished:
            return torch.zeros(0)
        rewards, settings = stacked(finished, "reward"), self.settings
        if settings.overlong_buffer_tokens:
            lengths = torch.tensor([len(trajectory["response_ids"]) for trajectory in finished])
            rewards = rewards + overlong_penalty(
                lengths,
                max_tokens=self.max_response_tokens,
                buffer_tokens=settings.overlong_buffer_tokens,
                factor=settings.overlong_factor,
            )
        group_ids = stacked(finished, "group_id")
        return group_advantages(rewards, group_ids, settings.std, settings.baseline)

    def trained(self, finished: list[TensorDict]) -> list[TensorDict]:
        """The trajectories; those left out are copies whose loss mask is False."""
        if not self.mask_truncated:
            return finished
        return [
            _left_out(trajectory) if trajectory["status"] == Status.LENGTH else trajectory
            for trajectory in finished
        ]


def _left_out(trajectory: TensorDict) -> TensorDict:
    copy = trajectory.copy()
    copy["loss_mask"] = torch.zeros_like(trajectory["loss_mask"])
    return copy
