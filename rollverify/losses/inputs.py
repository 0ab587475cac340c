"""What losses and corrections take: T tokens of a packed row, S trajectories back to back."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 nats: exp overflows float32 at 88.7, and 0 * inf is NaN."""

Diagnostics = dict[str, Tensor]
"""Per-token values, [T] each, detached, 0 outside the mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """A packed row for the loss; tensors are [T], log-probs in nats, anything outside the mask."""

    behavior_logprobs: Tensor  # float32 or float64; of the engine at sampling time
    sampling_anchor_logprobs: Tensor  # trainer, of the sampling version; NaN: never scored
    advantages: Tensor  # the trajectory's, at each of its tokens
    ages: Tensor  # integer; steps since each token was sampled
    loss_mask: Tensor  # bool; True on tokens the loss sums over
    sequence_ids: Tensor  # in [0, num_sequences) inside the mask; a trajectory lies in one row
    num_sequences: int  # S, > 0
    anchor_logprobs: Tensor | None = None
    """Trainer before the iteration's first optimizer step. None: the policy's own, at that step."""

    reference_logprobs: Tensor | None = None  # of the KL term's reference model
    limit: float | None = None  # `second_moment_limit` of the whole minibatch, for `m2po`
    counted: Tensor | None = None  # bool; tokens averaged over. None: all of the loss mask

    def to(self, device: torch.device) -> "RowInputs":
        """The same row on the device."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        moved = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs(RowInputs):
    """The row inside the step, on one device; all but the policy's log-probs are detached."""

    anchor_logprobs: Tensor  # pyright: ignore[reportGeneralTypeIssues]: known by now, no default

    policy_logprobs: Tensor  # inside the step, with gradient
    denominator_logprobs: Tensor  # what the ratio divides by
    log_rho: Tensor
    """Log of the policy that the loss starts from / behavior, 0 outside the mask."""

    correction_weights: Tensor | None = None  # read only by losses with `takes_weights`


def check_finite(loss_mask: Tensor, **rows: Tensor) -> None:
    """ValueError where a trained token of a row, [T], is not finite. Synchronizes."""
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
    """Numerator - denominator, [T] nats, 0 outside the mask; no clamp.

    Masked before the subtraction: afterwards 0 * inf would be NaN, in value and gradient.
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
    """Sums [S] of `values`, [T], 0 outside the mask; the trajectory of each token, [T]."""
    index_T = torch.where(inputs.loss_mask, inputs.sequence_ids, 0)
    return values.new_zeros(inputs.num_sequences).index_add(0, index_T, values), index_T


def sequence_means(values: Tensor, inputs: RowInputs) -> tuple[Tensor, Tensor]:
    """`sequence_sums` / the trajectory's tokens in the mask, [S]; and the index, [T]."""
    sums_S, index_T = sequence_sums(values, inputs)
    counts_S = torch.zeros_like(sums_S).index_add(0, index_T, inputs.loss_mask.to(values.dtype))
    return sums_S / counts_S.clamp(min=1.0), index_T


def k3(log_rho: Tensor) -> Tensor:
    """KL estimate rho - 1 - log(rho), [T] nats (Schulman, Approximating KL Divergence, 2020)."""
    # Rounding can leave a tiny negative value where the ratio is close to 1.
    return (log_rho.expm1() - log_rho).clamp(min=0.0)


def token_flags(inputs: LossInputs, **flags: Tensor) -> Diagnostics:
    """The flags every loss gives, [T] 0 or 1 each, from [T] bool; 0 if left out."""
    none_T = torch.zeros_like(inputs.loss_mask)
    names = ("is_clipped_low", "is_clipped_high", "is_masked")
    dtype = inputs.policy_logprobs.dtype
    return {name: (flags.get(name, none_T) & inputs.loss_mask).to(dtype) for name in names}
