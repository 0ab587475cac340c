"""Importance weights and masks between the policy that sampled a token and the trainer.

They stack with any loss: the token loss is multiplied by the weight. A mask is a weight of 0; it
does not change the number of tokens or trajectories the loss is divided by.

Dimensions: T tokens of one packed row; S trajectories.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollverify.losses.inputs import (
    LOG_RATIO_LIMIT,
    check_row,
    log_difference,
    sequence_means,
    sequence_sums,
)

Level = Literal["token", "sequence"]


@dataclass(kw_only=True, frozen=True, slots=True)
class CorrectionInputs:
    """One packed row; every tensor is [T], anything outside the mask. No gradient is taken."""

    numerator_logprobs: Tensor
    """float32 or float64, nats; the policy the loss starts from: its denominator."""

    behavior_logprobs: Tensor
    """Same dtype, nats; recorded by the engine at sampling time."""

    policy_logprobs: Tensor
    """Same dtype, nats; the policy inside the step; read by `opsm`."""

    advantages: Tensor
    """float32 or float64; read by `opsm`."""

    ages: Tensor
    """Integer; steps since each token was sampled; read by `mask_stale`."""

    loss_mask: Tensor
    """bool; True on tokens the loss sums over."""

    sequence_ids: Tensor
    """Integer; in [0, num_sequences) inside the mask. A trajectory lies in one row as a whole."""

    num_sequences: int
    """S, > 0."""

    def __post_init__(self) -> None:
        """Refuse shapes and dtypes that do not fit."""
        check_row(
            self.loss_mask,
            self.sequence_ids,
            numerator_logprobs=self.numerator_logprobs,
            behavior_logprobs=self.behavior_logprobs,
            policy_logprobs=self.policy_logprobs,
            advantages=self.advantages,
        )
        if self.ages.shape != self.loss_mask.shape:
            raise ValueError(
                f"ages has shape {list(self.ages.shape)}, loss_mask {list(self.loss_mask.shape)}"
            )


@dataclass(kw_only=True, frozen=True, slots=True)
class Correction:
    """What a correction makes of a row; all [T], detached."""

    weights: Tensor
    """The log-probs' dtype, >= 0; anything finite outside the mask."""

    is_truncated: Tensor
    """bool; the weight was cut to the threshold."""

    is_masked: Tensor
    """bool; the weight is 0 because the token or its trajectory is dropped."""


def truncated(
    inputs: CorrectionInputs, *, level: Level = "token", threshold: float = 2.0
) -> Correction:
    """Weight min(rho, threshold): large ratios are cut, not dropped.

    Args:
        inputs: one packed row.
        level: "token": rho of the token. "sequence": the product over the trajectory, the same for
            all its tokens; the sum of logs is used, not the mean, and clamped to +-20 nats.
        threshold: largest weight, > 0; inf leaves it uncapped.

    Returns:
        The correction.

    Raises:
        ValueError: if the threshold is not > 0 or the level is unknown.

    Source:
        Truncated importance sampling (Liu, Yao et al. 2025), 2; RollVerify Section 5.1 has the same
        value at token level. TRL's default is a sequence mask at 3 instead.
    """
    if not threshold > 0.0:
        raise ValueError(f"threshold must be > 0, got {threshold}")
    ratio_T = _ratio(inputs, level)
    return Correction(
        weights=ratio_T.clamp(max=threshold),
        is_truncated=ratio_T > threshold,
        is_masked=torch.zeros_like(inputs.loss_mask),
    )


def masked(
    inputs: CorrectionInputs, *, level: Level = "token", low: float = 0.5, high: float = 2.0
) -> Correction:
    """Weight rho inside [low, high], 0 outside: rejection instead of truncation.

    Args:
        inputs: one packed row.
        level: "token" or "sequence" (the product), as in `truncated`.
        low: smallest ratio that is kept, >= 0.
        high: largest ratio that is kept, >= low; may be inf.

    Returns:
        The correction.

    Raises:
        ValueError: if the band is empty or the level is unknown.

    Source:
        Masked importance sampling (Liu, Li et al. 2025). Bands differ: slime [1/u, u], TRL [0, 3]
        with 0.5 and 2 in its example, which are our defaults. The number of tokens that the loss is
        divided by stays (slime, TRL); verl's rejection shrinks it, which is not offered here.
    """
    _check_band(low, high)
    return _banded(_ratio(inputs, level), low, high)


def icepop(inputs: CorrectionInputs, *, low: float = 0.5, high: float = 5.0) -> Correction:
    """IcePop: weight rho of the token inside [low, high], 0 outside.

    Args:
        inputs: one packed row.
        low: smallest ratio that is kept, >= 0.
        high: largest ratio that is kept, >= low; may be inf.

    Returns:
        The correction.

    Raises:
        ValueError: if the band is empty.

    Source:
        IcePop (Ring-1T, arXiv 2510.18855), 0.5 and 5; some code bases take 0.5 and 2.
    """
    _check_band(low, high)
    return _banded(_ratio(inputs, "token"), low, high)


