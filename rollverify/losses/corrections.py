"""Importance weights and masks between the policy that sampled a token and the trainer.

The token loss is multiplied by the weight; a mask is a weight of 0 and leaves the counts the loss
is divided by. rho = the policy that the loss starts from / behavior, without gradient. T tokens, S
trajectories.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rollverify.config.losses import (
    GeometricMask,
    Icepop,
    Masked,
    MaskStale,
    NoCorrection,
    Opsm,
    Truncated,
)
from rollverify.losses.inputs import (
    LOG_RATIO_LIMIT,
    LossInputs,
    log_difference,
    sequence_means,
    sequence_sums,
)


@dataclass(kw_only=True, frozen=True, slots=True)
class Correction:
    """What a correction makes of a row; all [T], detached."""

    weights: Tensor  # >= 0; anything finite outside the mask
    is_truncated: Tensor  # bool; the weight was cut to the threshold
    is_masked: Tensor  # bool; the token or its trajectory is dropped


def truncated(inputs: LossInputs, settings: Truncated) -> Correction:
    """Truncated importance sampling (Liu, Yao et al. 2025): min(rho, threshold).

    rho is of the token or the product over the trajectory, log rho clamped to +-20 nats.
    """
    return _capped(_ratio(inputs, settings.level), settings.threshold)


def measured(inputs: LossInputs, settings: NoCorrection) -> Correction:
    """`truncated` by token, for the metrics."""
    return _capped(_ratio(inputs, "token"), settings.threshold)


def masked(inputs: LossInputs, settings: Masked) -> Correction:
    """Masked importance sampling (Liu, Li et al. 2025): rho inside [low, high], 0 outside."""
    return _banded(_ratio(inputs, settings.level), settings.low, settings.high)


def icepop(inputs: LossInputs, settings: Icepop) -> Correction:
    """IcePop (arXiv 2510.18855): rho of the token inside [low, high], 0 outside."""
    return _banded(_ratio(inputs, "token"), settings.low, settings.high)


def geometric_mask(inputs: LossInputs, settings: GeometricMask) -> Correction:
    """1 where the trajectory's geometric mean of rho is in [low, high] (verl's DAPO script)."""
    means_S, index_T = sequence_means(inputs.log_rho, inputs)
    ratio_T = means_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[index_T]
    return _kept(inputs, (ratio_T >= settings.low) & (ratio_T <= settings.high))


def mask_stale(inputs: LossInputs, settings: MaskStale) -> Correction:
    """1 for tokens up to `max_age` steps old, else 0 (Kimi k1.5 Section 2.6.2)."""
    return _kept(inputs, inputs.ages <= settings.max_age)


def opsm(inputs: LossInputs, settings: Opsm) -> Correction:
    """DeepSeek-V3.2: 0 where A < 0 and the mean of log behavior - log policy is above delta."""
    policy_T = inputs.policy_logprobs.detach()
    difference_T = log_difference(inputs.behavior_logprobs, policy_T, inputs.loss_mask)
    means_S, index_T = sequence_means(difference_T, inputs)
    return _kept(inputs, ~((inputs.advantages < 0) & (means_S[index_T] > settings.delta)))


CORRECTION_FUNCTIONS: dict[str, Callable[[LossInputs, Any], Correction]] = {
    "none": measured,
    "truncated": truncated,
    "masked": masked,
    "icepop": icepop,
    "geometric_mask": geometric_mask,
    "mask_stale": mask_stale,
    "opsm": opsm,
}
"""Correction by the name it has in `correction.name`."""


def _ratio(inputs: LossInputs, level: Literal["token", "sequence"]) -> Tensor:
    """[T] in [e-20, e20]; 1 outside the mask at token level."""
    log_rho_T = inputs.log_rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level == "token":
        return log_rho_T.exp()
    sums_S, index_T = sequence_sums(log_rho_T, inputs)
    return sums_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[index_T]


def _capped(ratio_T: Tensor, threshold: float) -> Correction:
    return Correction(
        weights=ratio_T.clamp(max=threshold),
        is_truncated=ratio_T > threshold,
        is_masked=torch.zeros_like(ratio_T, dtype=torch.bool),
    )


def _banded(ratio_T: Tensor, low: float, high: float) -> Correction:
    is_masked_T = (ratio_T < low) | (ratio_T > high)
    return Correction(
        weights=torch.where(is_masked_T, 0.0, ratio_T),
        is_truncated=torch.zeros_like(is_masked_T),
        is_masked=is_masked_T,
    )


def _kept(inputs: LossInputs, is_kept_T: Tensor) -> Correction:
    return Correction(
        weights=is_kept_T.to(inputs.behavior_logprobs.dtype),
        is_truncated=torch.zeros_like(is_kept_T),
        is_masked=~is_kept_T,
    )
