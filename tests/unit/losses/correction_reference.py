"""Corrections, advantages, estimators and diagnostics as their formulas read, with plain loops.

Slow on purpose, and knows nothing of the code under test. How a correction meets a loss is not
decided here: a correction returns [B][T] numbers, 0.0 where `mask` is 0, to be passed to a loss of
`loss_reference.py` as `weights` (denominator unchanged) or, for a 0/1 mask, multiplied into its
`mask` (denominator shrinks). rho is exp(lp_old - lp_roll) throughout, never differentiated.
"""

import math

import torch
from unit.losses import loss_reference
from unit.losses.loss_reference import in_loss, log_ratio, mean_log_ratio, number


def per_token(mask, value):
    """[B][T] of value(i, t) in the loss, 0.0 elsewhere."""
    rows = [[0.0] * len(row) for row in mask]
    for i, positions in enumerate(in_loss(mask)):
        for t in positions:
            rows[i][t] = float(value(i, t))
    return rows


def per_sequence(mask, value):
    """[B][T] of value(i), the same for all tokens of a sequence."""
    return per_token(mask, lambda i, t: value(i))


def rho(lp_old, lp_roll, i, t):
    return float(loss_reference.ratio(lp_old, lp_roll, i, t).detach())


def sequence_rho(lp_old, lp_roll, mask, i, form):
    """IR05: product of the rho of a sequence, or geometric mean; the log clamped to +-20."""
    total = loss_reference.sum_log_ratio if form == "product" else mean_log_ratio
    log_rho = float(total(lp_old, lp_roll, i, in_loss(mask)[i]).detach())
    return math.exp(min(max(log_rho, -20.0), 20.0))


def band(bounds):
    """One number u means [1/u, u]."""
    return (1.0 / bounds, bounds) if isinstance(bounds, float) else bounds


def truncated_token(lp_old, lp_roll, mask, *, cap=2.0):
    """TIS: w_t = min(rho_t, C)."""
    return per_token(mask, lambda i, t: min(rho(lp_old, lp_roll, i, t), cap))


def truncated_sequence(lp_old, lp_roll, mask, *, cap=2.0, form="product"):
    """TIS at sequence level: min(rho of the sequence, C) for all its tokens."""
    return per_sequence(mask, lambda i: min(sequence_rho(lp_old, lp_roll, mask, i, form), cap))


def masked_token(lp_old, lp_roll, mask, *, bounds=2.0):
    """MIS: rho_t inside the band, 0 outside."""
    lower, upper = band(bounds)

    def value(i, t):
        w = rho(lp_old, lp_roll, i, t)
        return w if lower <= w <= upper else 0.0

    return per_token(mask, value)


def icepop(lp_old, lp_roll, mask, *, alpha=0.5, beta=5.0):
    """IcePop (arXiv 2510.18855): w_t = rho_t if alpha <= rho_t <= beta, else 0."""
    return masked_token(lp_old, lp_roll, mask, bounds=(alpha, beta))


def masked_sequence(lp_old, lp_roll, mask, *, bounds=2.0, form="product"):
    """MIS at sequence level, as in TRL: the sequence's rho inside the band, 0 outside."""
    lower, upper = band(bounds)

    def value(i):
        w = sequence_rho(lp_old, lp_roll, mask, i, form)
        return w if lower <= w <= upper else 0.0

    return per_sequence(mask, value)


def geometric_mask(lp_old, lp_roll, mask, *, bounds=(0.99, 1.01)):
    """1 for sequences with exp(mean log rho) in the band, 0 for the others."""
    weights = masked_sequence(lp_old, lp_roll, mask, bounds=bounds, form="geometric")
    return per_token(mask, lambda i, t: 1.0 if weights[i][t] > 0 else 0.0)


def mask_old_tokens(versions, mask, *, current_version, max_age=0):
    """0 for tokens sampled more than `max_age` policy versions ago, 1 for the others."""
    return per_token(mask, lambda i, t: current_version - versions[i][t] <= max_age)


def off_policy_sequence_mask(lp_new, lp_old, advantages, mask, *, delta=1e-4):
    """OPSM (DeepSeek-V3.2): 0 where A_i < 0 and mean_t(lp_old - lp_new) > delta, else 1."""

    def value(i):
        drift = float(mean_log_ratio(lp_old, lp_new, i, in_loss(mask)[i]).detach())
        return 0.0 if advantages[i] < 0 and drift > delta else 1.0

    return per_sequence(mask, value)


# Advantages, and which data is trained on


def leave_one_out(rewards):
    """R_i minus the mean reward of the others of its group."""
    advantages = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        advantages.append(reward - sum(others) / len(others) if others else 0.0)
    return advantages


def has_signal(num_correct, group_size):
    """Keep a prompt iff 0 < #correct < G."""
    return 0 < num_correct < group_size


# Estimators


def kl(lp, lp_ref, estimator):
    """Of one token, differentiable in `lp`; k3 as verl's low_var_kl, with its two clamps."""
    d = number(lp) - number(lp_ref)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2.0
    if estimator == "k3":
        d = torch.clamp(d, -20.0, 20.0)
        return torch.clamp(torch.exp(-d) - 1.0 + d, -10.0, 10.0)
    raise ValueError(estimator)


# Diagnostics


def effective_sample_size(weights, mask):
    """(sum w)^2 / (n sum w^2), in 0..1."""
    inside = [weights[i][t] for i, positions in enumerate(in_loss(mask)) for t in positions]
    squares = sum(w**2 for w in inside)
    return sum(inside) ** 2 / (len(inside) * squares) if squares > 0 else 0.0


def drift_kl(lp_old, lp_roll, mask):
    """Mean of rho - log rho - 1, the k3 estimate of KL(roll || old) from samples of roll."""
    values = []
    for i, positions in enumerate(in_loss(mask)):
        for t in positions:
            log_rho = float(log_ratio(lp_old, lp_roll, i, t).detach())
            values.append(math.exp(log_rho) - log_rho - 1.0)
    return sum(values) / len(values)


CORRECTIONS = {
    correction.__name__: correction
    for correction in (
        *(truncated_token, truncated_sequence, masked_token, icepop),
        *(masked_sequence, geometric_mask),
    )
}
"""Name -> correction(lp_old, lp_roll, mask, **settings)."""
