"""Metrics of the off-policy shift (OPS): by level and by age, over all data ranks."""

import logging
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.config.tables import VerificationConfig
from rollverify.hooks import StepState
from rollverify.ranks import Ranks
from rollverify.rollout.layout import PackedLayout, flat, response_layout
from rollverify.training.policy_update import PolicyUpdate
from rollverify.verification.ops import segment_ops, sequence_ops, token_ops, trajectory_staleness

AGES = ("0", "1", "2", "3", "4_7", "8_up")
"""Names of the age classes, in steps."""

_LOWER_BOUNDS = torch.tensor([1, 2, 3, 4, 8])
"""Of all classes but the first."""

LEVELS = ("token", "segment", "sequence")

logger = logging.getLogger(__name__)


def ops_metrics(
    of: str, token_ops: Tensor, layout: PackedLayout, ages: Tensor, ranks: Ranks
) -> dict[str, float]:
    """Distribution of OPS [N] at each level, and the mean by age [N] in steps. Collective.

    `of`, in the keys, is "unfinished" or "trained". Without a value on any rank there is no key.
    Section 3.2.
    """
    sequences = sequence_ops(token_ops, layout)[layout.nonempty_trajectories]
    values = ranks.join([token_ops, segment_ops(token_ops, layout), sequences])
    by_age = ranks.sum(sums_by_age(token_ops, ages))
    metrics = {f"ops/{of}_age_{age}": mean for age, mean in means_by_age(by_age).items()}
    for level, row in zip(LEVELS, values, strict=True):
        if len(row):
            metrics[f"ops/{of}_{level}_mean"] = row.double().mean().item()
            metrics[f"ops/{of}_{level}_p95"] = percentile(row, 0.95)
            metrics[f"ops/{of}_{level}_max"] = row.max().item()
    return metrics


def percentile(values: Tensor, share: float) -> float:
    """Percentile of values [N], N >= 1, interpolated linearly between the two nearest ranks."""
    rank = share * (len(values) - 1)
    below = int(rank)
    low = values.kthvalue(below + 1).values.item()
    high = values.kthvalue(min(below + 2, len(values))).values.item()
    return low + (rank - below) * (high - low)


def sums_by_age(values: Tensor, ages: Tensor) -> dict[str, float]:
    """`sum_<age>` and `num_<age>` of values [N] with ages [N] in steps, for each of `AGES`."""
    classes = torch.bucketize(ages, _LOWER_BOUNDS, right=True)
    sums = classes.bincount(values.double(), minlength=len(AGES)).tolist()
    counts = classes.bincount(minlength=len(AGES)).tolist()
    named = {f"sum_{age}": value for age, value in zip(AGES, sums, strict=True)}
    return named | {f"num_{age}": float(count) for age, count in zip(AGES, counts, strict=True)}


def means_by_age(sums: dict[str, float]) -> dict[str, float]:
    """Means of what `sums_by_age` gave, over all ranks; no entry for a class without a value."""
    return {age: sums[f"sum_{age}"] / sums[f"num_{age}"] for age in AGES if sums[f"num_{age}"] > 0}


def trained_metrics(
    trained: list[TensorDict], policy_logprobs: Tensor, policy_version: int, ranks: Ranks
) -> dict[str, float]:
    """OPS, engine mismatch by age, and staleness of what is trained on. Collective.

    `policy_logprobs`: [response tokens] float32 nats, end to end; before the step, as the version.
    OPS compares them with the anchor where a token has one; without one, it is 0 for a token of
    this very version and uses the engine's log-prob for an older one. The mismatch compares engine
    and trainer under one version, so an older token without an anchor is left out. Its mean OPS is
    the noise floor: what verification by the engine would see of a policy that has not moved.
    """
    mask = flat(trained, "loss_mask")
    layout = response_layout(trained, mask)
    behavior, anchor, versions = (
        flat(trained, key)[mask]
        for key in ("behavior_logprobs", "anchor_logprobs", "policy_version")
    )
    policy, ages = policy_logprobs[mask], policy_version - versions
    own = torch.where(anchor.isnan(), policy, anchor)
    is_unknown = anchor.isnan() & (ages > 0)
    ops = token_ops(policy, torch.where(is_unknown, behavior, own), layout)
    metrics = ops_metrics("trained", ops, layout, ages, ranks)
    mismatch = (own - behavior).abs()[~is_unknown]
    noise = token_ops(own, behavior, layout)[~is_unknown]
    all_ages = sums_by_age(torch.ones(len(ages)), ages)
    staleness = trajectory_staleness(versions, layout, policy_version)[layout.nonempty_trajectories]
    sums, maxima = ranks.reduce(
        sums_by_age(mismatch, ages[~is_unknown])
        | {f"tokens_{age}": all_ages[f"num_{age}"] for age in AGES}
        | {
            "noise": noise.double().sum().item(),
            "known": len(noise),
            "tokens": len(ages),
            "staleness": staleness.sum().item(),
            "trajectories": len(staleness),
        },
        {"staleness": staleness.max().item() if len(staleness) else 0},
    )
    metrics |= {f"mismatch/age_{age}": mean for age, mean in means_by_age(sums).items()}
    metrics["mismatch/ops_mean"] = sums["noise"] / max(1.0, sums["known"])
    for age in AGES:
        share = sums[f"tokens_{age}"] / max(1.0, sums["tokens"])
        metrics[f"staleness/trained_tokens_age_{age}_frac"] = share
    metrics["staleness/trained_mean"] = sums["staleness"] / max(1.0, sums["trajectories"])
    metrics["staleness/trained_max"] = maxima["staleness"]
    return metrics


@dataclass(kw_only=True)
class TrainedMetrics:
    """Hook at AFTER_TRAIN: `trained_metrics` of the step that was taken. Collective."""

    trainer: PolicyUpdate

    def __call__(self, state: StepState) -> None:
        """Compare the policies that sampled F_k with the one before the step."""
        trajectories, policy_logprobs = self.trainer.trained
        state.metrics |= trained_metrics(
            trajectories, policy_logprobs, state.policy_version - 1, self.trainer.ranks
        )


_CONSEQUENCE = {
    "behavior": (
        "responses are cut for the engine's rounding; set verification.against = 'anchor', raise "
        "segment_threshold or make engine.dtype finer"
    ),
    "anchor": (
        "against = 'anchor' keeps this out of what is cut, but even fresh tokens are that far "
        "from the trainer's policy"
    ),
}


@dataclass(kw_only=True)
class NoiseFloor:
    """Hook: warns once in a run, in the first step whose noise reaches d_s."""

    settings: VerificationConfig
    has_warned: bool = False

    def __call__(self, state: StepState) -> None:
        """Read `mismatch/ops_mean` of the step."""
        noise = state.metrics["mismatch/ops_mean"]
        if self.has_warned or noise < self.settings.segment_threshold:
            return
        self.has_warned = True
        logger.warning(
            "step %d: engine and trainer differ by an OPS of %.2g under the same weights, not "
            "below verification.segment_threshold = %g: %s",
            state.step,
            noise,
            self.settings.segment_threshold,
            _CONSEQUENCE[self.settings.against],
        )
