"""Losses whose ratio is the trajectory's: GSPO and VESPO; T tokens of a row, S trajectories."""

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

LARGEST_MEAN_LOG_RATIO = 10.0  # nats; GSPO's limit in verl

SMALLEST_WEIGHT = 1e-8  # VESPO's floor of the trajectory's ratio and of a correction weight


def gspo(inputs: LossInputs, settings: Gspo) -> tuple[Tensor, Diagnostics]:
    """GSPO (arXiv 2507.18071) Eq. 5: the clipped surrogate of s = exp(mean log ratio).

    The mean over the trajectory is clamped to [-20, 10] nats: 1,000 tokens of 0.01 nats give
    1.010050.
    """
    ratio_T = _mean_log_ratio(inputs, inputs.policy_logprobs).exp()
    return clip_surrogate(inputs, ratio_T, settings.clip_low, settings.clip_high)


def gspo_token(inputs: LossInputs, settings: GspoToken) -> tuple[Tensor, Diagnostics]:
    """GSPO-token (Section 4.3): s detached, with the gradient of the token's own log-prob."""
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
    """VESPO (arXiv 2602.10693): -phi A log(policy), phi = W^power exp(decay (1 - W)), detached.

    W = product of policy / denominator, and of the correction weights, over the trajectory. The
    pair of exponents depends on the sign of A (0 counts as positive); `gate` = phi.
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
