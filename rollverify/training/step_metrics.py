"""Adds up what the rows of an iteration report and turns the sums into metrics."""

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from rollverify.losses.diagnostics import RATIO_BUCKETS, effective_sample_frac
from rollverify.losses.objective import RowLoss
from rollverify.ranks import Ranks

_METRIC_OF_SUM = {
    "ratio": "train/ratio_mean",
    "kl": "train/kl_estimate",
    "is_clipped_low": "train/clip_low_frac",
    "is_clipped_high": "train/clip_high_frac",
    "is_masked": "train/masked_frac",
    "gate": "train/gate_mean",
    "kl_reference": "train/kl_reference_nats",
    "entropy": "train/entropy_nats",
    "correction_weight": "correction/weight_mean",
    "is_truncated": "correction/truncated_frac",
    "is_correction_masked": "correction/masked_frac",
    "mismatch_abs": "mismatch/logprob_abs_mean",
    "mismatch_k3": "mismatch/k3_nats",
} | {f"ratio_{bucket}": f"train/ratio_{bucket}_frac" for bucket in RATIO_BUCKETS}
_METRIC_OF_SUM |= {f"rho_{bucket}": f"correction/ratio_{bucket}_frac" for bucket in RATIO_BUCKETS}
"""`gate` and `kl_reference` are reported by some objectives only."""

_MISMATCH = ("mismatch_abs", "mismatch_k3")
"""Means over the tokens that were scored under the version that sampled them."""


@dataclass(kw_only=True)
class StepSums:
    """Running sums of one iteration on one rank, which has at least one row."""

    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    mismatch_abs_max: float = 0.0

    def add_row(self, row: RowLoss) -> None:
        """Add one row. Synchronizes with the device once."""
        *values, largest = torch.stack([*row.sums.values(), row.mismatch_abs_max]).tolist()
        for name, value in zip(row.sums, values, strict=True):
            self.sums[name] += value
        self.mismatch_abs_max = max(self.mismatch_abs_max, largest)

    def add_loss(self, loss: float) -> None:
        """Add this rank's share of the loss of one optimizer step."""
        self.sums["loss"] += loss

    def metrics(self, *, num_tokens: int, num_steps: int, ranks: Ranks) -> dict[str, float]:
        """Means over all ranks' `num_tokens` loss tokens, the same on every rank. Collective."""
        sums, maxima = ranks.reduce(self.sums, {"mismatch_abs_max": self.mismatch_abs_max})
        count = max(1, num_tokens)
        metrics = {key: sums[name] / count for name, key in _METRIC_OF_SUM.items() if name in sums}
        for name in _MISMATCH:
            metrics[_METRIC_OF_SUM[name]] = sums[name] / max(1.0, sums["num_mismatch"])
        metrics["train/loss"] = sums["loss"] / num_steps
        metrics["mismatch/logprob_abs_max"] = maxima["mismatch_abs_max"]
        metrics["correction/effective_sample_frac"] = effective_sample_frac(
            sums["correction_weight"], sums["correction_weight_squared"], num_tokens
        )
        return metrics
