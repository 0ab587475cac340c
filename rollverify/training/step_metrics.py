"""Adds up what the rows of an iteration report and turns the sums into metrics.

Declared in `metrics/names.py`; reduces over ranks, computes no loss.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from rollverify.losses.diagnostics import RATIO_BUCKETS, effective_sample_frac
from rollverify.losses.objective import RowLoss
from rollverify.ranks import reduce_metrics

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

_MISMATCH = ("mismatch_abs", "mismatch_k3")
"""Means over the tokens that were scored under the version that sampled them."""

_OPTIONAL = ("gate", "kl_reference")
"""Sums that only some objectives have."""


class StepSums:
    """Running sums of one iteration on one rank."""

    def __init__(self, *, has_gate: bool, has_reference: bool) -> None:
        """Start at 0.

        Args:
            has_gate: whether the loss reports a gate.
            has_reference: whether there is a KL term.
        """
        absent = {
            name for name, on in zip(_OPTIONAL, (has_gate, has_reference), strict=True) if not on
        }
        names = [*(_METRIC_OF_SUM.keys() - absent), "correction_weight_squared", "loss"]
        names.append("num_mismatch")
        self._sums = dict.fromkeys(sorted(names), 0.0)
        self._mismatch_abs_max = 0.0

    def add_row(self, row: RowLoss) -> None:
        """Add one row. Synchronizes with the device once."""
        names = list(row.sums)
        scalars = [*row.sums.values(), row.mismatch_abs_max]
        *values, largest = torch.stack(scalars).tolist()
        for name, value in zip(names, values, strict=True):
            self._sums[name] += value
        self._mismatch_abs_max = max(self._mismatch_abs_max, largest)

    def add_loss(self, loss: float) -> None:
        """Add this rank's share of the loss of one optimizer step."""
        self._sums["loss"] += loss

    def metrics(
        self, *, num_tokens: int, num_steps: int, data_group: dist.ProcessGroup | None
    ) -> dict[str, float]:
        """Means over all loss tokens.

        Args:
            num_tokens: loss tokens of the iteration, all ranks.
            num_steps: optimizer steps of the iteration.
            data_group: ranks that hold different trajectories; None where there is one.

        Returns:
            Metrics of `train/`, `correction/` and `mismatch/`, the same on every rank. Collective:
            yes, over `data_group`.
        """
        sums, maxima = self._sums, {"mismatch_abs_max": self._mismatch_abs_max}
        if data_group is not None:
            sums, maxima = reduce_metrics(sums, maxima, data_group)
        count = max(1, num_tokens)
        metrics = {key: sums[name] / count for name, key in _present(sums)}
        for name in _MISMATCH:
            metrics[_METRIC_OF_SUM[name]] = sums[name] / max(1.0, sums["num_mismatch"])
        metrics["train/loss"] = sums["loss"] / num_steps
        metrics["mismatch/logprob_abs_max"] = maxima["mismatch_abs_max"]
        metrics["correction/effective_sample_frac"] = effective_sample_frac(
            sums["correction_weight"], sums["correction_weight_squared"], num_tokens
        )
        return metrics


def _present(sums: dict[str, float]) -> Iterable[tuple[str, str]]:
    return ((name, key) for name, key in _METRIC_OF_SUM.items() if name in sums)
