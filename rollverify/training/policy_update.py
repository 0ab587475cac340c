"""The optimizer steps of an iteration on its finished trajectories.

Groups arrive whole on one rank, so advantages need no communication; loss denominators are global.
With one optimizer step the anchor is the policy's own; with several, all trajectories are scored
before the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.config.tables import TrainingConfig
from rollverify.engine.model_folder import RoutingShape
from rollverify.losses.advantages import CreditRule
from rollverify.losses.aggregation import BatchCounts, Normalizer, count_batch
from rollverify.losses.objective import Objective
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import stacked
from rollverify.rollout.twins import Twins
from rollverify.training.packing import (
    ReplayMode,
    TrajectoryRow,
    equalize_rows,
    pack_trajectories,
    response_values,
)
from rollverify.training.step_metrics import StepSums

if TYPE_CHECKING:
    from torchtitan_ext.policy_trainer import PolicyTrainer
    from torchtitan_ext.reference_policy import ReferencePolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """What one optimizer step is taken on, on this rank."""

    members: list[TensorDict]
    rows: list[TrajectoryRow]
    normalizer: Normalizer

    def with_loss(self, **values: Sequence[Any]) -> "Minibatch":
        """The minibatch with more of what its rows' loss is made from, one value per row."""
        rows = [
            replace(row, loss=replace(row.loss, **dict(zip(values, of_row, strict=True))))
            for row, *of_row in zip(self.rows, *values.values(), strict=True)
        ]
        return replace(self, rows=rows)


class Trained(NamedTuple):
    """What an iteration has trained on, on this rank."""

    trajectories: list[TensorDict]
    policy_logprobs: Tensor  # [N] float32 nats of the response tokens, before the first step


def assign_groups(group_ids: Tensor, num_minibatches: int, ranks: Ranks) -> list[list[int]]:
    """Places in `group_ids`, [B] int64, of each minibatch: as many groups each.

    Groups are counted over all ranks, so the number of ranks changes no minibatch. Collective with
    more than one.
    """
    if num_minibatches == 1:
        return [list(range(len(group_ids)))]
    order = ranks.join([group_ids])[0].unique(sorted=True)
    number = torch.searchsorted(order, group_ids) * num_minibatches // max(1, len(order))
    return [(number == part).nonzero().squeeze(1).tolist() for part in range(num_minibatches)]