def geometric_mask(
    inputs: CorrectionInputs, *, low: float = 0.99, high: float = 1.01
) -> Correction:
    """Keep trajectories whose geometric mean of rho is inside [low, high], with weight 1.

    Args:
        inputs: one packed row.
        low: smallest exp(mean log rho) that is kept, >= 0.
        high: largest one that is kept, >= low; may be inf.

    Returns:
        The correction.

    Raises:
        ValueError: if the band is empty.

    Source:
        Geometric rejection sampling of verl's DAPO script, 0.99 and 1.01.
    """
    _check_band(low, high)
    difference_T = _difference(inputs)
    means_S, index_T = sequence_means(
        difference_T, inputs.loss_mask, inputs.sequence_ids, inputs.num_sequences
    )
    ratio_T = means_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[index_T]
    return _kept(inputs, (ratio_T >= low) & (ratio_T <= high))


def mask_stale(inputs: CorrectionInputs, *, max_age: int = 1) -> Correction:
    """Drop tokens that are older than `max_age` steps; the others have weight 1.

    Args:
        inputs: one packed row.
        max_age: oldest tokens that are trained on, steps, >= 0.

    Returns:
        The correction.

    Raises:
        ValueError: if max_age is negative.

    Source:
        Partial rollouts that train on the newest segment only (Kimi k1.5 Section 2.6.2 leaves it
        open; slime masks everything before the resume, max_age 0).
    """
    if max_age < 0:
        raise ValueError(f"max_age must be >= 0 steps, got {max_age}")
    return _kept(inputs, inputs.ages <= max_age)


def opsm(inputs: CorrectionInputs, *, delta: float = 1e-4) -> Correction:
    """Drop trajectories with A < 0 that the policy has already turned away from.

    A trajectory is dropped where the mean of log behavior - log policy is above delta; the others
    have weight 1.

    Args:
        inputs: one packed row.
        delta: nats, >= 0.

    Returns:
        The correction.

    Raises:
        ValueError: if delta is negative.

    Source:
        Off-policy sequence masking of DeepSeek-V3.2; 1e-4 as in slime, other code bases take 0.1.
    """
    if not delta >= 0.0:
        raise ValueError(f"delta must be >= 0, got {delta}")
    behavior_T, policy_T = inputs.behavior_logprobs.detach(), inputs.policy_logprobs.detach()
    means_S, index_T = sequence_means(
        log_difference(behavior_T, policy_T, inputs.loss_mask),
        inputs.loss_mask,
        inputs.sequence_ids,
        inputs.num_sequences,
    )
    return _kept(inputs, ~((inputs.advantages < 0) & (means_S[index_T] > delta)))


CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "truncated": truncated,
    "masked": masked,
    "icepop": icepop,
    "geometric_mask": geometric_mask,
    "mask_stale": mask_stale,
    "opsm": opsm,
}
"""Correction by the name it has in `correction.name`; "none" is the absence of one."""


def _difference(inputs: CorrectionInputs) -> Tensor:
    numerator_T, behavior_T = inputs.numerator_logprobs, inputs.behavior_logprobs
    return log_difference(numerator_T.detach(), behavior_T.detach(), inputs.loss_mask)


def _ratio(inputs: CorrectionInputs, level: Level) -> Tensor:
    """[T] in [e-20, e20]; 1 outside the mask at token level."""
    log_ratio_T = _difference(inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level == "token":
        return log_ratio_T.exp()
    if level != "sequence":
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")
    sums_S, index_T = sequence_sums(
        log_ratio_T, inputs.loss_mask, inputs.sequence_ids, inputs.num_sequences
    )
    return sums_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[index_T]


def _banded(ratio_T: Tensor, low: float, high: float) -> Correction:
    is_masked_T = (ratio_T < low) | (ratio_T > high)
    return Correction(
        weights=torch.where(is_masked_T, 0.0, ratio_T),
        is_truncated=torch.zeros_like(is_masked_T),
        is_masked=is_masked_T,
    )


def _kept(inputs: CorrectionInputs, is_kept_T: Tensor) -> Correction:
    return Correction(
        weights=is_kept_T.to(inputs.behavior_logprobs.dtype),
        is_truncated=torch.zeros_like(is_kept_T),
        is_masked=~is_kept_T,
    )


def _check_band(low: float, high: float) -> None:
    if not 0.0 <= low <= high:
        raise ValueError(f"the band must be 0 <= low <= high, got [{low}, {high}]")
