"""What every token loss takes: one packed row, checked once, and the log ratios made from it.

Holds no loss and no correction; how token losses become one number is `aggregation.py`'s business.

Dimensions: T tokens of one packed row, several trajectories back to back; S trajectories.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 nats, so that a ratio stays in [2.1e-9, 4.9e8] and is never inf
(exp overflows float32 at 88.7) and 0 times a ratio stays 0."""

Diagnostics = dict[str, Tensor]
"""Per-token values, [T] each, detached, 0 outside the mask: their sum / tokens is a mean. A loss
gives at least `is_clipped_low`, `is_clipped_high` and `is_masked`."""


@dataclass(kw_only=True, frozen=True, slots=True)
class LossInputs:
    """One packed row as the losses see it; every tensor is [T], anything outside the mask."""

    policy_logprobs: Tensor
    """float32 or float64, nats; the policy inside the step, with gradient."""

    denominator_logprobs: Tensor
    """Same dtype, nats; what the ratio divides by. No gradient is taken."""

    behavior_logprobs: Tensor
    """Same dtype, nats; recorded by the engine at sampling time."""

    anchor_logprobs: Tensor
    """Same dtype, nats; trainer before the iteration's first optimizer step."""

    advantages: Tensor
    """float32 or float64; the trajectory's advantage at each of its tokens."""

    loss_mask: Tensor
    """bool; True on tokens the loss sums over."""

    sequence_ids: Tensor
    """Integer; in [0, num_sequences) inside the mask. A trajectory lies in one row as a whole."""

    num_sequences: int
    """S, > 0; at least the largest sequence id + 1."""

    correction_weights: Tensor | None = None
    """float32 or float64, detached; read only by the losses in `TAKES_WEIGHTS`, which work the
    weights in themselves. All other losses are multiplied by them afterwards."""

    def __post_init__(self) -> None:
        """Refuse shapes and dtypes that do not fit."""
        check_row(
            self.loss_mask,
            self.sequence_ids,
            policy_logprobs=self.policy_logprobs,
            denominator_logprobs=self.denominator_logprobs,
            behavior_logprobs=self.behavior_logprobs,
            anchor_logprobs=self.anchor_logprobs,
            advantages=self.advantages,
        )
        if self.num_sequences < 1:
            raise ValueError(f"num_sequences must be >= 1, got {self.num_sequences}")


def check_row(loss_mask: Tensor, sequence_ids: Tensor, **rows: Tensor) -> None:
    """Check one packed row.

    Args:
        loss_mask: [T] bool.
        sequence_ids: [T] integer.
        rows: [T] float32 or float64 each; the names are used in messages.

    Raises:
        ValueError: naming what does not fit.

    Source:
        Our choice.
    """
    if loss_mask.ndim != 1 or loss_mask.dtype != torch.bool:
        raise ValueError(
            f"loss_mask must be [T] bool, got {list(loss_mask.shape)} {loss_mask.dtype}"
        )
    if sequence_ids.shape != loss_mask.shape or sequence_ids.dtype not in (
        torch.int64,
        torch.int32,
    ):
        raise ValueError(
            f"sequence_ids must be [T] integers like loss_mask {list(loss_mask.shape)}, "
            f"got {list(sequence_ids.shape)} {sequence_ids.dtype}"
        )
    for name, row_T in rows.items():
        if row_T.shape != loss_mask.shape:
            raise ValueError(
                f"{name} has shape {list(row_T.shape)}, loss_mask {list(loss_mask.shape)}"
            )
        if row_T.dtype not in (torch.float32, torch.float64):
            # bfloat16 log-probs are spaced 0.008 apart near -1.5: too coarse for a ratio.
            raise ValueError(f"{name} must be float32 or float64, got {row_T.dtype}")


def check_finite(loss_mask: Tensor, **rows: Tensor) -> None:
    """Make sure that every trained token has a number. Synchronizes with the device once.

    Args:
        loss_mask: [T] bool; True on tokens the loss sums over.
        rows: [T] floating point each; the names are used in the message.

    Raises:
        ValueError: naming the first row and token that are not finite.

    Source:
        Our choice.
    """
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


def log_difference(numerator: Tensor, denominator: Tensor, loss_mask: Tensor) -> Tensor:
    """Numerator - denominator, 0 outside the mask, without a clamp.

    The mask is applied before the subtraction: afterwards 0 * inf would already be NaN, in the
    value and in the gradient.

    Args:
        numerator: [T] floating point, nats.
        denominator: [T] floating point, nats.
        loss_mask: [T] bool.

    Returns:
        [T] nats; with the gradient of either argument.

    Source:
        Our choice.
    """
    return torch.where(loss_mask, numerator, 0.0) - torch.where(loss_mask, denominator, 0.0)


