"""Expert ids between trajectories and forward passes of a mixture-of-experts model.

Does not choose experts: the model's router or the rollout engine did.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

ReplayMode = Literal["off", "trainer", "engine"]
"""Whose choice of experts the trainer repeats; see docs/routing_replay.md."""


class RoutingShape(NamedTuple):
    """What the expert ids of one token look like."""

    num_layers: int
    """All layers of the model, dense ones included; their ids are never read."""
    experts_per_token: int
    num_experts: int
    """Experts of a layer."""

    @property
    def dtype(self) -> torch.dtype:
        """Type that holds the ids."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16


def spread_experts(num_tokens: int, routing: RoutingShape) -> Tensor:
    """Experts for tokens that count for nothing, so that no expert gets them all.

    Args:
        num_tokens: T.
        routing: layers L, experts per token K.

    Returns:
        [T, L, K] ids; within a layer each expert comes up equally often, or once more. 4 tokens, 4
        experts and 2 per token give [0, 1], [2, 3], [0, 1], [2, 3] in each layer.

    Source:
        Our choice; fillers that all went to expert 0 would fill its rank's memory.
    """
    size = num_tokens * routing.experts_per_token
    ids = (torch.arange(size) % routing.num_experts).view(num_tokens, 1, routing.experts_per_token)
    return ids.to(routing.dtype).repeat(1, routing.num_layers, 1)
