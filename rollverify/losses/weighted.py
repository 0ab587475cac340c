"""Losses that weigh or gate single tokens instead of clipping them: CISPO, SAPO, M2PO, REINFORCE.

Dimensions: T tokens of one packed row; N tokens of a whole batch.
"""

from typing import Literal

import torch
from torch import Tensor

from rollverify.losses.inputs import (
    Diagnostics,
    LossInputs,
    masked_advantages,
    policy_log_ratio,
    token_flags,
)

M2_THRESHOLD = 0.04
"""M2PO's bound of the second moment of the log ratio, nats^2."""


def reinforce(inputs: LossInputs) -> tuple[Tensor, Diagnostics]:
    """The plain policy gradient, -A log(policy); no ratio, no clip.

    With the correction "truncated" it is truncated importance sampling of two policies: then the
    weight is policy / behavior, taken inside the step.

    Args:
        inputs: one packed row; the denominator is not read.

    Returns:
        Token loss [T], no flags set.

    Source:
        Williams 1992; with advantages as the reward.
    """
    policy_T = torch.where(inputs.loss_mask, inputs.policy_logprobs, 0.0)
    return -masked_advantages(inputs) * policy_T, token_flags(inputs)


def cispo(
    inputs: LossInputs,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    convention: Literal["relative", "absolute"] = "relative",
) -> tuple[Tensor, Diagnostics]:
    """CISPO: the policy gradient weighed by the clipped ratio, -sg[clip(r)] A log(policy).

    Unlike the surrogate, a clipped token keeps its gradient. The weight is 1 at r = 1.

    Args:
        inputs: one packed row.
        clip_low: "relative": r is at least 1 - clip_low; 1 or more means no lower bound, which is
            the paper's. Not read under "absolute", which has no lower bound.
        clip_high: "relative": r is at most 1 + clip_high. "absolute": r is at most clip_high. > 0.
        convention: how clip_high is meant; both are in use under the same name.

    Returns:
        Token loss [T]; is_clipped_low and is_clipped_high where the weight is at a bound.

    Raises:
        ValueError: if a bound is out of range or the convention is unknown.

    Source:
        MiniMax-M1 (arXiv 2506.13585) Eq. 4-5, which tunes the upper bound and gives no number.
        verl and slime take 1 + clip_high (scripts set 0.2 and 4), TRL takes clip_high itself (5,
        from ScaleRL). The default, 1 + 4, is 5 either way.
    """
    if not clip_low >= 0.0 or not clip_high > 0.0:
        raise ValueError(f"clip_low must be >= 0, clip_high > 0, got {clip_low} and {clip_high}")
    if convention not in ("relative", "absolute"):
        raise ValueError(f"convention must be 'relative' or 'absolute', got {convention!r}")
    lowest, highest = 0.0, clip_high
    if convention == "relative":
        lowest, highest = max(0.0, 1.0 - clip_low), 1.0 + clip_high
    ratio_T = policy_log_ratio(inputs).detach().exp()
    policy_T = torch.where(inputs.loss_mask, inputs.policy_logprobs, 0.0)
    loss_T = -ratio_T.clamp(lowest, highest) * masked_advantages(inputs) * policy_T
    flags = token_flags(inputs, is_clipped_low=ratio_T < lowest, is_clipped_high=ratio_T > highest)
    return loss_T, flags


