"""One optimizer step of GRPO on the finished trajectories of an iteration.

Groups arrive whole on one rank, so advantages need no communication; loss denominators are global.
With one optimizer step per batch the loss's anchor is the policy's own, taken inside the step; the
trajectories' `anchor_logprobs` only tell staleness and engine mismatch apart in the metrics.
Knows nothing of rollouts or weight transfer.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.algorithms.advantages import StdKind, group_advantages
from rollverify.algorithms.aggregation import (
    AggregationMode,
    Normalizer,
    count_batch,
    reduce_counts,
)
from rollverify.algorithms.policy_loss import engine_mismatch, grpo_token_loss
from rollverify.metrics.reduction import reduce_metrics
from rollverify.rollout.schema import stacked
from rollverify.training.packing import (
    TrajectoryRow,
    equalize_rows,
    pack_trajectories,
    response_values,
)
from rollverify.training.trained_metrics import trained_metrics


class Trainer(Protocol):
    """What an optimizer step needs of the policy trainer."""

    device: torch.device

    def forward_backward(
        self,
        rows: Sequence[TrajectoryRow],
        token_loss: Callable[[int, Tensor, Tensor], Tensor],
        *,
        temperature: float,
    ) -> Tensor:
        """Accumulate gradients; returns the summed loss."""
        ...

    def optimizer_step(self) -> tuple[float, float]:
        """Returns (gradient norm, learning rate)."""
        ...


class PolicyUpdate:
    """Turns finished trajectories into one optimizer step and its metrics."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        micro_batch_tokens: int,
        temperature: float,
        clip_low: float,
        clip_high: float,
        truncation_threshold: float | None,
        aggregation: AggregationMode,
        constant_length: int,
        advantage_std: StdKind,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up; nothing is computed yet.

        Args:
            trainer: owns the sharded policy.
            micro_batch_tokens: tokens of one packed row.
            temperature: of sampling; log-probs are taken under it.
            clip_low: lower clip distance.
            clip_high: upper clip distance.
            truncation_threshold: largest importance weight; None turns the correction off.
            aggregation: how token losses become one number.
            constant_length: divisor of "constant_length", tokens.
            advantage_std: divisor of the advantages.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._trainer = trainer
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._clip_low = clip_low
        self._clip_high = clip_high
        self._truncation_threshold = truncation_threshold
        self._aggregation: AggregationMode = aggregation
        self._constant_length = constant_length
        self._advantage_std: StdKind = advantage_std
        self._data_group = data_group

    def train_step(self, finished: list[TensorDict], policy_version: int) -> dict[str, float]:
        """Take one optimizer step.

        Args:
            finished: this rank's trajectories, groups whole.
            policy_version: version before the step, at least that of every token.

        Returns:
            Metrics of `train/`, `mismatch/`, `correction/`, `ops/trained_*` and `staleness/`, the
            same on every rank.

        Raises:
            ValueError: if a log-prob of a trained token is not finite.
            FloatingPointError: if the gradient norm is not finite.

        Source:
            RollVerify Section 4.1; collective: yes, over the world.
        """
        rows, normalizer = self._prepare(finished)
        sums, maxima = _empty_sums(), {"mismatch_abs_max": 0.0}
        policy_logprobs: dict[int, Tensor] = {}

        def token_loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            policy_logprobs[index] = logprobs.detach()
            return self._row_loss(rows[index], normalizer, logprobs, entropy, sums, maxima)

        loss = self._trainer.forward_backward(rows, token_loss, temperature=self._temperature)
        grad_norm, learning_rate = self._trainer.optimizer_step()
        sums["loss"] = loss.item()
        sums, maxima = self._reduce(sums, maxima)
        metrics = _metrics(sums, maxima, max(1, normalizer.counts.num_tokens))
        metrics["train/grad_norm"] = grad_norm
        metrics["train/lr"] = learning_rate
        metrics["train/num_tokens"] = normalizer.counts.num_tokens
        metrics["train/num_micro_batches"] = len(rows)
        values = [policy_logprobs[index] for index in range(len(rows))]
        own = response_values(rows, values, finished).float().cpu()
        return metrics | trained_metrics(finished, own, policy_version, self._data_group)

    def _prepare(self, finished: list[TensorDict]) -> tuple[list[TrajectoryRow], Normalizer]:
        advantages = torch.zeros(0)
        if finished:
            advantages = group_advantages(
                stacked(finished, "reward"), stacked(finished, "group_id"), self._advantage_std
            )
        rows = pack_trajectories(finished, advantages, self._micro_batch_tokens)
        loss_tokens = torch.tensor([int(t["loss_mask"].sum()) for t in finished], dtype=torch.int64)
        counts = count_batch(loss_tokens)
        if self._data_group is not None:
            device = self._trainer.device.type
            rows = equalize_rows(rows, self._data_group, device)
            counts = reduce_counts(counts, self._data_group, device)
        normalizer = Normalizer(
            mode=self._aggregation, counts=counts, constant_length=self._constant_length
        )
        return rows, normalizer

    def _row_loss(
        self,
        row: TrajectoryRow,
        normalizer: Normalizer,
        logprobs: Tensor,
        entropy: Tensor,
        sums: dict[str, float],
        maxima: dict[str, float],
    ) -> Tensor:
        """Scalar loss of one row; adds the row's diagnostics to the sums."""
        device = logprobs.device
        mask, behavior = row.loss_mask.to(device), row.behavior_logprobs.to(device)
        token_loss, diagnostics = grpo_token_loss(
            logprobs,
            logprobs.detach(),
            behavior,
            row.advantages.to(device),
            mask,
            clip_low=self._clip_low,
            clip_high=self._clip_high,
            truncation_threshold=self._truncation_threshold,
        )
        anchor = row.anchor_logprobs.to(device)
        own = torch.where(anchor.isnan(), logprobs.detach(), anchor)
        diagnostics |= engine_mismatch(own, behavior, mask)
        for name, values in diagnostics.items():
            sums[name] += values.sum().item()
        sums["entropy"] += entropy.detach()[mask].sum().item()
        if row.loss_mask.any():
            largest = diagnostics["mismatch_abs"].max().item()
            maxima["mismatch_abs_max"] = max(maxima["mismatch_abs_max"], largest)
        weights = normalizer.token_weights(mask, row.sequence_ids.to(device))
        return (token_loss * weights).sum()

    def _reduce(
        self, sums: dict[str, float], maxima: dict[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        if self._data_group is None:
            return sums, maxima
        return reduce_metrics(sums, maxima, self._data_group)


_METRIC_OF_SUM = {
    "ratio": "train/ratio_mean",
    "kl": "train/kl_estimate",
    "is_clipped_low": "train/clip_low_frac",
    "is_clipped_high": "train/clip_high_frac",
    "correction_weight": "correction/weight_mean",
    "is_truncated": "correction/truncated_frac",
    "mismatch_abs": "mismatch/logprob_abs_mean",
    "mismatch_k3": "mismatch/k3_nats",
    "entropy": "train/entropy_nats",
}


def _empty_sums() -> dict[str, float]:
    return dict.fromkeys([*_METRIC_OF_SUM, "loss"], 0.0)


def _metrics(sums: dict[str, float], maxima: dict[str, float], num_tokens: int) -> dict[str, float]:
    metrics = {key: sums[name] / num_tokens for name, key in _METRIC_OF_SUM.items()}
    metrics["train/loss"] = sums["loss"]
    metrics["mismatch/logprob_abs_max"] = maxima["mismatch_abs_max"]
    return metrics
