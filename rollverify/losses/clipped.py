"""Losses with PPO's clipped surrogate: GRPO, Dr. GRPO and decoupled PPO.

Do not normalise advantages and do not average over tokens: `advantages.py` and `aggregation.py` do.

Dimensions: T tokens of one packed row.
"""

from typing import Literal

import torch
from torch import Tensor

from rollverify.losses.inputs import (
    Diagnostics,
    LossInputs,
    log_ratio,
    masked_advantages,
    policy_log_ratio,
    token_flags,
)


def grpo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.3,
    dual_clip: float | None = None,
) -> tuple[Tensor, Diagnostics]:
    """GRPO with separate clip distances, -min(r A, clip(r, 1 - low, 1 + high) A).

    r = policy / denominator. Where the clip is active the loss is constant, so its gradient is 0.
    The dual clip bounds the loss of a token with A < 0 by -A dual_clip, which the surrogate leaves
    unbounded where the policy has raised it. With one optimizer step per batch and the denominator
    "anchor_now" the ratio is 1 and nothing is ever clipped.

    Args:
        inputs: one packed row.
        clip_low: lower clip distance, in [0, 1]; 1 means no lower bound.
        clip_high: upper clip distance, >= 0.
        dual_clip: largest ratio that counts where A < 0, > 1; None turns it off.

    Returns:
        Token loss [T], and the flags of the diagnostics: is_clipped_low (A < 0 and r < 1 -
        clip_low), is_clipped_high (A > 0 and r > 1 + clip_high, or the dual clip acts).

    Raises:
        ValueError: if a clip distance is out of range.

    Source:
        GRPO (DeepSeekMath, arXiv 2402.03300), 0.2 / 0.2; separate bounds from DAPO Section 3.1, 0.2
        / 0.28; the defaults are RollVerify's, Section 5.1. Dual clip: Ye et al. 2020 (arXiv
        1912.09729), off in the papers above; code bases default to 3 and set 10 in DAPO's script.
    """
    loss_T, low_T, high_T = _surrogate(inputs, clip_low, clip_high, dual_clip)
    return loss_T, token_flags(inputs, is_clipped_low=low_T, is_clipped_high=high_T)


def dr_grpo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Diagnostics]:
    """The token loss of Dr. GRPO, which is GRPO's.

    What makes it Dr. GRPO are advantages that are only centred and the aggregation
    "constant_length"; the config asks for both. The constant differs between code bases: the
    authors' is the longest response allowed (ours too), others take the padded width of the batch.

    Args:
        inputs: one packed row.
        clip_low: lower clip distance, in [0, 1]; 1 means no lower bound.
        clip_high: upper clip distance, >= 0.

    Returns:
        As `grpo`, [T].

    Raises:
        ValueError: if a clip distance is out of range.

    Source:
        Dr. GRPO (arXiv 2503.20783) and its authors' code.
    """
    return grpo(inputs, clip_low=clip_low, clip_high=clip_high)


def decoupled_ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float = 5.0,
    cap_action: Literal["mask", "clamp"] = "mask",
) -> tuple[Tensor, Diagnostics]:
    """Decoupled PPO: the clip is around a proximal policy, a weight leads there from the behavior.

    -w min(r A, clip(r) A) with r = policy / denominator, w = denominator / behavior, detached. The
    same three policies as `grpo` with a truncated correction; what differs is what becomes of
    weights above the cap. So it takes no correction beside its own weight, and no denominator
    "behavior", which would make w 1. The loss is divided by all tokens, dropped ones included.

    Args:
        inputs: one packed row.
        clip_low: lower clip distance, in [0, 1]; 1 means no lower bound.
        clip_high: upper clip distance, >= 0.
        weight_cap: largest weight, > 0; inf leaves it uncapped.
        cap_action: "mask" drops tokens above the cap, "clamp" gives them the cap.

    Returns:
        Token loss [T], and the flags of `grpo`; is_masked where the weight is above the cap.

    Raises:
        ValueError: if a bound is out of range or cap_action is unknown.

    Source:
        AReaL (arXiv 2505.24298), after Hilton et al. 2021 (arXiv 2110.00641). The paper has no cap;
        AReaL's code drops tokens above 5, other code bases clamp (then it is truncated importance
        sampling): hence the switch.
    """
    if not weight_cap > 0.0:
        raise ValueError(f"weight_cap must be > 0, got {weight_cap}")
    if cap_action not in ("mask", "clamp"):
        raise ValueError(f"cap_action must be 'mask' or 'clamp', got {cap_action!r}")
    loss_T, low_T, high_T = _surrogate(inputs, clip_low, clip_high, None)
    denominator_T, behavior_T = inputs.denominator_logprobs, inputs.behavior_logprobs
    weight_T = log_ratio(denominator_T.detach(), behavior_T.detach(), inputs.loss_mask).exp()
    above_T = weight_T > weight_cap
    if cap_action == "mask":
        flags = token_flags(inputs, is_clipped_low=low_T, is_clipped_high=high_T, is_masked=above_T)
        return torch.where(above_T, 0.0, weight_T) * loss_T, flags
    flags = token_flags(inputs, is_clipped_low=low_T, is_clipped_high=high_T)
    return weight_T.clamp(max=weight_cap) * loss_T, flags


def _surrogate(
    inputs: LossInputs, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Token loss, clipped low, clipped high."""
    check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be > 1 or None, got {dual_clip}")
    ratio_T = policy_log_ratio(inputs).exp()
    return clip_surrogate(ratio_T, masked_advantages(inputs), clip_low, clip_high, dual_clip)


def clip_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), whatever the ratio is one of.

    Args:
        ratio: [T] finite, > 0; with gradient.
        advantages: [T]; 0 outside the mask.
        clip_low: lower clip distance.
        clip_high: upper clip distance.
        dual_clip: largest ratio that counts where A < 0; None turns it off.

    Returns:
        Loss [T]; whether it is clipped on the low side [T] bool; on the high side [T] bool.

    Source:
        PPO (arXiv 1707.06347) Eq. 7.
    """
    is_low_T = (advantages < 0) & (ratio < 1.0 - clip_low)
    is_high_T = (advantages > 0) & (ratio > 1.0 + clip_high)
    bounded_T = torch.where(is_low_T, 1.0 - clip_low, ratio)
    bounded_T = torch.where(is_high_T, 1.0 + clip_high, bounded_T)
    if dual_clip is not None:
        is_dual_T = (advantages < 0) & (ratio > dual_clip)
        bounded_T = torch.where(is_dual_T, dual_clip, bounded_T)
        is_high_T = is_high_T | is_dual_T
    return -advantages * bounded_T, is_low_T, is_high_T


def check_clip(clip_low: float, clip_high: float) -> None:
    """Check two clip distances.

    Args:
        clip_low: lower one.
        clip_high: upper one.

    Raises:
        ValueError: if one is out of range.

    Source:
        Our choice.
    """
    if not 0.0 <= clip_low <= 1.0 or not clip_high >= 0.0:
        raise ValueError(
            f"clip_low must be in [0, 1] and clip_high >= 0, got {clip_low} and {clip_high}"
        )
