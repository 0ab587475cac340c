"""Memory and use of a GPU over one step."""

from dataclasses import dataclass, field
from typing import Any

import torch

GIB = 2**30


@dataclass(kw_only=True)
class GpuFigures:
    """Reads torch's allocator, which serves trainer and engine, and starts its peaks anew."""

    flops_per_token: int
    """Of forward and backward, of the whole model."""

    peak_flops: float
    """Of one GPU in bfloat16, per second."""

    num_ranks: int
    device: Any = field(default=torch.cuda)
    """Module with `memory_stats` and `reset_peak_memory_stats`."""

    _retries: int = field(default=0, init=False)

    def take(self) -> dict[str, float]:
        """Figures of this rank since the last call, whose maximum over ranks is of interest."""
        stats: dict[str, int] = self.device.memory_stats()
        retries = stats.get("num_alloc_retries", 0)
        new, self._retries = retries - self._retries, retries
        self.device.reset_peak_memory_stats()
        return {
            "memory/gpu_peak_gib": stats.get("allocated_bytes.all.peak", 0) / GIB,
            "memory/gpu_reserved_peak_gib": stats.get("reserved_bytes.all.peak", 0) / GIB,
            "memory/gpu_alloc_retries": float(new),
        }

    def utilisation(self, num_tokens: float, seconds: float) -> float:
        """Share of all GPUs' peak that training on so many tokens has used."""
        return num_tokens * self.flops_per_token / (seconds * self.peak_flops * self.num_ranks)