@dataclass(kw_only=True)
class PolicyUpdate:
    """Turns finished trajectories into optimizer steps and their metrics."""

    trainer: "PolicyTrainer"
    objective: Objective
    credit: CreditRule
    training: TrainingConfig
    temperature: float  # of sampling; log-probs are taken under it
    reference: "ReferencePolicy | None" = None  # of the KL term
    replay: ReplayMode = "off"
    routing: RoutingShape | None = None  # None for a dense model
    ranks: Ranks  # that train on different trajectories
    twins: Twins = field(default_factory=Twins)
    trained: Trained = field(init=False, default=Trained([], torch.zeros(0)))

    def train_step(self, finished: list[TensorDict], policy_version: int) -> dict[str, float]:
        """Take one iteration's optimizer steps (RollVerify Section 4.1); gives metrics. Collective.

        `finished` are this rank's and its twins', groups whole, who take a part each; metrics are
        the same on every rank, means over the steps but the last learning rate. ValueError if a
        trained token's log-prob is not finite, FloatingPointError if the gradient norm is not.
        """
        own = self.twins.own_groups(finished)
        minibatches = self._scored(self._minibatches(own, policy_version))
        sums = StepSums()
        anchors: list[Tensor] = []
        grad_norms: list[float] = []
        learning_rate = 0.0
        for number, minibatch in enumerate(minibatches):
            whole = self._with_whole(minibatch, is_first=number == 0)
            anchors.append(self._forward_backward(whole, sums))
            if number + 1 == len(minibatches):
                grad_norm, learning_rate = self.trainer.optimizer_step()
            else:
                grad_norm, learning_rate = self.trainer.optimizer_step(is_last=False)
            grad_norms.append(grad_norm)
        num_tokens = sum(minibatch.normalizer.counts.num_tokens for minibatch in minibatches)
        metrics = sums.metrics(num_tokens=num_tokens, num_steps=len(minibatches), ranks=self.ranks)
        metrics["train/grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics["train/lr"] = learning_rate
        metrics["train/num_tokens"] = num_tokens
        metrics["train/num_micro_batches"] = sum(len(minibatch.rows) for minibatch in minibatches)
        members = [member for minibatch in minibatches for member in minibatch.members]
        self.trained = Trained(members, torch.cat(anchors))
        return metrics

    def _minibatches(self, finished: list[TensorDict], policy_version: int) -> list[Minibatch]:
        advantages = self.credit.advantages(finished)
        trained = self.credit.trained(finished)
        parts = assign_groups(stacked(finished, "group_id"), self.training.minibatches, self.ranks)
        return [
            self._minibatch([trained[i] for i in part], advantages[part], policy_version)
            for part in parts
        ]

    def _minibatch(
        self, members: list[TensorDict], advantages: Tensor, policy_version: int
    ) -> Minibatch:
        is_routed = self.replay == "engine"
        rows = pack_trajectories(
            members,
            advantages,
            self.training.micro_batch_tokens,
            policy_version=policy_version,
            with_routing=is_routed,
        )
        loss_tokens = torch.tensor([int(t["loss_mask"].sum()) for t in members], dtype=torch.int64)
        normalizer = Normalizer(
            mode=self.objective.loss.aggregation,
            counts=self._summed(count_batch(loss_tokens)),
            constant_length=self.credit.max_response_tokens,
        )
        rows = equalize_rows(rows, self.ranks, self.routing if is_routed else None)
        return Minibatch(members=members, rows=rows, normalizer=normalizer)

    def _summed(self, counts: BatchCounts) -> BatchCounts:
        return BatchCounts(*self.ranks.sum_counts(counts))

    @property
    def _takes_whole(self) -> bool:
        """Whether something of the whole minibatch must be known before its gradient."""
        return self.objective.needs_limit or not self.objective.loss.masked_in_denominator

    def _scored(self, minibatches: list[Minibatch]) -> list[Minibatch]:
        """Score what has to be known before the first step; nothing for the plain case."""
        if len(minibatches) > 1 or self._takes_whole:
            minibatches = [self._with_anchors(minibatch) for minibatch in minibatches]
        if self.reference is not None and self.objective.kl.coefficient > 0.0:
            # Other weights route otherwise: the reference chooses its own experts.
            rows = [
                replace(row, routed_experts=None)
                for minibatch in minibatches
                for row in minibatch.rows
            ]
            scores = iter(self.reference.score(rows, temperature=self.temperature))
            minibatches = [
                minibatch.with_loss(reference_logprobs=[next(scores) for _ in minibatch.rows])
                for minibatch in minibatches
            ]
        return minibatches

    def _with_anchors(self, minibatch: Minibatch) -> Minibatch:
        rows = minibatch.rows
        if self.replay != "trainer":
            return minibatch.with_loss(anchor_logprobs=self._score(rows))
        scores, routes = self.trainer.score_and_route(rows, temperature=self.temperature)
        rows = [replace(row, routed_experts=ids) for row, ids in zip(rows, routes, strict=True)]
        return replace(minibatch, rows=rows).with_loss(anchor_logprobs=scores)

    def _score(self, rows: Sequence[TrajectoryRow]) -> list[Tensor]:
        return self.trainer.score(rows, temperature=self.temperature)

    def _with_whole(self, minibatch: Minibatch, *, is_first: bool) -> Minibatch:
        """What is taken from the whole minibatch, of the policy about to be updated."""
        if not self._takes_whole:
            return minibatch
        anchors = [row.loss.anchor_logprobs for row in minibatch.rows]
        policy = [logprobs for logprobs in anchors if logprobs is not None]
        if not is_first:
            policy = self._score(minibatch.rows)
        if self.objective.needs_limit:
            minibatch = self._with_limit(minibatch, policy)
        if self.objective.loss.masked_in_denominator:
            return minibatch
        return self._with_kept(minibatch, policy)

    def _with_kept(self, minibatch: Minibatch, policy_logprobs: Sequence[Tensor]) -> Minibatch:
        """Only tokens that are not dropped are averaged over."""
        rows = minibatch.rows
        kept = [
            self.objective.kept(row.loss, logprobs)
            for row, logprobs in zip(rows, policy_logprobs, strict=True)
        ]
        counts = BatchCounts(
            num_tokens=sum(int(mask.sum()) for mask in kept),
            # A trajectory lies in one row as a whole.
            num_sequences=sum(
                len(row.sequence_ids[mask.cpu()].unique())
                for row, mask in zip(rows, kept, strict=True)
            ),
        )
        normalizer = replace(minibatch.normalizer, counts=self._summed(counts))
        return replace(minibatch, normalizer=normalizer).with_loss(counted=kept)

    def _with_limit(self, minibatch: Minibatch, policy_logprobs: Sequence[Tensor]) -> Minibatch:
        squares = [
            self.objective.squares(row.loss, logprobs)
            for row, logprobs in zip(minibatch.rows, policy_logprobs, strict=True)
        ]
        (joined,) = self.ranks.join([torch.cat(squares)])
        return minibatch.with_loss(limit=[self.objective.limit_of(joined)] * len(squares))

    def _forward_backward(self, minibatch: Minibatch, sums: StepSums) -> Tensor:
        """Gradients of one step; returns the members' anchor log-probs, [N]."""
        rows = minibatch.rows
        anchors = [row.loss.anchor_logprobs for row in rows]

        def token_loss(index: int, policy_logprobs: Tensor, entropy: Tensor) -> Tensor:
            """Scalar, from the row's [T] nats each."""
            row = rows[index].loss
            if row.anchor_logprobs is None:
                anchors[index] = policy_logprobs.detach()
            result = self.objective.row_loss(row, policy_logprobs, entropy, minibatch.normalizer)
            sums.add_row(result)
            return result.loss

        loss = self.trainer.forward_backward(rows, token_loss, temperature=self.temperature)
        sums.add_loss(loss.item())
        values = [logprobs for logprobs in anchors if logprobs is not None]
        return response_values(rows, values, minibatch.members).float().cpu()
