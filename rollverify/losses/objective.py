"""What one packed row of T tokens adds to the batch loss: policy loss, correction, KL, entropy."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from rollverify.config.function import load_function
from rollverify.config.losses import CorrectionConfig, CustomLoss, Grpo, LossConfig, M2po, Truncated
from rollverify.config.tables import KlConfig
from rollverify.losses.aggregation import Normalizer
from rollverify.losses.corrections import CORRECTION_FUNCTIONS, Correction
from rollverify.losses.custom import check_custom_loss
from rollverify.losses.diagnostics import (
    RATIO_BUCKETS,
    engine_mismatch,
    kl_penalty,
    ratio_histogram,
    step_diagnostics,
)
from rollverify.losses.inputs import (
    LOG_RATIO_LIMIT,
    Diagnostics,
    LossInputs,
    RowInputs,
    check_finite,
    log_difference,
    policy_log_ratio,
)
from rollverify.losses.weighted import second_moment_limit


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLoss:
    """Loss of one row and what the metrics are made of."""

    loss: Tensor  # scalar, with gradient; the row's share of the batch loss
    sums: dict[str, Tensor]  # scalars, detached; to be added up over rows and ranks
    mismatch_abs_max: Tensor  # scalar, nats; largest |anchor - behavior| inside the mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The loss with its correction and extra terms, from their tables of the config."""

    loss: LossConfig = field(default_factory=Grpo)
    correction: CorrectionConfig = field(default_factory=Truncated)
    kl: KlConfig = field(default_factory=KlConfig)

    def __post_init__(self) -> None:
        """Import a loss of one's own, so that it is refused before the first step."""
        if isinstance(self.loss, CustomLoss):
            check_custom_loss(self.loss)

    @property
    def needs_limit(self) -> bool:
        """Whether the loss takes a limit from the whole minibatch, which costs a scoring pass."""
        return isinstance(self.loss, M2po)

    def limit_of(self, squares: Tensor) -> float:
        """The limit of the minibatch that `squares`, [N] nats^2, are of."""
        assert isinstance(self.loss, M2po)
        return second_moment_limit(squares, self.loss.threshold)

    def row_loss(
        self, row: RowInputs, policy_logprobs: Tensor, entropy: Tensor, normalizer: Normalizer
    ) -> RowLoss:
        """Loss of one row from [T] nats; ValueError if a trained token's is not finite."""
        inputs = self._inputs(row, policy_logprobs)
        mask = inputs.loss_mask
        correction = self._correction(inputs)
        token_loss, flags = self._corrected(inputs, correction)
        values = step_diagnostics(inputs, correction) | flags
        at_sampling = _at_sampling(inputs, inputs.anchor_logprobs)
        # An older token that was never scored under its own version has no anchor to compare with.
        is_known = mask & (~inputs.sampling_anchor_logprobs.isnan() | (inputs.ages == 0))
        values |= engine_mismatch(at_sampling, inputs.behavior_logprobs, is_known)
        if self.kl.coefficient > 0.0:
            assert inputs.reference_logprobs is not None
            penalty = kl_penalty(
                policy_logprobs, inputs.reference_logprobs, mask, self.kl.estimator
            )
            token_loss = token_loss + self.kl.coefficient * penalty
            values["kl_reference"] = penalty
        if self.loss.entropy_coefficient != 0.0:
            inside = torch.where(mask, entropy, 0.0)
            token_loss = token_loss - self.loss.entropy_coefficient * inside
        counted = mask if inputs.counted is None else inputs.counted
        weights = normalizer.token_weights(counted, inputs.sequence_ids)
        sums = {name: value.detach().sum() for name, value in values.items()}
        sums["entropy"] = entropy.detach()[mask].sum()
        sums["num_mismatch"] = is_known.sum()
        rho = inputs.log_rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        for name, ratio in (("ratio", values["ratio"]), ("rho", rho)):
            counts = ratio_histogram(ratio, mask).unbind()
            sums |= {f"{name}_{b}": count for b, count in zip(RATIO_BUCKETS, counts, strict=True)}
        return RowLoss(
            loss=(token_loss * weights).sum(),
            sums=sums,
            mismatch_abs_max=values["mismatch_abs"].max(),
        )

    def squares(self, row: RowInputs, policy_logprobs: Tensor) -> Tensor:
        """What `limit_of` takes: [N] nats^2 of the tokens in the mask; log-probs are [T]."""
        inputs = self._inputs(row, policy_logprobs)
        return policy_log_ratio(inputs)[inputs.loss_mask].square()

    @torch.no_grad()
    def kept(self, row: RowInputs, policy_logprobs: Tensor) -> Tensor:
        """Tokens in the mask that neither correction nor loss drops, [T] bool."""
        inputs = self._inputs(row, policy_logprobs)
        _, flags = self._corrected(inputs, self._correction(inputs))
        return inputs.loss_mask & (flags["is_masked"] == 0)

    def _correction(self, inputs: LossInputs) -> Correction:
        return CORRECTION_FUNCTIONS[self.correction.name](inputs, self.correction)

    def _corrected(self, inputs: LossInputs, correction: Correction) -> tuple[Tensor, Diagnostics]:
        """Token loss with the correction's weights; `is_masked` covers what either drops."""
        is_applied = self.correction.name != "none"
        if is_applied and self.loss.takes_weights:
            inputs = replace(inputs, correction_weights=correction.weights)
        function = load_function("loss.name", f"rollverify.losses.{self.loss.function}")
        token_loss, flags = function(inputs, self.loss)
        if not is_applied:
            return token_loss, flags
        dropped = (correction.is_masked & inputs.loss_mask).to(flags["is_masked"].dtype)
        flags = flags | {"is_masked": torch.maximum(flags["is_masked"], dropped)}
        if not self.loss.takes_weights:
            token_loss = correction.weights * token_loss
        return token_loss, flags

    def _inputs(self, row: RowInputs, policy_logprobs: Tensor) -> LossInputs:
        """The row, completed, on the device of the policy's log-probs."""
        row = row.to(policy_logprobs.device)
        anchor, behavior, mask = row.anchor_logprobs, row.behavior_logprobs, row.loss_mask
        if anchor is None:
            anchor = policy_logprobs.detach()
        denominator, start = anchor, anchor
        if self.loss.denominator == "behavior":
            denominator = behavior
        elif self.loss.denominator == "anchor_at_sampling":
            denominator = start = _at_sampling(row, anchor)
        if not self.loss.has_ratio:
            start = policy_logprobs.detach()
        check_finite(
            mask,
            policy_logprobs=policy_logprobs,
            denominator_logprobs=denominator,
            behavior_logprobs=behavior,
        )
        given: dict[str, Any] = {part.name: getattr(row, part.name) for part in fields(row)}
        given["anchor_logprobs"] = anchor
        return LossInputs(
            **given,
            policy_logprobs=policy_logprobs,
            denominator_logprobs=denominator,
            log_rho=log_difference(start, behavior, mask),
        )


def _at_sampling(row: RowInputs, anchor: Tensor) -> Tensor:
    """[T]; the trainer under the version that sampled the token: a fresh token has no other yet."""
    own_T = row.sampling_anchor_logprobs
    return torch.where(own_T.isnan(), anchor, own_T)
