"""What the metrics of an optimizer step are made of; T tokens of one packed row."""

from typing import Literal

import torch
from torch import Tensor

from rollverify.losses.corrections import Correction
from rollverify.losses.inputs import (
    Diagnostics,
    LossInputs,
    check_finite,
    k3,
    log_difference,
    log_ratio,
    policy_log_ratio,
)

RATIO_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
RATIO_BUCKETS = (
    "below_0_5",
    "from_0_5",
    "from_0_8",
    "from_0_95",
    "from_1_05",
    "from_1_25",
    "from_2_up",
)
"""Names of the buckets that `RATIO_EDGES` divide; each begins at its number."""


def ratio_histogram(ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """Tokens in the mask per bucket of `ratio`, [T]: [len(RATIO_BUCKETS)] float32."""
    edges = ratio.new_tensor(RATIO_EDGES)
    bucket_T = torch.bucketize(ratio, edges, right=True)
    counts = torch.zeros(len(RATIO_BUCKETS), device=ratio.device)
    return counts.index_add(0, bucket_T, loss_mask.to(torch.float32))


def step_diagnostics(inputs: LossInputs, correction: Correction) -> Diagnostics:
    """How far the step has moved, and what the correction does or, if off, would do."""
    mask_T = inputs.loss_mask
    dtype = correction.weights.dtype
    inside_T = mask_T.to(dtype)
    step_T = policy_log_ratio(inputs).detach()
    weight_T = torch.where(mask_T, correction.weights, 0.0)
    return {
        "ratio": step_T.exp() * inside_T,
        "kl": k3(step_T),
        "correction_weight": weight_T,
        "correction_weight_squared": weight_T.square(),
        "is_truncated": correction.is_truncated.to(dtype) * inside_T,
        "is_correction_masked": correction.is_masked.to(dtype) * inside_T,
    }


def engine_mismatch(anchor: Tensor, behavior: Tensor, loss_mask: Tensor) -> Diagnostics:
    """Trainer against engine under one version of the policy; all [T] nats.

    mismatch_abs: |log anchor - log behavior|. mismatch_k3: k3 estimate of KL(behavior || anchor).
    """
    mismatch_T = log_ratio(anchor, behavior, loss_mask)
    return {"mismatch_abs": mismatch_T.abs(), "mismatch_k3": k3(mismatch_T)}


def effective_sample_frac(weight_sum: float, square_sum: float, num_tokens: float) -> float:
    """(sum w)^2 / (n sum w^2), Kong 1992: weights 1, 1, 0, 0 give 4 / (4 * 2) = 0.5."""
    product = num_tokens * square_sum
    return weight_sum * weight_sum / product if product > 0.0 else 0.0


KlEstimator = Literal["k1", "k2", "k3"]

KL_LIMIT = 20.0  # nats, as in verl; differences before the exponential of k3

K3_LIMIT = 10.0  # nats, as in verl: one token cannot outweigh the batch


def kl_penalty(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    loss_mask: Tensor,
    estimator: KlEstimator = "k3",
) -> Tensor:
    """Estimate of KL(policy || reference) at each token, [T] nats, with the policy's gradient.

    With d = log policy - log reference: k1 = d, whose mean has gradient 0 in expectation; k2 = d^2
    / 2, whose gradient is that of the KL; k3 = exp(-d) - 1 + d >= 0 (Schulman 2020). ValueError if
    the reference is not finite inside the mask.
    """
    check_finite(loss_mask, reference_logprobs=reference_logprobs)
    difference_T = log_difference(policy_logprobs, reference_logprobs, loss_mask)
    difference_T = difference_T.clamp(-KL_LIMIT, KL_LIMIT)
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    return k3(-difference_T).clamp(max=K3_LIMIT)
