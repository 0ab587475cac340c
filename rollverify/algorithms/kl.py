"""Penalty on the distance to a reference policy, as a per-token loss.

Does not score the reference and does not scale the penalty.

Dimensions: T tokens of one packed row.
"""

from typing import Literal

from torch import Tensor

from rollverify.algorithms.losses.inputs import check_finite, k3, log_difference

KlEstimator = Literal["k1", "k2", "k3"]

KL_LIMIT = 20.0
"""Differences are clamped to +-20 nats before the exponential of k3."""

K3_LIMIT = 10.0
"""k3 is clamped to 10 nats: one token cannot outweigh the batch."""


def kl_penalty(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    loss_mask: Tensor,
    estimator: KlEstimator = "k3",
) -> Tensor:
    """Estimate of KL(policy || reference) at each token, with the policy's gradient.

    With d = log policy - log reference: k1 = d, unbiased, may be negative, and the gradient of its
    mean is 0 in expectation, so it only serves to watch. k2 = d^2 / 2, slightly biased, its
    gradient is that of the KL. k3 = exp(-d) - 1 + d, unbiased and >= 0. All suppose tokens of the
    policy itself; stale tokens bias them.

    Args:
        policy_logprobs: [T] float32 or float64, nats; with gradient.
        reference_logprobs: [T] same dtype, nats.
        loss_mask: [T] bool.
        estimator: "k1", "k2" or "k3".

    Returns:
        [T] nats; 0 with gradient exactly 0 outside the mask and where a clamp acts.

    Raises:
        ValueError: if the estimator is unknown or the reference is not finite inside the mask.

    Source:
        Schulman, "Approximating KL Divergence" (2020); k3 in GRPO (arXiv 2402.03300). The clamps to
        20 and 10 nats are verl's.
    """
    check_finite(loss_mask, reference_logprobs=reference_logprobs)
    difference_T = log_difference(policy_logprobs, reference_logprobs.detach(), loss_mask)
    difference_T = difference_T.clamp(-KL_LIMIT, KL_LIMIT)
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    if estimator == "k3":
        return k3(-difference_T).clamp(max=K3_LIMIT)
    raise ValueError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")