def sapo(
    inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> tuple[Tensor, Diagnostics]:
    """SAPO: a soft gate instead of the clip, -f(r) A with f(r) = (4 / tau) sigmoid(tau (r - 1)).

    f'(1) = 1, so the gradient at ratio 1 is the policy gradient; the value there is -2 A / tau, so
    losses of SAPO are not comparable with others. The temperature is `tau_positive` where A > 0.

    Args:
        inputs: one packed row.
        tau_positive: temperature where A > 0, > 0; larger closes the gate sooner.
        tau_negative: temperature where A <= 0, > 0.

    Returns:
        Token loss [T], no flags set, and `gate` = f'(r), 1 at ratio 1 and falling to both sides.

    Raises:
        ValueError: if a temperature is not > 0.

    Source:
        SAPO (arXiv 2511.20347); of 0.95, 1.0 and 1.05 for tau_negative its ablation finds 1.05 most
        stable. The paper, verl and TRL average within a response first (aggregation
        "sequence_mean"), AReaL over tokens ("token_mean"): `loss.aggregation` is that switch.
    """
    if not min(tau_positive, tau_negative) > 0.0:
        raise ValueError(f"temperatures must be > 0, got {tau_positive} and {tau_negative}")
    advantages_T = masked_advantages(inputs)
    ratio_T = policy_log_ratio(inputs).exp()
    tau_T = torch.where(advantages_T > 0, torch.full_like(ratio_T, tau_positive), tau_negative)
    open_T = torch.sigmoid(tau_T * (ratio_T - 1.0))
    gate_T = torch.where(inputs.loss_mask, 4.0 * open_T * (1.0 - open_T), 0.0).detach()
    return -(4.0 / tau_T) * open_T * advantages_T, token_flags(inputs) | {"gate": gate_T}


def m2po(
    inputs: LossInputs, *, threshold: float = M2_THRESHOLD, limit: float | None = None
) -> tuple[Tensor, Diagnostics]:
    """M2PO: -r A without a clip, after the tokens with the largest squared log ratio are dropped.

    Those with (log r)^2 >= limit are dropped; the limit keeps the mean of the rest below the
    threshold. The loss is divided by all tokens, dropped ones included.

    Args:
        inputs: one packed row.
        threshold: bound of the second moment, nats^2, > 0.
        limit: `second_moment_limit` of the whole batch. None takes that of this row: right only
            where the row is the batch, as the mask would depend on the split into rows.

    Returns:
        Token loss [T]; is_masked on the dropped tokens.

    Raises:
        ValueError: if the threshold is not > 0.

    Source:
        M2PO (arXiv 2510.01161) Algorithm 1, 0.04; over the batch, as in the paper. AReaL takes each
        micro-batch, and the log ratio of behavior and proximal policy; here it is policy and
        denominator, so the paper's form needs the denominator "behavior".
    """
    log_ratio_T = policy_log_ratio(inputs)
    squares_T = log_ratio_T.detach().square()
    if limit is None:
        limit = second_moment_limit(squares_T[inputs.loss_mask], threshold)
    is_dropped_T = squares_T >= limit
    kept_T = torch.where(is_dropped_T, 0.0, log_ratio_T.exp())
    flags = token_flags(inputs, is_masked=is_dropped_T)
    return -masked_advantages(inputs) * kept_T, flags


def second_moment_limit(squares: Tensor, threshold: float) -> float:
    """Squared log ratio from which tokens are dropped so that the mean of the rest is < threshold.

    Values are dropped from the largest down, equal ones together, so the result does not depend on
    their order. If even the smallest is too large, it alone is kept. The limit lies halfway
    between the largest kept and the smallest dropped value: a value that rounds a little
    differently in another pass falls on the same side. Synchronizes with the device.

    For example, [0.0144, 0.16, 0.0025, 0.16, 0.09] with 0.04. All: mean 0.0854; without one 0.16:
    0.0667; without both: 0.0356. The limit is (0.09 + 0.16) / 2 = 0.125.

    Args:
        squares: [N] >= 0, nats^2; all trained tokens of the batch.
        threshold: > 0.

    Returns:
        The limit; inf where nothing is dropped.

    Raises:
        ValueError: if the threshold is not > 0.

    Source:
        M2PO (arXiv 2510.01161) Algorithm 1; the halfway point is our choice.
    """
    if not threshold > 0.0:
        raise ValueError(f"threshold must be > 0, got {threshold}")
    if not len(squares):
        return float("inf")
    ascending_N = squares.double().sort().values
    counts_N = torch.arange(1, len(ascending_N) + 1, device=squares.device)
    means_N = ascending_N.cumsum(0) / counts_N
    # Kept is a prefix of the ascending values that ends where the value changes.
    ends_N = torch.ones_like(ascending_N, dtype=torch.bool)
    ends_N[:-1] = ascending_N[1:] > ascending_N[:-1]
    ends = ends_N.nonzero().squeeze(1)
    num_good = int((means_N[ends] < threshold).sum().item())  # Means rise, so these come first.
    kept = int(ends[max(num_good, 1) - 1].item()) + 1
    if kept == len(ascending_N):
        return float("inf")
    return float((ascending_N[kept - 1] + ascending_N[kept]).item()) / 2
