"""What the metrics of an optimizer step are made of: per-token values, shares and histograms.

Changes no loss.

Dimensions: T tokens of one packed row.
"""

import torch
from torch import Tensor

from rollverify.algorithms.corrections import Correction
from rollverify.algorithms.losses.inputs import Diagnostics, LossInputs, k3, log_ratio

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
    """Count tokens per bucket of the ratio.

    Args:
        ratio: [T] floating point.
        loss_mask: [T] bool; other positions are not counted.

    Returns:
        [len(RATIO_BUCKETS)] float32; counts.

    Source:
        Our choice.
    """
    edges = ratio.new_tensor(RATIO_EDGES)
    bucket_T = torch.bucketize(ratio, edges, right=True)
    counts = torch.zeros(len(RATIO_BUCKETS), device=ratio.device)
    return counts.index_add(0, bucket_T, loss_mask.to(torch.float32))


def step_diagnostics(inputs: LossInputs, correction: Correction) -> Diagnostics:
    """How far the step has moved, and what the correction does or would do.

    Args:
        inputs: one packed row.
        correction: of the same row, whether it is applied or not.

    Returns:
        [T] each, detached, 0 outside the mask. ratio: policy / denominator. kl: k3 estimate of
        KL(denominator || policy), nats. correction_weight and its square; is_truncated,
        is_correction_masked: 1 where the weight was cut or is 0.

    Source:
        Our choice.
    """
    mask_T = inputs.loss_mask
    dtype = correction.weights.dtype
    inside_T = mask_T.to(dtype)
    policy_T, denominator_T = inputs.policy_logprobs.detach(), inputs.denominator_logprobs.detach()
    step_T = log_ratio(policy_T, denominator_T, mask_T)
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
    """Trainer against engine under one version of the policy: the mismatch apart from staleness.

    Args:
        anchor: [T] float32 or float64, nats; trainer, under the version that sampled each token.
            May be anything outside the mask.
        behavior: [T] same dtype, nats; engine, at sampling time.
        loss_mask: [T] bool; True on tokens the loss sums over.

    Returns:
        mismatch_abs: |log anchor - log behavior|, nats. mismatch_k3: k3 estimate of KL(behavior ||
        anchor), nats. Each [T], 0 outside the mask.

    Source:
        Our choice: RollVerify does not tell the two apart.
    """
    mismatch_T = log_ratio(anchor, behavior, loss_mask)
    return {"mismatch_abs": mismatch_T.abs(), "mismatch_k3": k3(mismatch_T)}


def effective_sample_frac(weight_sum: float, square_sum: float, num_tokens: float) -> float:
    """Share of the tokens that as many equal weights would be worth, (sum w)^2 / (n sum w^2).

    For example, weights 1, 1, 0, 0 give 4 / (4 * 2) = 0.5.

    Args:
        weight_sum: sum of the weights.
        square_sum: sum of their squares.
        num_tokens: n.

    Returns:
        Between 0 and 1; 0 where all weights are 0 or there are none.

    Source:
        Kong 1992, over tokens.
    """
    product = num_tokens * square_sum
    return weight_sum * weight_sum / product if product > 0.0 else 0.0
