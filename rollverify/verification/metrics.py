"""Metrics of the off-policy shift (OPS): by level and by age, over all data ranks.

Takes OPS as they are; `algorithms/ops.py` computes them. Percentiles are those of all values, not
means over ranks.
"""

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.ranks import gather_values, reduce_metrics
from rollverify.rollout.layout import PackedLayout, flat, response_layout
from rollverify.verification.ops import segment_ops, sequence_ops, token_ops, trajectory_staleness

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


def trained_metrics(
    finished: list[TensorDict],
    policy_logprobs: Tensor,
    policy_version: int,
    data_group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """OPS, engine mismatch by age, and staleness of what is trained on.

    The OPS compares the policy before the step with the policy that sampled the token: with its
    anchor where it has one; without one, 0 for a token of this very version and with the engine's
    log-prob for an older one. The mismatch compares engine and trainer under one version: behavior
    with the anchor, or with the policy itself for a token of this version. An older token without
    an anchor has no mismatch that could be told apart from staleness, and is left out. Its mean
    OPS is the noise floor: what verification would see of a policy that has not moved, if it
    compared with the engine's log-probs.

    Args:
        finished: this rank's trajectories.
        policy_logprobs: [N] float32 nats; their response tokens end to end, before the step.
        policy_version: version before the step.
        data_group: ranks that hold different trajectories; None where there is one.

    Returns:
        Metrics of `ops/trained_*`, `mismatch/age_*`, `mismatch/ops_mean` and `staleness/`, the same
        on every rank.

    Raises:
        ValueError: if a log-prob of a trained token is not finite, or it is of a newer version.

    Source:
        RollVerify Section 3.2; collective: yes, over `data_group`.
    """
    behavior, anchor = flat(finished, "behavior_logprobs"), flat(finished, "anchor_logprobs")
    versions = flat(finished, "policy_version")
    ages = policy_version - versions
    layout = response_layout(finished, flat(finished, "loss_mask"))
    own = torch.where(anchor.isnan(), policy_logprobs, anchor)
    is_unknown = anchor.isnan() & (ages > 0)
    reference = torch.where(is_unknown, behavior, own)
    ops = token_ops(policy_logprobs, reference, layout)
    metrics = ops_metrics("trained", ops, layout, ages, data_group)
    token_ages, is_known = layout.response_values(ages), ~layout.response_values(is_unknown)
    mismatch = layout.response_values((own - behavior).abs())
    by_age = sums_by_age(mismatch[is_known], token_ages[is_known])
    ages_only = sums_by_age(torch.ones(len(token_ages)), token_ages)
    by_age |= {f"tokens_{age}": ages_only[f"num_{age}"] for age in AGES}
    noise = layout.response_values(token_ops(own, behavior, layout))[is_known]
    by_age |= {"noise": noise.double().sum().item(), "num_known": float(len(noise))}
    staleness = trajectory_staleness(versions, layout, policy_version)[layout.nonempty_trajectories]
    return metrics | _staleness_metrics(by_age, staleness, layout, data_group)


def _staleness_metrics(
    by_age: dict[str, float],
    staleness: Tensor,
    layout: PackedLayout,
    data_group: dist.ProcessGroup | None,
) -> dict[str, float]:
    sums = by_age | {
        "tokens": float(len(layout.token_owners)),
        "staleness": float(staleness.sum().item()),
        "trajectories": float(len(staleness)),
    }
    maxima = {"staleness": float(staleness.max().item()) if len(staleness) else 0.0}
    if data_group is not None:
        sums, maxima = reduce_metrics(sums, maxima, data_group)
    metrics = {f"mismatch/age_{age}": mean for age, mean in means_by_age(sums).items()}
    metrics["mismatch/ops_mean"] = sums["noise"] / max(1.0, sums["num_known"])
    for age in AGES:
        metrics[f"staleness/trained_tokens_age_{age}_frac"] = sums[f"tokens_{age}"] / max(
            1.0, sums["tokens"]
        )
    metrics["staleness/trained_mean"] = sums["staleness"] / max(1.0, sums["trajectories"])
    metrics["staleness/trained_max"] = maxima["staleness"]
    return metrics
