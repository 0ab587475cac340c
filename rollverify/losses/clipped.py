"""Losses with PPO's clipped surrogate; T tokens of one packed row."""

import torch
from torch import Tensor

from rollverify.config.losses import DecoupledPpo, DrGrpo, Grpo
from rollverify.losses.inputs import (
    Diagnostics,
    LossInputs,
    log_ratio,
    masked_advantages,
    policy_log_ratio,
    token_flags,
)


def grpo(inputs: LossInputs, settings: Grpo) -> tuple[Tensor, Diagnostics]:
    """GRPO (arXiv 2402.03300): -min(r A, clip(r, 1 - low, 1 + high) A), r = policy / denominator.

    Separate bounds: DAPO Section 3.1. The dual clip (arXiv 1912.09729) bounds the loss by -A
    dual_clip where A < 0.
    """
    return _clipped(inputs, settings.clip_low, settings.clip_high, settings.dual_clip)


def dr_grpo(inputs: LossInputs, settings: DrGrpo) -> tuple[Tensor, Diagnostics]:
    """Dr. GRPO (arXiv 2503.20783): GRPO's token loss; advantages and aggregation differ."""
    return _clipped(inputs, settings.clip_low, settings.clip_high)


def decoupled_ppo(inputs: LossInputs, settings: DecoupledPpo) -> tuple[Tensor, Diagnostics]:
    """Decoupled PPO (AReaL, arXiv 2505.24298): -w min(r A, clip(r) A), w = denominator / behavior.

    w is detached. Tokens above the cap are dropped, as in AReaL's code, or clamped.
    """
    loss_T, flags = _clipped(inputs, settings.clip_low, settings.clip_high)
    denominator_T, behavior_T = inputs.denominator_logprobs, inputs.behavior_logprobs
    weight_T = log_ratio(denominator_T, behavior_T, inputs.loss_mask).exp()
    if settings.cap_action == "clamp":
        return weight_T.clamp(max=settings.weight_cap) * loss_T, flags
    above_T = weight_T > settings.weight_cap
    flags |= {"is_masked": token_flags(inputs, is_masked=above_T)["is_masked"]}
    return torch.where(above_T, 0.0, weight_T) * loss_T, flags


def _clipped(
    inputs: LossInputs, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Diagnostics]:
    """The surrogate of the token's own ratio."""
    ratio_T = policy_log_ratio(inputs).exp()
    return clip_surrogate(inputs, ratio_T, clip_low, clip_high, dual_clip)


def clip_surrogate(
    inputs: LossInputs, ratio: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Diagnostics]:
    """PPO Eq. 7, -min(r A, clip(r, 1 - low, 1 + high) A), [T], of any `ratio`, [T] > 0.

    Flags: is_clipped_low (A < 0, r < 1 - low), is_clipped_high (A > 0, r > 1 + high, or dual clip).
    """
    advantages_T = masked_advantages(inputs)
    is_low_T = (advantages_T < 0) & (ratio < 1.0 - clip_low)
    is_high_T = (advantages_T > 0) & (ratio > 1.0 + clip_high)
    bounded_T = torch.where(is_low_T, 1.0 - clip_low, ratio)
    bounded_T = torch.where(is_high_T, 1.0 + clip_high, bounded_T)
    if dual_clip:
        is_dual_T = (advantages_T < 0) & (ratio > dual_clip)
        bounded_T = torch.where(is_dual_T, dual_clip, bounded_T)
        is_high_T = is_high_T | is_dual_T
    flags = token_flags(inputs, is_clipped_low=is_low_T, is_clipped_high=is_high_T)
    return -advantages_T * bounded_T, flags
