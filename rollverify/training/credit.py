"""From rewards to advantages, and which responses are trained on at all.

Groups are whole on one rank, so nothing is exchanged. Every statistic is over the full group, also
where some of its responses are left out of the loss.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.algorithms.advantages import (
    Baseline,
    StdKind,
    group_advantages,
    overlong_penalty,
)
from rollverify.rollout.schema import Status, stacked


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditRule:
    """How finished trajectories are judged."""

    std: StdKind = "unbiased"
    baseline: Baseline = "group_mean"
    max_response_tokens: int
    """Longest response allowed."""

    overlong_buffer_tokens: int = 0
    """Length over which the penalty on long responses grows; 0 turns it off."""

    overlong_factor: float = 1.0
    """Largest penalty, in units of the reward."""

    mask_truncated: bool = False
    """Whether responses cut at the length limit are left out of the loss."""

    def advantages(self, finished: list[TensorDict]) -> Tensor:
        """Advantage of each trajectory.

        Args:
            finished: B trajectories, groups whole.

        Returns:
            [B] float32.

        Raises:
            ValueError: if a reward is not finite.
        """
        if not finished:
            return torch.zeros(0)
        rewards = stacked(finished, "reward")
        if self.overlong_buffer_tokens:
            lengths = torch.tensor([len(one["response_ids"]) for one in finished])
            rewards = rewards + overlong_penalty(
                lengths,
                max_tokens=self.max_response_tokens,
                buffer_tokens=self.overlong_buffer_tokens,
                factor=self.overlong_factor,
            )
        return group_advantages(rewards, stacked(finished, "group_id"), self.std, self.baseline)

    def trained(self, finished: list[TensorDict]) -> list[TensorDict]:
        """The trajectories with the loss masks they are trained with.

        Args:
            finished: B trajectories; left as they are.

        Returns:
            B trajectories; those that are left out are copies whose loss mask is False.
        """
        if not self.mask_truncated:
            return finished
        return [_left_out(one) if one["status"] == Status.LENGTH else one for one in finished]


def _left_out(trajectory: TensorDict) -> TensorDict:
    copy = trajectory.copy()
    copy["loss_mask"] = torch.zeros_like(trajectory["loss_mask"])
    return copy