def log_ratio(numerator: Tensor, denominator: Tensor, loss_mask: Tensor) -> Tensor:
    """Numerator - denominator, clamped to +-20 nats, 0 outside the mask.

    Args:
        numerator: [T] floating point, nats.
        denominator: [T] floating point, nats.
        loss_mask: [T] bool.

    Returns:
        [T] nats; where the clamp acts the gradient is 0.

    Source:
        The clamp is our choice, as in common practice.
    """
    difference_T = log_difference(numerator, denominator, loss_mask)
    return difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_log_ratio(inputs: LossInputs) -> Tensor:
    """Clamped log of policy / denominator.

    Args:
        inputs: one packed row.

    Returns:
        [T] nats, with the policy's gradient; 0 outside the mask.

    Source:
        Our choice.
    """
    denominator_T = inputs.denominator_logprobs.detach()
    return log_ratio(inputs.policy_logprobs, denominator_T, inputs.loss_mask)


def masked_advantages(inputs: LossInputs) -> Tensor:
    """Advantages, 0 outside the mask.

    Args:
        inputs: one packed row.

    Returns:
        [T], the advantages' dtype.

    Source:
        Our choice.
    """
    return torch.where(inputs.loss_mask, inputs.advantages, 0.0)


def sequence_sums(
    values: Tensor, loss_mask: Tensor, sequence_ids: Tensor, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """Sum of each trajectory's tokens, and the trajectory each token reads it from.

    Args:
        values: [T] floating point, 0 outside the mask.
        loss_mask: [T] bool.
        sequence_ids: [T] integer; in [0, num_sequences) inside the mask, ignored outside.
        num_sequences: S.

    Returns:
        Sums [S], with gradient; index [T] int64 in [0, S), 0 outside the mask.

    Raises:
        IndexError: from torch, for an id that is out of range.

    Source:
        Our choice.
    """
    index_T = torch.where(loss_mask, sequence_ids, 0)
    return values.new_zeros(num_sequences).index_add(0, index_T, values), index_T


def sequence_means(
    values: Tensor, loss_mask: Tensor, sequence_ids: Tensor, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """Like `sequence_sums`, divided by the trajectory's number of tokens in the mask.

    Args:
        values: [T] floating point, 0 outside the mask.
        loss_mask: [T] bool.
        sequence_ids: [T] integer; in [0, num_sequences) inside the mask, ignored outside.
        num_sequences: S.

    Returns:
        Means [S], 0 for a trajectory without tokens; index [T] as in `sequence_sums`.

    Raises:
        IndexError: from torch, for an id that is out of range.

    Source:
        Our choice.
    """
    sums_S, index_T = sequence_sums(values, loss_mask, sequence_ids, num_sequences)
    counts_S = torch.zeros_like(sums_S).index_add(0, index_T, loss_mask.to(values.dtype))
    return sums_S / counts_S.clamp(min=1.0), index_T


def k3(log_rho: Tensor) -> Tensor:
    """Estimate rho - 1 - log(rho) of a KL divergence, never negative.

    Unbiased when the tokens come from the denominator of rho.

    Args:
        log_rho: [T] nats, the log of rho.

    Returns:
        [T] nats, >= 0.

    Source:
        Schulman, "Approximating KL Divergence" (2020), k3.
    """
    # Rounding can leave a tiny negative value where the ratio is close to 1.
    return (log_rho.expm1() - log_rho).clamp(min=0.0)


def token_flags(inputs: LossInputs, **flags: Tensor) -> Diagnostics:
    """The diagnostics every loss gives: `is_clipped_low`, `is_clipped_high`, `is_masked`.

    Args:
        inputs: one packed row.
        flags: [T] bool each, of these three names; a flag that is left out is False.

    Returns:
        Each flag as [T] 0 or 1, the policy's dtype; 0 outside the mask.

    Source:
        Our choice.
    """
    none_T = torch.zeros_like(inputs.loss_mask)
    names = ("is_clipped_low", "is_clipped_high", "is_masked")
    dtype = inputs.policy_logprobs.dtype
    return {name: (flags.get(name, none_T) & inputs.loss_mask).to(dtype) for name in names}
