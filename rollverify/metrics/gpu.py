"""Memory and use of a GPU over one step."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from rollverify.engine.memory import GIB


@dataclass(kw_only=True)
class GpuFigures:
    """Reads torch's allocator, which serves trainer and engine, and starts its peaks anew."""

    flops: tuple[int, int]
    """Of forward and backward for a token: in matrices, and in attention for each token of its
    sequence."""

    peak_flops: float
    """Of one GPU in bfloat16, per second."""

    num_ranks: int
    """Of the world; tensor ranks divide the work of a token."""

    device: Any = field(default=torch.cuda)
    """Module with `memory_stats`, `reset_peak_memory_stats` and `mem_get_info`."""

    _peaks: dict[str, float] = field(default_factory=dict[str, float], init=False)
    _retries: int = field(default=0, init=False)

    def sample(self) -> None:
        """Note the peaks since the last call; to be called before the engine sleeps or wakes.

        torch goes on counting what a sleeping engine has given up, the device does not: what it
        has in use beyond torch's count now, libraries less what sleeps, it had at the peak, too.
        """
        stats: dict[str, int] = self.device.memory_stats()
        free, total = self.device.mem_get_info()
        beyond = total - free - stats["reserved_bytes.all.current"]
        peaks = {
            "memory/gpu_peak_gib": beyond + stats["allocated_bytes.all.peak"],
            "memory/gpu_reserved_peak_gib": beyond + stats["reserved_bytes.all.peak"],
        }
        for name, peak in peaks.items():
            self._peaks[name] = max(peak / GIB, self._peaks.get(name, 0.0))
        self.device.reset_peak_memory_stats()

    def take(self) -> dict[str, float]:
        """Figures of this rank since the last call, whose maximum over ranks is of interest."""
        self.sample()
        peaks, self._peaks = self._peaks, {}
        retries: int = self.device.memory_stats()["num_alloc_retries"]
        new, self._retries = retries - self._retries, retries
        return peaks | {"memory/gpu_alloc_retries": float(new)}

    def work(self, lengths: Iterable[int]) -> float:
        """Flops of training on sequences of so many tokens; attention as if it were not causal."""
        matrices, attention = self.flops
        return float(sum(matrices * length + attention * length**2 for length in lengths))

    def utilisation(self, work: float, seconds: float) -> float:
        """Share of all GPUs' peak that this work, added up over the ranks, is."""
        return work / (seconds * self.peak_flops * self.num_ranks)
