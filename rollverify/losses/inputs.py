"""What every loss and correction takes: one packed row, and the log ratios made from it.

Dimensions: T tokens of one packed row, several trajectories back to back; S trajectories.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 nats, so that a ratio stays in [2.1e-9, 4.9e8] and is never inf
(exp overflows float32 at 88.7) and 0 times a ratio stays 0."""

Diagnostics = dict[str, Tensor]
"""Per-token values, [T] each, detached, 0 outside the mask: their sum / tokens is a mean. A loss
gives at least `is_clipped_low`, `is_clipped_high` and `is_masked`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """What the loss of a packed row is made from; every tensor is [T], anything outside the mask.

    Packing fills it, the policy update adds what has to be known before the step.
    """

    behavior_logprobs: Tensor
    """float32 or float64, nats; recorded by the engine at sampling time."""

    sampling_anchor_logprobs: Tensor
    """Same dtype, nats; trainer under the version that sampled the token. NaN: never scored."""

    advantages: Tensor
    """float32 or float64; the trajectory's advantage at each of its tokens."""

    ages: Tensor
    """Integer; steps since each token was sampled."""

    loss_mask: Tensor
    """bool; True on tokens the loss sums over."""

    sequence_ids: Tensor
    """Integer; in [0, num_sequences) inside the mask. A trajectory lies in one row as a whole."""

    num_sequences: int
    """S, > 0; at least the largest sequence id + 1."""

    anchor_logprobs: Tensor | None = None
    """float32 or float64, nats; trainer before the iteration's first optimizer step. None: the
    policy's own, at that step."""

    reference_logprobs: Tensor | None = None
    """Same dtype, nats; the KL term's reference model. None where there is no such term."""

    limit: float | None = None
    """`second_moment_limit` of the whole minibatch; read only by `m2po`."""

    counted: Tensor | None = None
    """bool; tokens that are averaged over. None: all of the loss mask, dropped ones too."""

    def to(self, device: torch.device) -> "RowInputs":
        """The same row on the device."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        moved = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs(RowInputs):
    """The same row inside the step, on one device; completed by the objective."""

    anchor_logprobs: Tensor  # pyright: ignore[reportGeneralTypeIssues]: known by now, no default

    policy_logprobs: Tensor
    """float32 or float64, nats; the policy inside the step, with gradient."""

    denominator_logprobs: Tensor
    """Same dtype, nats, detached; the one of anchor, sampling anchor and behavior that the ratio
    divides by."""

    log_rho: Tensor
    """Same dtype, nats, detached, 0 outside the mask; what corrections are about, log of the policy
    that the loss starts from / behavior."""

    correction_weights: Tensor | None = None
    """float32 or float64, detached; read only by the losses in `TAKES_WEIGHTS`, which work the
    weights in themselves. All other losses are multiplied by them afterwards."""


def check_finite(loss_mask: Tensor, **rows: Tensor) -> None:
    """Make sure that every trained token of each row, [T], is finite. Synchronizes with the device.

    Raises:
        ValueError: naming the first row and token that are not finite.
    """
    rows_NT = torch.stack([row_T.detach() for row_T in rows.values()])
    bad_NT = ~rows_NT.isfinite() & loss_mask
    if not bool(bad_NT.any()):
        return
    row, token = bad_NT.nonzero()[0].tolist()
    name = list(rows)[row]
    raise ValueError(
        f"{name}[{token}] is {rows[name][token].item()} inside loss_mask; "
        "log-probs of trained tokens must be finite"
    )


def log_difference(numerator: Tensor, denominator: Tensor, loss_mask: Tensor) -> Tensor:
    """Numerator - denominator, [T] nats with the gradient of both, 0 outside the mask; no clamp.

    The mask is applied before the subtraction: afterwards 0 * inf would already be NaN, in the
    value and in the gradient.
    """
    return torch.where(loss_mask, numerator, 0.0) - torch.where(loss_mask, denominator, 0.0)


def log_ratio(numerator: Tensor, denominator: Tensor, loss_mask: Tensor) -> Tensor:
    """`log_difference`, [T], clamped to +-20 nats; where the clamp acts the gradient is 0."""
    difference_T = log_difference(numerator, denominator, loss_mask)
    return difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_log_ratio(inputs: LossInputs) -> Tensor:
    """Clamped log of policy / denominator, [T] nats, with the policy's gradient."""
    return log_ratio(inputs.policy_logprobs, inputs.denominator_logprobs, inputs.loss_mask)


def masked_advantages(inputs: LossInputs) -> Tensor:
    """Advantages [T], 0 outside the mask."""
    return torch.where(inputs.loss_mask, inputs.advantages, 0.0)


def sequence_sums(values: Tensor, inputs: RowInputs) -> tuple[Tensor, Tensor]:
    """Sum of each trajectory's tokens, [S], and the trajectory each token reads it from, [T] int64.

    `values` is [T], 0 outside the mask. The index is 0 outside the mask.
    """
    index_T = torch.where(inputs.loss_mask, inputs.sequence_ids, 0)
    return values.new_zeros(inputs.num_sequences).index_add(0, index_T, values), index_T


def sequence_means(values: Tensor, inputs: RowInputs) -> tuple[Tensor, Tensor]:
    """`sequence_sums` divided by the trajectory's tokens in the mask, [S]; 0 where there is none.

    With the index, [T] int64.
    """
    sums_S, index_T = sequence_sums(values, inputs)
    counts_S = torch.zeros_like(sums_S).index_add(0, index_T, inputs.loss_mask.to(values.dtype))
    return sums_S / counts_S.clamp(min=1.0), index_T


def k3(log_rho: Tensor) -> Tensor:
    """Estimate rho - 1 - log(rho) of a KL divergence, [T] nats, never negative.

    Unbiased when the tokens come from the denominator of rho: k3 of Schulman, "Approximating KL
    Divergence" (2020).
    """
    # Rounding can leave a tiny negative value where the ratio is close to 1.
    return (log_rho.expm1() - log_rho).clamp(min=0.0)


def token_flags(inputs: LossInputs, **flags: Tensor) -> Diagnostics:
    """The diagnostics every loss gives, [T] 0 or 1 each, from [T] bool; False if left out.

    They are `is_clipped_low`, `is_clipped_high` and `is_masked`.
    """
    none_T = torch.zeros_like(inputs.loss_mask)
    names = ("is_clipped_low", "is_clipped_high", "is_masked")
    dtype = inputs.policy_logprobs.dtype
    return {name: (flags.get(name, none_T) & inputs.loss_mask).to(dtype) for name in names}
