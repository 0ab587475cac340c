"""What one packed row adds to the batch loss: policy loss, correction, KL and entropy terms.

Takes no step and reads no config. Values that need more than the row (the trainer's scores before
the step, the reference's, a limit of the whole minibatch) come in from `policy_update.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rollverify.losses import LOSSES, NEEDS_LIMIT, TAKES_WEIGHTS, WITHOUT_RATIO, LossInputs
from rollverify.losses.aggregation import Normalizer
from rollverify.losses.corrections import CORRECTIONS, Correction, CorrectionInputs
from rollverify.losses.diagnostics import (
    RATIO_BUCKETS,
    KlEstimator,
    engine_mismatch,
    kl_penalty,
    ratio_histogram,
    step_diagnostics,
)
from rollverify.losses.inputs import Diagnostics, check_finite, log_ratio
from rollverify.losses.weighted import M2_THRESHOLD
from rollverify.training.packing import TrajectoryRow

Denominator = Literal["anchor_now", "anchor_at_sampling", "behavior"]
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGiven:
    """What a row's loss takes besides the row itself."""

    num_sequences: int
    """Trajectories that the row's sequence ids count."""

    policy_version: int
    """Version before the iteration's first step."""

    anchor_logprobs: Tensor | None = None
    """[T] float32 nats; trainer under that version. None: the policy's own, at the first step."""

    reference_logprobs: Tensor | None = None
    """[T] float32 nats; the reference model's. None where there is no KL term."""

    limit: float | None = None
    """Of the losses in `NEEDS_LIMIT`."""

    counted: Tensor | None = None
    """[T] bool; tokens that are averaged over. None: all of the loss mask, dropped ones too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLoss:
    """Loss of one row and what the metrics are made of."""

    loss: Tensor
    """Scalar, with gradient; the row's share of the batch loss."""

    sums: dict[str, Tensor]
    """Scalars, detached; to be added up over rows and ranks."""

    mismatch_abs_max: Tensor
    """Scalar; largest |anchor - behavior| inside the mask, nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The loss with its settings; the defaults are GRPO with truncated importance sampling."""

    loss_name: str = "grpo"
    """A key of `LOSSES`."""

    loss_settings: Settings = field(default_factory=dict[str, Any])
    """Keyword settings of the loss; its own defaults where they are left out."""

    denominator: Denominator = "anchor_now"
    """What the ratio divides by. anchor_now: the trainer before the iteration. anchor_at_sampling:
    the trainer under the version that sampled the token. behavior: the engine."""

    correction_name: str = "truncated"
    """A key of `CORRECTIONS`, or "none": then "truncated" is measured and not applied."""

    correction_settings: Settings = field(default_factory=dict[str, Any])
    """Keyword settings of the correction."""

    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        if self.loss_name not in LOSSES:
            raise ValueError(f"loss {self.loss_name!r} is not one of {sorted(LOSSES)}")
        if self.correction_name not in {*CORRECTIONS, "none"}:
            raise ValueError(
                f"correction {self.correction_name!r} is not 'none' or one of {sorted(CORRECTIONS)}"
            )

    @property
    def needs_limit(self) -> bool:
        """Whether the loss takes a limit from the whole minibatch."""
        return self.loss_name in NEEDS_LIMIT

    @property
    def second_moment_threshold(self) -> float:
        """Bound that the limit keeps, nats^2."""
        return float(self.loss_settings.get("threshold", M2_THRESHOLD))

    def row_loss(
        self,
        row: TrajectoryRow,
        policy_logprobs: Tensor,
        entropy: Tensor,
        normalizer: Normalizer,
        given: RowGiven,
    ) -> RowLoss:
        """Loss of one row.

        Args:
            row: on any device; brought to that of the log-probs.
            policy_logprobs: [T] float32 nats; with gradient.
            entropy: [T] float32 nats; with gradient where the entropy term is on.
            normalizer: turns token losses into shares of the batch loss.
            given: what comes from outside the row.

        Returns:
            The loss and its diagnostics.

        Raises:
            ValueError: if a log-prob of a trained token is not finite.
        """
        mask = row.loss_mask.to(policy_logprobs.device)
        inputs = self._inputs(row, policy_logprobs, mask, given)
        correction = self._correction(row, inputs, given)
        token_loss, flags = self._corrected(inputs, correction, given)
        values = step_diagnostics(inputs, correction) | flags
        at_sampling = _at_sampling(row, inputs.anchor_logprobs)
        is_known = mask & _has_anchor(row, given.policy_version).to(mask.device)
        values |= engine_mismatch(at_sampling, inputs.behavior_logprobs, is_known)
        if self.kl_coefficient > 0.0:
            penalty = self._kl(inputs, given)
            token_loss = token_loss + self.kl_coefficient * penalty
            values["kl_reference"] = penalty
        if self.entropy_coefficient != 0.0:
            token_loss = token_loss - self.entropy_coefficient * torch.where(mask, entropy, 0.0)
        counted = mask if given.counted is None else given.counted.to(mask.device)
        weights = normalizer.token_weights(counted, inputs.sequence_ids)
        sums = {name: one.detach().sum() for name, one in values.items()}
        sums["entropy"] = entropy.detach()[mask].sum()
        sums["num_mismatch"] = is_known.sum()
        return RowLoss(
            loss=(token_loss * weights).sum(),
            sums=sums | _histograms(values["ratio"], self._rho(inputs), mask),
            mismatch_abs_max=values["mismatch_abs"].max(),
        )

    def squares(self, row: TrajectoryRow, policy_logprobs: Tensor, given: RowGiven) -> Tensor:
        """What `second_moment_limit` is taken of, before a step.

        Args:
            row: one row.
            policy_logprobs: [T] float32 nats; of the policy about to be updated, without gradient.
            given: as for `row_loss`.

        Returns:
            [N] nats^2; one per token in the mask.
        """
        mask = row.loss_mask.to(policy_logprobs.device)
        inputs = self._inputs(row, policy_logprobs, mask, given)
        return log_ratio(policy_logprobs, inputs.denominator_logprobs, mask)[mask].square()

    @torch.no_grad()
    def kept(self, row: TrajectoryRow, policy_logprobs: Tensor, given: RowGiven) -> Tensor:
        """Tokens that neither the correction nor the loss drops.

        Args:
            row: one row.
            policy_logprobs: [T] float32 nats; of the policy about to be updated.
            given: as for `row_loss`.

        Returns:
            [T] bool; False outside the loss mask.
        """
        mask = row.loss_mask.to(policy_logprobs.device)
        inputs = self._inputs(row, policy_logprobs, mask, given)
        _, flags = self._corrected(inputs, self._correction(row, inputs, given), given)
        return mask & (flags["is_masked"] == 0)

    def _corrected(
        self, inputs: LossInputs, correction: Correction, given: RowGiven
    ) -> tuple[Tensor, Diagnostics]:
        """Token loss with the correction's weights; `is_masked` covers what either drops."""
        is_applied = self.correction_name != "none"
        if is_applied and self.loss_name in TAKES_WEIGHTS:
            inputs = replace(inputs, correction_weights=correction.weights)
        token_loss, flags = self._token_loss(inputs, given)
        if not is_applied:
            return token_loss, flags
        dropped = (correction.is_masked & inputs.loss_mask).to(flags["is_masked"].dtype)
        flags = flags | {"is_masked": torch.maximum(flags["is_masked"], dropped)}
        if self.loss_name not in TAKES_WEIGHTS:
            token_loss = correction.weights * token_loss
        return token_loss, flags

    def _inputs(
        self, row: TrajectoryRow, policy_logprobs: Tensor, mask: Tensor, given: RowGiven
    ) -> LossInputs:
        device = policy_logprobs.device
        behavior = row.behavior_logprobs.to(device)
        anchor = policy_logprobs.detach()
        if given.anchor_logprobs is not None:
            anchor = given.anchor_logprobs.to(device)
        denominator = {
            "anchor_now": lambda: anchor,
            "anchor_at_sampling": lambda: _at_sampling(row, anchor),
            "behavior": lambda: behavior,
        }[self.denominator]()
        check_finite(
            mask,
            policy_logprobs=policy_logprobs,
            denominator_logprobs=denominator,
            behavior_logprobs=behavior,
        )
        return LossInputs(
            policy_logprobs=policy_logprobs,
            denominator_logprobs=denominator,
            behavior_logprobs=behavior,
            anchor_logprobs=anchor,
            advantages=row.advantages.to(device),
            loss_mask=mask,
            sequence_ids=row.sequence_ids.to(device),
            num_sequences=given.num_sequences,
        )

    def _numerator(self, inputs: LossInputs) -> Tensor:
        """What the correction compares with behavior: where the loss's own ratio begins."""
        if self.loss_name in WITHOUT_RATIO:
            return inputs.policy_logprobs.detach()
        if self.denominator == "behavior":
            return inputs.anchor_logprobs
        return inputs.denominator_logprobs

    def _rho(self, inputs: LossInputs) -> Tensor:
        return log_ratio(self._numerator(inputs), inputs.behavior_logprobs, inputs.loss_mask).exp()

    def _correction(self, row: TrajectoryRow, inputs: LossInputs, given: RowGiven) -> Correction:
        """The configured one; without one "truncated", which is then only measured."""
        name = "truncated" if self.correction_name == "none" else self.correction_name
        row_inputs = CorrectionInputs(
            numerator_logprobs=self._numerator(inputs),
            behavior_logprobs=inputs.behavior_logprobs,
            policy_logprobs=inputs.policy_logprobs.detach(),
            advantages=inputs.advantages,
            ages=given.policy_version - row.policy_version.to(inputs.loss_mask.device),
            loss_mask=inputs.loss_mask,
            sequence_ids=inputs.sequence_ids,
            num_sequences=inputs.num_sequences,
        )
        return CORRECTIONS[name](row_inputs, **self.correction_settings)

    def _token_loss(self, inputs: LossInputs, given: RowGiven) -> tuple[Tensor, Diagnostics]:
        settings = dict(self.loss_settings)
        if self.needs_limit:
            settings["limit"] = given.limit
        return LOSSES[self.loss_name](inputs, **settings)

    def _kl(self, inputs: LossInputs, given: RowGiven) -> Tensor:
        if given.reference_logprobs is None:
            raise ValueError("the KL term needs the reference's log-probs")
        reference = given.reference_logprobs.to(inputs.policy_logprobs.device)
        return kl_penalty(inputs.policy_logprobs, reference, inputs.loss_mask, self.kl_estimator)


def _at_sampling(row: TrajectoryRow, anchor_now: Tensor) -> Tensor:
    """[T]; the trainer under the version that sampled the token: a fresh token has no other yet."""
    anchor = row.anchor_logprobs.to(anchor_now.device)
    return torch.where(anchor.isnan(), anchor_now, anchor)


def _has_anchor(row: TrajectoryRow, policy_version: int) -> Tensor:
    """[T] bool; False on older tokens that were never scored under their own version."""
    return ~row.anchor_logprobs.isnan() | (row.policy_version == policy_version)


def _histograms(ratio: Tensor, rho: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Counts per bucket of the step's ratio and of the correction's."""
    found: dict[str, Tensor] = {}
    for name, values in (("ratio", ratio), ("rho", rho)):
        counts = ratio_histogram(values, mask)
        found |= {f"{name}_{b}": c for b, c in zip(RATIO_BUCKETS, counts.unbind(), strict=True)}
    return found
