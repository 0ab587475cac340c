"""How off-policy and how old the tokens are that a step trains on, from its own forward pass.

Costs no pass of its own and does not touch the loss. Only tokens in the loss count; a segment or a
trajectory is what they leave of it.
"""

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.algorithms.filtering import trajectory_staleness
from rollverify.algorithms.ops import token_ops
from rollverify.algorithms.packed_layout import PackedLayout
from rollverify.metrics.reduction import reduce_metrics
from rollverify.training.ops_metrics import AGES, means_by_age, ops_metrics, sums_by_age
from rollverify.training.responses import flat, response_layout


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
