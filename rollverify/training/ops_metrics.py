"""Metrics of the off-policy shift (OPS): by level and by age, over all data ranks.

Takes OPS as they are; `algorithms/ops.py` computes them. Percentiles are those of all values, not
means over ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rollverify.algorithms.ops import segment_ops, sequence_ops
from rollverify.algorithms.packed_layout import PackedLayout
from rollverify.metrics.reduction import gather_values, reduce_metrics

AGES = ("0", "1", "2", "3", "4_7", "8_up")
"""Names of the age classes, in steps."""

_LOWER_BOUNDS = torch.tensor([1, 2, 3, 4, 8])
"""Of all classes but the first."""

LEVELS = ("token", "segment", "sequence")


def ops_metrics(
    of: str,
    token_ops: Tensor,
    layout: PackedLayout,
    ages: Tensor,
    data_group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Distribution of OPS at each level, and the mean by age.

    Args:
        of: "unfinished" or "trained", part of the keys.
        token_ops: [T] float32, dimensionless; ignored outside the response.
        layout: where trajectories and segments lie.
        ages: [T] integer, steps since each token was sampled, >= 0.
        data_group: ranks that hold different trajectories; None where there is one.

    Returns:
        `ops/<of>_*`, the same on every rank; no key where no rank has a value.

    Raises:
        ValueError: see `segment_ops`.

    Source:
        RollVerify Section 3.2; collective: yes, over `data_group`.
    """
    ops_N = layout.response_values(token_ops)
    sequence = sequence_ops(token_ops, layout)[layout.nonempty_trajectories]
    values = [ops_N, segment_ops(token_ops, layout), sequence]
    by_age = sums_by_age(ops_N, layout.response_values(ages))
    if data_group is not None:
        values = gather_values(values, data_group)
        by_age, _ = reduce_metrics(by_age, {}, data_group)
    metrics: dict[str, float] = {}
    for level, row in zip(LEVELS, values, strict=True):
        if len(row):
            metrics[f"ops/{of}_{level}_mean"] = row.double().mean().item()
            metrics[f"ops/{of}_{level}_p95"] = percentile(row, 0.95)
            metrics[f"ops/{of}_{level}_max"] = row.max().item()
    means = means_by_age(by_age)
    return metrics | {f"ops/{of}_age_{age}": mean for age, mean in means.items()}


def percentile(values: Tensor, share: float) -> float:
    """Percentile, interpolated linearly between the two nearest ranks.

    Args:
        values: [N] float32 or float64, N >= 1, in any order and of any number.
        share: in [0, 1].

    Returns:
        The percentile.
    """
    rank = share * (len(values) - 1)
    below = int(rank)
    low = values.kthvalue(below + 1).values.item()
    high = values.kthvalue(min(below + 2, len(values))).values.item()
    return low + (rank - below) * (high - low)


def sums_by_age(values: Tensor, ages: Tensor) -> dict[str, float]:
    """Sum of the values of each age class, and how many there are; add these up over ranks.

    Args:
        values: [N] float32 or float64.
        ages: [N] integer, steps, >= 0.

    Returns:
        `sum_<age>` and `num_<age>` for each of `AGES`, also for those without a value.
    """
    classes = torch.bucketize(ages, _LOWER_BOUNDS, right=True)
    sums = classes.bincount(values.double(), minlength=len(AGES)).tolist()
    counts = classes.bincount(minlength=len(AGES)).tolist()
    named = {f"sum_{age}": value for age, value in zip(AGES, sums, strict=True)}
    return named | {f"num_{age}": float(count) for age, count in zip(AGES, counts, strict=True)}


def means_by_age(sums: dict[str, float]) -> dict[str, float]:
    """Means of what `sums_by_age` gave.

    Args:
        sums: its result, added up over ranks.

    Returns:
        Mean by age class; no entry for a class without a value.
    """
    return {age: sums[f"sum_{age}"] / sums[f"num_{age}"] for age in AGES if sums[f"num_{age}"] > 0}
