"""Per-token policy-gradient losses: the clipped surrogate and truncated importance sampling.

Does not average anything: how token losses become one number is `aggregation.py`'s business.

Four policies appear. The engine sampled the tokens (behavior); the trainer scored them before
the step (anchor) and scores them inside it, with gradient (policy). The clip bounds
policy / anchor, the truncated weight corrects anchor / behavior.

Dimensions: T tokens of one packed row, several trajectories back to back.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 nats, so that a ratio stays in [2.1e-9, 4.9e8] and is never inf
(exp overflows float32 at 88.7) and 0 times a ratio stays 0."""


def clipped_surrogate(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate with separate bounds, -min(r A, clip(r, 1 - low, 1 + high) A).

    r = policy / anchor. Where the clip is active the loss is constant, so its gradient is 0.
    Positions outside the mask have loss 0, gradient exactly 0 and are never clipped, whatever
    their log-probs hold (-inf and NaN included).

    Args:
        policy_logprobs: [T] float32 or float64, nats; with gradient.
        anchor_logprobs: [T] same dtype, nats; trainer before the step, no gradient is taken.
        advantages: [T] float32, dimensionless; the trajectory's advantage at each of its tokens.
        loss_mask: [T] bool; True on tokens the loss sums over.
        clip_low: lower clip distance, in [0, 1).
        clip_high: upper clip distance, >= 0.

    Returns:
        token_loss [T]; is_clipped_low [T] bool (A < 0 and r < 1 - clip_low); is_clipped_high [T]
        bool (A > 0 and r > 1 + clip_high).

    Raises:
        ValueError: if shapes or dtypes do not fit, or a clip distance is out of range.

    Source:
        PPO's surrogate; separate bounds from DAPO Section 3.1, values 0.2 / 0.3 from RollVerify
        Section 5.1. The +-20 clamp of the log ratio is our choice, as in common practice.
    """
    _check_row(
        loss_mask,
        policy_logprobs=policy_logprobs,
        anchor_logprobs=anchor_logprobs,
        advantages=advantages,
    )
    if not 0.0 <= clip_low < 1.0 or not clip_high >= 0.0:
        raise ValueError(
            f"clip_low must be in [0, 1) and clip_high >= 0, got {clip_low} and {clip_high}"
        )
    ratio_T = _log_ratio(policy_logprobs, anchor_logprobs.detach(), loss_mask).exp()
    advantages_T = torch.where(loss_mask, advantages, 0.0)
    is_clipped_low_T = (advantages_T < 0) & (ratio_T < 1.0 - clip_low)
    is_clipped_high_T = (advantages_T > 0) & (ratio_T > 1.0 + clip_high)
    bounded_T = torch.where(is_clipped_low_T, 1.0 - clip_low, ratio_T)
    bounded_T = torch.where(is_clipped_high_T, 1.0 + clip_high, bounded_T)
    return -advantages_T * bounded_T, is_clipped_low_T, is_clipped_high_T


def truncated_importance_weights(
    anchor_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor, threshold: float
) -> Tensor:
    """Weight min(anchor / behavior, threshold) for tokens sampled by a slightly different policy.

    Carries no gradient. Large ratios are truncated, not dropped: the token keeps the weight
    `threshold`. Positions outside the mask have ratio 1.

    Args:
        anchor_logprobs: [T] float32 or float64, nats; trainer before the step.
        behavior_logprobs: [T] same dtype, nats; recorded by the engine at sampling time.
        loss_mask: [T] bool; True on tokens the loss sums over.
        threshold: largest weight, > 0; inf leaves the ratio uncapped.

    Returns:
        [T] detached, dimensionless, in (0, threshold].

    Raises:
        ValueError: if shapes or dtypes do not fit, or threshold is not > 0.

    Source:
        Truncated importance sampling (Liu, Yao et al. 2025); threshold 2 from RollVerify
        Section 5.1.
    """
    _check_row(loss_mask, anchor_logprobs=anchor_logprobs, behavior_logprobs=behavior_logprobs)
    if not threshold > 0.0:
        raise ValueError(f"threshold must be > 0, got {threshold}")
    log_ratio_T = _log_ratio(anchor_logprobs.detach(), behavior_logprobs.detach(), loss_mask)
    return log_ratio_T.exp().clamp(max=threshold)


def grpo_token_loss(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    truncation_threshold: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO's token loss: the clipped surrogate times the truncated importance weight.

    The clip acts first, the weight multiplies its result and does not change any denominator.
    With one optimizer step per batch the anchor is the policy itself (pass
    `policy_logprobs.detach()`): the ratio is 1, the clip never acts and the weight is the whole
    correction. Synchronizes with the device once, to check the log-probs.

    Args:
        policy_logprobs: [T] float32 or float64, nats; with gradient.
        anchor_logprobs: [T] same dtype, nats; trainer before the step.
        behavior_logprobs: [T] same dtype, nats; recorded by the engine at sampling time.
        advantages: [T] float32, dimensionless; the trajectory's advantage at each of its tokens.
        loss_mask: [T] bool; True on tokens the loss sums over.
        clip_low: lower clip distance, in [0, 1).
        clip_high: upper clip distance, >= 0.
        truncation_threshold: largest importance weight, > 0; None turns the correction off.

    Returns:
        token_loss [T], 0 outside the mask; and the diagnostics of `_diagnostics`, each [T],
        detached and 0 outside the mask, so that a sum divided by the token count is a mean.

    Raises:
        ValueError: if shapes or dtypes do not fit, a bound is out of range, or a log-prob inside
            the mask is not finite.

    Source:
        RollVerify Section 5.1; order of clip and weight as in the decoupled objective of
        AReaL (arXiv 2505.24298).
    """
    token_loss_T, is_clipped_low_T, is_clipped_high_T = clipped_surrogate(
        policy_logprobs,
        anchor_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    threshold = float("inf") if truncation_threshold is None else truncation_threshold
    weight_T = truncated_importance_weights(
        anchor_logprobs, behavior_logprobs, loss_mask, threshold
    )
    if truncation_threshold is None:
        weight_T = torch.ones_like(weight_T)
    _check_finite(
        loss_mask,
        policy_logprobs=policy_logprobs,
        anchor_logprobs=anchor_logprobs,
        behavior_logprobs=behavior_logprobs,
    )
    step_T = _log_ratio(policy_logprobs.detach(), anchor_logprobs.detach(), loss_mask)
    mismatch_T = _log_ratio(anchor_logprobs.detach(), behavior_logprobs.detach(), loss_mask)
    diagnostics = _diagnostics(step_T, mismatch_T, weight_T, loss_mask, threshold)
    diagnostics["is_clipped_low"] = is_clipped_low_T.to(weight_T.dtype)
    diagnostics["is_clipped_high"] = is_clipped_high_T.to(weight_T.dtype)
    return weight_T * token_loss_T, diagnostics


def _diagnostics(
    step_T: Tensor, mismatch_T: Tensor, weight_T: Tensor, loss_mask: Tensor, threshold: float
) -> dict[str, Tensor]:
    """What the metrics are made of, all [T].

    ratio: policy / anchor. kl: k3 estimate of KL(anchor || policy), nats. is_clipped_low,
    is_clipped_high: 1 where the clip acts (added by the caller). correction_weight: the weight
    used. is_truncated: 1 where it was cut to the threshold. mismatch_abs: |log anchor - log
    behavior|, nats. mismatch_k3: k3 estimate of KL(behavior || anchor), nats.

    k3 = rho - 1 - log(rho) is unbiased when the tokens come from the denominator of rho.
    """
    inside_T = loss_mask.to(weight_T.dtype)
    return {
        "ratio": step_T.exp() * inside_T,
        "kl": _k3(step_T),
        "correction_weight": weight_T * inside_T,
        "is_truncated": (mismatch_T.exp() > threshold).to(weight_T.dtype) * inside_T,
        "mismatch_abs": mismatch_T.abs(),
        "mismatch_k3": _k3(mismatch_T),
    }


def engine_mismatch(
    anchor_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, Tensor]:
    """Trainer against engine under one version of the policy: the mismatch apart from staleness.

    Args:
        anchor_logprobs: [T] float32 or float64, nats; trainer, under the version that sampled
            each token. May be anything outside the mask.
        behavior_logprobs: [T] same dtype, nats; engine, at sampling time.
        loss_mask: [T] bool; True on tokens the loss sums over.

    Returns:
        mismatch_abs and mismatch_k3 as in the diagnostics of `grpo_token_loss`, each [T].

    Source:
        Our choice: RollVerify does not tell the two apart.
    """
    mismatch_T = _log_ratio(anchor_logprobs, behavior_logprobs, loss_mask)
    return {"mismatch_abs": mismatch_T.abs(), "mismatch_k3": _k3(mismatch_T)}


def _k3(log_ratio_T: Tensor) -> Tensor:
    # Rounding can leave a tiny negative value where the ratio is close to 1.
    return (log_ratio_T.expm1() - log_ratio_T).clamp(min=0.0)


def _log_ratio(numerator_T: Tensor, denominator_T: Tensor, loss_mask: Tensor) -> Tensor:
    """Clamped numerator - denominator, 0 outside the mask.

    The mask is applied before the subtraction: afterwards 0 * inf would already be NaN, in the
    value and in the gradient.
    """
    difference_T = torch.where(loss_mask, numerator_T, 0.0) - torch.where(
        loss_mask, denominator_T, 0.0
    )
    return difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _check_row(loss_mask: Tensor, **rows: Tensor) -> None:
    if loss_mask.ndim != 1 or loss_mask.dtype != torch.bool:
        raise ValueError(
            f"loss_mask must be [T] bool, got {list(loss_mask.shape)} {loss_mask.dtype}"
        )
    for name, row_T in rows.items():
        if row_T.shape != loss_mask.shape:
            raise ValueError(
                f"{name} has shape {list(row_T.shape)}, loss_mask {list(loss_mask.shape)}"
            )
        if row_T.dtype not in (torch.float32, torch.float64):
            # bfloat16 log-probs are spaced 0.008 apart near -1.5: too coarse for a ratio.
            raise ValueError(f"{name} must be float32 or float64, got {row_T.dtype}")


def _check_finite(loss_mask: Tensor, **rows: Tensor) -> None:
    rows_NT = torch.stack([row_T.detach() for row_T in rows.values()])
    bad_NT = ~rows_NT.isfinite() & loss_mask
    if not bool(bad_NT.any()):
        return
    first = bad_NT.nonzero()[0]
    row, token = int(first[0].item()), int(first[1].item())
    name = list(rows)[row]
    raise ValueError(
        f"{name}[{token}] is {rows[name][token].item()} inside loss_mask; "
        "log-probs of trained tokens must be finite"
    )
