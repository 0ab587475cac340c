"""What one packed row adds to the batch loss: policy loss, correction, KL and entropy terms.

Takes no step. Values that need more than the row (the trainer's scores before the step, the
reference's, a limit of the whole minibatch) come in from `policy_update.py`.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rollverify.config.losses import CorrectionConfig, CustomLoss, Grpo, LossConfig, M2po, Truncated
from rollverify.config.tables import KlConfig
from rollverify.losses import TAKES_WEIGHTS, WITHOUT_RATIO, loss_function
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
from rollverify.losses.inputs import Diagnostics, LossInputs, check_finite, log_ratio
from rollverify.losses.weighted import second_moment_limit
from rollverify.training.packing import TrajectoryRow


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
    """Of `m2po`."""

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
        self,
        row: TrajectoryRow,
        policy_logprobs: Tensor,
        entropy: Tensor,
        normalizer: Normalizer,
        given: RowGiven,
    ) -> RowLoss:
        """Loss of one row, on the device of the log-probs.

        `policy_logprobs` is [T] float32 nats, with gradient; `entropy` the same, with gradient
        where the entropy term is on.

        Raises:
            ValueError: if a log-prob of a trained token is not finite.
        """
        inputs = self._inputs(row, policy_logprobs, given)
        mask = inputs.loss_mask
        correction = self._correction(inputs)
        token_loss, flags = self._corrected(inputs, correction)
        values = step_diagnostics(inputs, correction) | flags
        at_sampling = _at_sampling(row, inputs.anchor_logprobs)
        is_known = mask & _has_anchor(row, given.policy_version).to(mask.device)
        values |= engine_mismatch(at_sampling, inputs.behavior_logprobs, is_known)
        if self.kl.coefficient > 0.0:
            penalty = self._kl(inputs, given)
            token_loss = token_loss + self.kl.coefficient * penalty
            values["kl_reference"] = penalty
        if self.loss.entropy_coefficient != 0.0:
            inside = torch.where(mask, entropy, 0.0)
            token_loss = token_loss - self.loss.entropy_coefficient * inside
        counted = mask if given.counted is None else given.counted.to(mask.device)
        weights = normalizer.token_weights(counted, inputs.sequence_ids)
        sums = {name: value.detach().sum() for name, value in values.items()}
        sums["entropy"] = entropy.detach()[mask].sum()
        sums["num_mismatch"] = is_known.sum()
        rho = log_ratio(inputs.numerator_logprobs, inputs.behavior_logprobs, mask).exp()
        return RowLoss(
            loss=(token_loss * weights).sum(),
            sums=sums | _histograms(values["ratio"], rho, mask),
            mismatch_abs_max=values["mismatch_abs"].max(),
        )

    def squares(self, row: TrajectoryRow, policy_logprobs: Tensor, given: RowGiven) -> Tensor:
        """What `limit_of` takes: [N] nats^2, one per token in the mask.

        `policy_logprobs` are of the policy about to be updated, without gradient.
        """
        inputs = self._inputs(row, policy_logprobs, given)
        mask = inputs.loss_mask
        return log_ratio(policy_logprobs, inputs.denominator_logprobs, mask)[mask].square()

    @torch.no_grad()
    def kept(self, row: TrajectoryRow, policy_logprobs: Tensor, given: RowGiven) -> Tensor:
        """Tokens that neither the correction nor the loss drops, [T] bool; False outside the mask.

        `policy_logprobs` are of the policy about to be updated.
        """
        inputs = self._inputs(row, policy_logprobs, given)
        _, flags = self._corrected(inputs, self._correction(inputs))
        return inputs.loss_mask & (flags["is_masked"] == 0)

    def _correction(self, inputs: LossInputs) -> Correction:
        return CORRECTION_FUNCTIONS[self.correction.name](inputs, self.correction)

    def _corrected(self, inputs: LossInputs, correction: Correction) -> tuple[Tensor, Diagnostics]:
        """Token loss with the correction's weights; `is_masked` covers what either drops."""
        is_applied, takes_weights = self.correction.name != "none", self.loss.name in TAKES_WEIGHTS
        if is_applied and takes_weights:
            inputs = replace(inputs, correction_weights=correction.weights)
        token_loss, flags = loss_function(self.loss)(inputs, self.loss)
        if not is_applied:
            return token_loss, flags
        dropped = (correction.is_masked & inputs.loss_mask).to(flags["is_masked"].dtype)
        flags = flags | {"is_masked": torch.maximum(flags["is_masked"], dropped)}
        if not takes_weights:
            token_loss = correction.weights * token_loss
        return token_loss, flags

    def _inputs(self, row: TrajectoryRow, policy_logprobs: Tensor, given: RowGiven) -> LossInputs:
        device = policy_logprobs.device
        mask, behavior = row.loss_mask.to(device), row.behavior_logprobs.to(device)
        anchor = policy_logprobs.detach()
        if given.anchor_logprobs is not None:
            anchor = given.anchor_logprobs.to(device)
        denominator = {
            "anchor_now": lambda: anchor,
            "anchor_at_sampling": lambda: _at_sampling(row, anchor),
            "behavior": lambda: behavior,
        }[self.loss.denominator]()
        check_finite(
            mask,
            policy_logprobs=policy_logprobs,
            denominator_logprobs=denominator,
            behavior_logprobs=behavior,
        )
        numerator = anchor if self.loss.denominator == "behavior" else denominator
        if self.loss.name in WITHOUT_RATIO:
            numerator = policy_logprobs.detach()
        return LossInputs(
            policy_logprobs=policy_logprobs,
            denominator_logprobs=denominator,
            behavior_logprobs=behavior,
            anchor_logprobs=anchor,
            numerator_logprobs=numerator,
            advantages=row.advantages.to(device),
            ages=given.policy_version - row.policy_version.to(device),
            loss_mask=mask,
            sequence_ids=row.sequence_ids.to(device),
            num_sequences=given.num_sequences,
            limit=given.limit,
        )

    def _kl(self, inputs: LossInputs, given: RowGiven) -> Tensor:
        assert given.reference_logprobs is not None
        reference = given.reference_logprobs.to(inputs.policy_logprobs.device)
        return kl_penalty(inputs.policy_logprobs, reference, inputs.loss_mask, self.kl.estimator)


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
