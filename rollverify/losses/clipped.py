"""Losses with PPO's clipped surrogate: GRPO, Dr. GRPO and decoupled PPO.

Dimensions: T tokens of one packed row.
"""

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
    """GRPO with separate clip distances, -min(r A, clip(r, 1 - low, 1 + high) A).

    r = policy / denominator. Where the clip is active the loss is constant, so its gradient is 0.
    The dual clip bounds the loss of a token with A < 0 by -A dual_clip, which the surrogate leaves
    unbounded where the policy has raised it. With one optimizer step per batch and the denominator
    "anchor_now" the ratio is 1 and nothing is ever clipped.

    Source:
        GRPO (DeepSeekMath, arXiv 2402.03300), 0.2 / 0.2; separate bounds from DAPO Section 3.1, 0.2
        / 0.28; the defaults are RollVerify's, Section 5.1. Dual clip: Ye et al. 2020 (arXiv
        1912.09729), off in the papers above; code bases default to 3 and set 10 in DAPO's script.
    """
    return _clipped(inputs, settings.clip_low, settings.clip_high, settings.dual_clip)


def dr_grpo(inputs: LossInputs, settings: DrGrpo) -> tuple[Tensor, Diagnostics]:
    """The token loss of Dr. GRPO, which is GRPO's.

    What makes it Dr. GRPO are advantages that are only centred and the aggregation
    "constant_length"; the config asks for both. The constant differs between code bases: the
    authors' is the longest response allowed (ours too), others take the padded width of the batch.

    Source:
        Dr. GRPO (arXiv 2503.20783) and its authors' code.
    """
    return _clipped(inputs, settings.clip_low, settings.clip_high)


def decoupled_ppo(inputs: LossInputs, settings: DecoupledPpo) -> tuple[Tensor, Diagnostics]:
    """Decoupled PPO: the clip is around a proximal policy, a weight leads there from the behavior.

    -w min(r A, clip(r) A) with r = policy / denominator, w = denominator / behavior, detached. The
    same three policies as `grpo` with a truncated correction; what differs is what becomes of
    weights above the cap. So it takes no correction beside its own weight, and no denominator
    "behavior", which would make w 1. The loss is divided by all tokens, dropped ones included.

    Source:
        AReaL (arXiv 2505.24298), after Hilton et al. 2021 (arXiv 2110.00641). The paper has no cap;
        AReaL's code drops tokens above 5, other code bases clamp (then it is truncated importance
        sampling): hence the switch.
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
    """-min(r A, clip(r, 1 - low, 1 + high) A), [T], whatever the ratio, [T] > 0, is one of.

    Flags: is_clipped_low (A < 0 and r < 1 - low), is_clipped_high (A > 0 and r > 1 + high, or the
    dual clip acts; 0 turns it off).

    Source:
        PPO (arXiv 1707.06347) Eq. 7.
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
