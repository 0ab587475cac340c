"""Mixture-of-experts layers in float32 where torchtitan's grouped kernel would cast to bfloat16.

That would cost log-prob parity with the rollout engine.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Float32Experts(GroupedExperts):
    """`GroupedExperts` with one matrix product per expert in the parameters' type."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The settings of `GroupedExperts`."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Expert e on its rows of x, [R, D], sorted by expert; padding rows at the end give 0."""
        w1_EFD, w2_EDF, w3_EFD = (_local(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        outputs = []
        start = 0
        for expert, count in enumerate(num_tokens_per_expert_E.tolist()):
            rows = x_RD[start : start + count].to(w1_EFD.dtype)
            hidden = F.silu(rows @ w1_EFD[expert].T) * (rows @ w3_EFD[expert].T)
            outputs.append(hidden @ w2_EDF[expert].T)
            start += count
        padding = torch.zeros_like(x_RD[start:], dtype=w1_EFD.dtype)
        return torch.cat([*outputs, padding]).type_as(x_RD)
