"""Losses that weigh or gate single tokens instead of clipping them: CISPO, SAPO, M2PO, REINFORCE.

Dimensions: T tokens of one packed row; N tokens of a whole batch.
"""

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
    """The plain policy gradient, -A log(policy); no ratio, no clip.

    With the correction "truncated" it is truncated importance sampling of two policies: then the
    weight is policy / behavior, taken inside the step.

    Source:
        Williams 1992; with advantages as the reward.
    """
    policy_T = torch.where(inputs.loss_mask, inputs.policy_logprobs, 0.0)
    return -masked_advantages(inputs) * policy_T, token_flags(inputs)


def cispo(inputs: LossInputs, settings: Cispo) -> tuple[Tensor, Diagnostics]:
    """CISPO: the policy gradient weighed by the clipped ratio, -sg[clip(r)] A log(policy).

    Unlike the surrogate, a clipped token keeps its gradient. The weight is 1 at r = 1, at most
    1 + clip_high ("relative") or clip_high ("absolute", which has no lower bound).

    Source:
        MiniMax-M1 (arXiv 2506.13585) Eq. 4-5, which tunes the upper bound and gives no number.
        verl and slime take 1 + clip_high (scripts set 0.2 and 4), TRL takes clip_high itself (5,
        from ScaleRL). The default, 1 + 4, is 5 either way.
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
    """SAPO: a soft gate instead of the clip, -f(r) A with f(r) = (4 / tau) sigmoid(tau (r - 1)).

    f'(1) = 1, so the gradient at ratio 1 is the policy gradient; the value there is -2 A / tau, so
    losses of SAPO are not comparable with others. The temperature is `tau_positive` where A > 0.
    The diagnostics hold `gate` = f'(r), 1 at ratio 1 and falling to both sides.

    Source:
        SAPO (arXiv 2511.20347); of 0.95, 1.0 and 1.05 for tau_negative its ablation finds 1.05 most
        stable. The paper, verl and TRL average within a response first (aggregation
        "sequence_mean"), AReaL over tokens ("token_mean"): `loss.aggregation` is that switch.
    """
    advantages_T = masked_advantages(inputs)
    ratio_T = policy_log_ratio(inputs).exp()
    tau_T = torch.full_like(ratio_T, settings.tau_positive)
    tau_T = torch.where(advantages_T > 0, tau_T, settings.tau_negative)
    open_T = torch.sigmoid(tau_T * (ratio_T - 1.0))
    gate_T = torch.where(inputs.loss_mask, 4.0 * open_T * (1.0 - open_T), 0.0).detach()
    return -(4.0 / tau_T) * open_T * advantages_T, token_flags(inputs) | {"gate": gate_T}


def m2po(inputs: LossInputs, settings: M2po) -> tuple[Tensor, Diagnostics]:
    """M2PO: -r A without a clip, after the tokens with the largest squared log ratio are dropped.

    Those with (log r)^2 >= limit are dropped; the limit keeps the mean of the rest below the
    threshold. The loss is divided by all tokens, dropped ones included. Without `inputs.limit` it
    is that of this row: right only where the row is the batch, as the mask would depend on the
    split into rows.

    Source:
        M2PO (arXiv 2510.01161) Algorithm 1, 0.04; over the batch, as in the paper. AReaL takes each
        micro-batch, and the log ratio of behavior and proximal policy; here it is policy and
        denominator, so the paper's form needs the denominator "behavior".
    """
    log_ratio_T = policy_log_ratio(inputs)
    squares_T = log_ratio_T.detach().square()
    limit = inputs.limit
    if limit is None:
        limit = second_moment_limit(squares_T[inputs.loss_mask], settings.threshold)
    is_dropped_T = squares_T >= limit
    kept_T = torch.where(is_dropped_T, 0.0, log_ratio_T.exp())
    flags = token_flags(inputs, is_masked=is_dropped_T)
    return -masked_advantages(inputs) * kept_T, flags


def second_moment_limit(squares: Tensor, threshold: float) -> float:
    """Squared log ratio from which tokens are dropped so that the mean of the rest is < threshold.

    `squares` is [N] nats^2, of all trained tokens of the batch; the limit is inf where nothing is
    dropped. Values are dropped from the largest down, equal ones together, so the result does not
    depend on their order. If even the smallest is too large, it alone is kept. The limit lies
    halfway between the largest kept and the smallest dropped value: a value that rounds a little
    differently in another pass falls on the same side. Synchronizes with the device.

    For example, [0.0144, 0.16, 0.0025, 0.16, 0.09] with 0.04. All: mean 0.0854; without one 0.16:
    0.0667; without both: 0.0356. The limit is (0.09 + 0.16) / 2 = 0.125.

    Source:
        M2PO (arXiv 2510.01161) Algorithm 1.
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
