"""Losses whose ratio belongs to the whole trajectory: GSPO, its token form, and VESPO.

A trajectory lies in one packed row, so its ratio is known there; nothing is gathered.

Dimensions: T tokens of one packed row; S trajectories.
"""

import math

import torch
from torch import Tensor

from rollverify.config.losses import Gspo, GspoToken, Vespo
from rollverify.losses.clipped import clip_surrogate
from rollverify.losses.inputs import (
    LOG_RATIO_LIMIT,
    Diagnostics,
    LossInputs,
    log_difference,
    masked_advantages,
    policy_log_ratio,
    sequence_means,
    sequence_sums,
    token_flags,
)

LARGEST_MEAN_LOG_RATIO = 10.0
"""GSPO's limit of the mean log ratio, nats, as in verl."""

SMALLEST_WEIGHT = 1e-8
"""VESPO's floor of the trajectory's ratio and of a correction weight inside the logarithm."""


def gspo(inputs: LossInputs, settings: Gspo) -> tuple[Tensor, Diagnostics]:
    """GSPO: the clipped surrogate of s = exp(mean log(policy / denominator)) of each trajectory.

    Every token of a trajectory carries the trajectory's loss, so with "sequence_mean" the batch
    loss is the mean over trajectories. The mean of log ratios is what is used, not their sum: 1,000
    tokens of 0.01 nats give 1.010050, not 22026. The mean is clamped to [-20, 10] nats.

    Source:
        GSPO (arXiv 2507.18071) Eq. 5, ranges 3e-4 / 4e-4 from Section 5.1. They are for one policy
        family on both sides of the ratio; ratios to stale or engine log-probs spread further and
        are mostly clipped, so runs with such denominators often take ranges around 0.2.
    """
    ratio_T = _mean_log_ratio(inputs, inputs.policy_logprobs).exp()
    return clip_surrogate(inputs, ratio_T, settings.clip_low, settings.clip_high)


def gspo_token(inputs: LossInputs, settings: GspoToken) -> tuple[Tensor, Diagnostics]:
    """GSPO-token: s as in `gspo`, detached, with the gradient of the token's own log-prob.

    Value and gradient equal those of `gspo` as long as the advantage is the same along the
    trajectory; it is the form that would take advantages of single tokens.

    Source:
        GSPO (arXiv 2507.18071) Section 4.3.
    """
    policy_T = torch.where(inputs.loss_mask, inputs.policy_logprobs, 0.0)
    log_s_T = _mean_log_ratio(inputs, policy_T.detach())
    ratio_T = log_s_T.exp() * (policy_T - policy_T.detach()).exp()
    return clip_surrogate(inputs, ratio_T, settings.clip_low, settings.clip_high)


def _mean_log_ratio(inputs: LossInputs, numerator_T: Tensor) -> Tensor:
    """[T] nats, clamped; the mean of each token's trajectory."""
    difference_T = log_difference(numerator_T, inputs.denominator_logprobs, inputs.loss_mask)
    means_S, index_T = sequence_means(difference_T, inputs)
    return means_S.clamp(-LOG_RATIO_LIMIT, LARGEST_MEAN_LOG_RATIO)[index_T]


def vespo(inputs: LossInputs, settings: Vespo) -> tuple[Tensor, Diagnostics]:
    """VESPO: the policy gradient with a smooth weight of the trajectory's whole ratio.

    W = product of policy / denominator over the trajectory, without a root for its length, and
    -phi A log(policy) with phi = W^power exp(decay (1 - W)), detached; phi(1) = 1, its peak is at W
    = power / decay. The pair depends on the sign of the advantage (0 counts as positive).
    Correction weights of the tokens multiply W, floored at 1e-8, and nothing else. The diagnostics
    hold `gate` = phi.

    Source:
        VESPO (arXiv 2602.10693) and its authors' code. The exponents are those of their code and
        scripts, (2, 3) and (3, 2); the docstring of the same file says (2, 1.5) and (4, 2.5).
    """
    with torch.no_grad():
        log_w_T = policy_log_ratio(inputs)
        if inputs.correction_weights is not None:
            floored_T = inputs.correction_weights.clamp(min=SMALLEST_WEIGHT)
            log_w_T = log_w_T + torch.where(inputs.loss_mask, floored_T.log(), 0.0)
        log_w_S, index_T = sequence_sums(log_w_T, inputs)
        log_w_T = log_w_S.clamp(math.log(SMALLEST_WEIGHT), LOG_RATIO_LIMIT)[index_T]
        advantages_T = masked_advantages(inputs)
        is_positive_T = advantages_T >= 0
        power_T = torch.full_like(log_w_T, settings.positive_power)
        power_T = torch.where(is_positive_T, power_T, settings.negative_power)
        decay_T = torch.full_like(log_w_T, settings.positive_decay)
        decay_T = torch.where(is_positive_T, decay_T, settings.negative_decay)
        gate_T = (power_T * log_w_T - decay_T * log_w_T.expm1()).exp()
        gate_T = torch.where(inputs.loss_mask, gate_T, 0.0)
    policy_T = torch.where(inputs.loss_mask, inputs.policy_logprobs, 0.0)
    return -gate_T * advantages_T * policy_T, token_flags(inputs) | {"gate": gate_T}
