"""Losses that weigh or gate tokens: CISPO, SAPO, M2PO, REINFORCE; T tokens, N of a batch."""

import torch
from torch import Tensor

from rollverify.config.losses import Cispo, M2po, Reinforce, Sapo
from rollverify.losses.inputs import (
    Diagnostics,
    LossInputs,
    masked_advantages,
    policy_log_ratio,
    token_flags,
)


def reinforce(inputs: LossInputs, settings: Reinforce) -> tuple[Tensor, Diagnostics]:
    """REINFORCE (Williams 1992): -A log(policy)."""
    policy_T = torch.where(inputs.loss_mask, inputs.policy_logprobs, 0.0)
    return -masked_advantages(inputs) * policy_T, token_flags(inputs)


def cispo(inputs: LossInputs, settings: Cispo) -> tuple[Tensor, Diagnostics]:
    """CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4-5): -sg[clip(r)] A log(policy).

    The bound is 1 + clip_high ("relative", as verl and slime) or clip_high ("absolute", as TRL).
    """
    lowest, highest = 0.0, settings.clip_high
    if settings.convention == "relative":
        lowest, highest = max(0.0, 1.0 - settings.clip_low), 1.0 + settings.clip_high
    ratio_T = policy_log_ratio(inputs).detach().exp()
    policy_T = torch.where(inputs.loss_mask, inputs.policy_logprobs, 0.0)
    loss_T = -ratio_T.clamp(lowest, highest) * masked_advantages(inputs) * policy_T
    flags = token_flags(inputs, is_clipped_low=ratio_T < lowest, is_clipped_high=ratio_T > highest)
    return loss_T, flags


def sapo(inputs: LossInputs, settings: Sapo) -> tuple[Tensor, Diagnostics]:
    """SAPO (arXiv 2511.20347): -f(r) A with f(r) = (4 / tau) sigmoid(tau (r - 1)).

    tau is `tau_positive` where A > 0; `gate` = f'(r), 1 at ratio 1, where the value is -2 A / tau.
    """
    advantages_T = masked_advantages(inputs)
    ratio_T = policy_log_ratio(inputs).exp()
    tau_T = torch.full_like(ratio_T, settings.tau_positive)
    tau_T = torch.where(advantages_T > 0, tau_T, settings.tau_negative)
    open_T = torch.sigmoid(tau_T * (ratio_T - 1.0))
    gate_T = torch.where(inputs.loss_mask, 4.0 * open_T * (1.0 - open_T), 0.0).detach()
    return -(4.0 / tau_T) * open_T * advantages_T, token_flags(inputs) | {"gate": gate_T}


def m2po(inputs: LossInputs, settings: M2po) -> tuple[Tensor, Diagnostics]:
    """M2PO (arXiv 2510.01161) Algorithm 1: -r A, 0 where (log r)^2 >= limit.

    Dropped tokens count in the mean. Without `inputs.limit` it is that of this row: right only
    where the row is the batch.
    """
    log_ratio_T = policy_log_ratio(inputs)
    squares_T = log_ratio_T.detach().square()
    limit = inputs.limit
    if limit is None:
        limit = second_moment_limit(squares_T[inputs.loss_mask], settings.threshold)
    # In float64, as the limit: rounded to float32 it may fall on the smaller of two neighbours.
    is_dropped_T = squares_T.double() >= limit
    kept_T = torch.where(is_dropped_T, 0.0, log_ratio_T.exp())
    flags = token_flags(inputs, is_masked=is_dropped_T)
    return -masked_advantages(inputs) * kept_T, flags


def second_moment_limit(squares: Tensor, threshold: float) -> float:
    """Squared log ratio from which tokens are dropped so that the mean of the rest is < threshold.

    `squares` is [N] nats^2 of the batch's trained tokens; inf where nothing is dropped. Equal ones
    go together; the smallest stays. The limit lies halfway to the next value, so rounding changes
    no side. For example, [0.0144, 0.16, 0.0025, 0.16, 0.09] with 0.04: without both 0.16 the mean
    is 0.0356, the limit (0.09 + 0.16) / 2. Synchronizes.
    """
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
