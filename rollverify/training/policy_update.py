"""The optimizer steps of an iteration on its finished trajectories.

Groups arrive whole on one rank, so advantages need no communication; loss denominators are global.
With one optimizer step per iteration the anchor is the policy's own, taken inside the step; with
several, all trajectories are scored before the first. The policy version rises by one either way.
Knows nothing of rollouts or weight transfer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.engine.model_folder import RoutingShape
from rollverify.losses import REPORTS_GATE
from rollverify.losses.advantages import CreditRule
from rollverify.losses.aggregation import (
    AggregationMode,
    BatchCounts,
    Normalizer,
    count_batch,
    reduce_counts,
)
from rollverify.losses.objective import Objective, RowGiven
from rollverify.ranks import gather_values
from rollverify.rollout.trajectory import stacked
from rollverify.training.packing import (
    ReplayMode,
    TrajectoryRow,
    equalize_rows,
    pack_trajectories,
    response_values,
)
from rollverify.training.step_metrics import StepSums


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """What one optimizer step is taken on, on this rank."""

    members: list[TensorDict]
    rows: list[TrajectoryRow]
    normalizer: Normalizer
    given: list[RowGiven]
    """One per row."""


def with_given(one: Minibatch, **values: Sequence[Tensor | float]) -> Minibatch:
    """The minibatch with one more value per row.

    Args:
        one: left as it is.
        values: by the name of a field of `RowGiven`, one per row.

    Returns:
        A new minibatch that shares the rest.
    """
    given = [
        replace(given, **{name: value[i] for name, value in values.items()})
        for i, given in enumerate(one.given)
    ]
    return replace(one, given=given)


def assign_groups(
    group_ids: Tensor, num_minibatches: int, data_group: dist.ProcessGroup | None
) -> list[list[int]]:
    """Places of each minibatch's trajectories: by group id, as many groups each.

    Groups are counted over all ranks, so the number of ranks does not change a minibatch.

    Args:
        group_ids: [B] int64 of this rank's trajectories.
        num_minibatches: optimizer steps.
        data_group: ranks that hold different trajectories; None where there is one.

    Returns:
        Per minibatch, indices into `group_ids`.

    Source:
        Our choice; collective: yes, over `data_group`, with more than one minibatch.
    """
    if num_minibatches == 1:
        return [list(range(len(group_ids)))]
    every = group_ids
    if data_group is not None:
        every = gather_values([group_ids], data_group)[0]
    order = every.unique(sorted=True)
    number = torch.searchsorted(order, group_ids) * num_minibatches // max(1, len(order))
    return [(number == part).nonzero().squeeze(1).tolist() for part in range(num_minibatches)]


class Trained(NamedTuple):
    """What an iteration has trained on, on this rank."""

    trajectories: list[TensorDict]
    policy_logprobs: Tensor
    """[N] float32 nats; of their response tokens end to end, before the first step."""


class Scorer(Protocol):
    """Whoever gives log-probs of packed rows: the trainer, or a reference model."""

    def score(self, rows: Sequence[TrajectoryRow], *, temperature: float) -> list[Tensor]:
        """Log-probs of each row's targets, [T] float32 nats; collective."""
        ...


class Trainer(Scorer, Protocol):
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

    def score_and_route(
        self, rows: Sequence[TrajectoryRow], *, temperature: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs, and the router's own choice per row, [T, L, K] ids; collective."""
        ...

    def optimizer_step(self, *, is_last: bool = True) -> tuple[float, float]:
        """Returns (gradient norm, learning rate); the schedule moves on with the last only."""
        ...


class PolicyUpdate:
    """Turns finished trajectories into optimizer steps and their metrics."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        objective: Objective,
        credit: CreditRule,
        micro_batch_tokens: int,
        temperature: float,
        aggregation: AggregationMode,
        constant_length: int,
        minibatches: int = 1,
        reference: Scorer | None = None,
        replay: ReplayMode = "off",
        routing: RoutingShape | None = None,
        masked_in_denominator: bool = True,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up; nothing is computed yet.

        Args:
            trainer: owns the sharded policy.
            objective: the loss with its corrections.
            credit: turns rewards into advantages.
            micro_batch_tokens: tokens of one packed row.
            temperature: of sampling; log-probs are taken under it.
            aggregation: how token losses become one number.
            constant_length: divisor of "constant_length", tokens.
            minibatches: optimizer steps per iteration; each takes as many whole groups, by id.
            reference: scores for the KL term; None where there is none.
            replay: whose choice of experts the passes with gradient repeat: nobody's, the engine's
                as recorded in the trajectories, or the trainer's own before the first step.
            routing: of the model; None where it has no experts.
            masked_in_denominator: whether tokens that the correction or the loss drops count in the
                averages; False costs a scoring pass, since they must be known before the gradient.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._trainer = trainer
        self._objective = objective
        self._credit = credit
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._aggregation: AggregationMode = aggregation
        self._constant_length = constant_length
        self._num_minibatches = minibatches
        self._reference = reference if objective.kl.coefficient > 0.0 else None
        self._replay: ReplayMode = replay
        self._routing = routing
        self._masked_in_denominator = masked_in_denominator
        self._takes_whole = objective.needs_limit or not masked_in_denominator
        self._data_group = data_group
        self.trained = Trained([], torch.zeros(0))
        """Of the last iteration."""

    def train_step(self, finished: list[TensorDict], policy_version: int) -> dict[str, float]:
        """Take the optimizer steps of one iteration.

        Args:
            finished: this rank's trajectories, groups whole.
            policy_version: version before the first step, at least that of every token.

        Returns:
            Metrics of `train/`, `mismatch/` and `correction/`, the same on every rank; of several
            steps the mean, but the last learning rate.

        Raises:
            ValueError: if a log-prob of a trained token is not finite.
            FloatingPointError: if the gradient norm is not finite.

        Source:
            RollVerify Section 4.1; collective: yes, over the world.
        """
        minibatches = self._with_scores(self._prepare(finished, policy_version))
        sums = StepSums(
            has_gate=self._objective.loss.name in REPORTS_GATE,
            has_reference=self._reference is not None,
        )
        before: list[Tensor] = []
        grad_norms: list[float] = []
        learning_rate = 0.0
        for number, one in enumerate(minibatches):
            whole = self._with_whole(one, is_first=number == 0)
            before.append(self._forward_backward(whole, sums))
            if number + 1 == len(minibatches):
                grad_norm, learning_rate = self._trainer.optimizer_step()
            else:
                grad_norm, learning_rate = self._trainer.optimizer_step(is_last=False)
            grad_norms.append(grad_norm)
        num_tokens = sum(one.normalizer.counts.num_tokens for one in minibatches)
        metrics = sums.metrics(
            num_tokens=num_tokens, num_steps=len(minibatches), data_group=self._data_group
        )
        metrics["train/grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics["train/lr"] = learning_rate
        metrics["train/num_tokens"] = num_tokens
        metrics["train/num_micro_batches"] = sum(len(one.rows) for one in minibatches)
        members = [member for one in minibatches for member in one.members]
        self.trained = Trained(members, torch.cat(before))
        return metrics

    def _prepare(self, finished: list[TensorDict], policy_version: int) -> list[Minibatch]:
        advantages = self._credit.advantages(finished)
        trained = self._credit.trained(finished)
        group_ids = stacked(finished, "group_id")
        parts = assign_groups(group_ids, self._num_minibatches, self._data_group)
        return [
            self._minibatch([trained[i] for i in part], advantages[part], policy_version)
            for part in parts
        ]

    def _minibatch(
        self, members: list[TensorDict], advantages: Tensor, policy_version: int
    ) -> Minibatch:
        is_routed = self._replay == "engine"
        rows = pack_trajectories(
            members, advantages, self._micro_batch_tokens, with_routing=is_routed
        )
        loss_tokens = torch.tensor([int(t["loss_mask"].sum()) for t in members], dtype=torch.int64)
        counts = count_batch(loss_tokens)
        if self._data_group is not None:
            device = self._trainer.device.type
            routing = self._routing if is_routed else None
            rows = equalize_rows(rows, self._data_group, device, routing)
            counts = reduce_counts(counts, self._data_group, device)
        normalizer = Normalizer(
            mode=self._aggregation, counts=counts, constant_length=self._constant_length
        )
        given = RowGiven(num_sequences=max(1, len(members)), policy_version=policy_version)
        return Minibatch(
            members=members, rows=rows, normalizer=normalizer, given=[given] * len(rows)
        )

    def _with_scores(self, minibatches: list[Minibatch]) -> list[Minibatch]:
        """Score what has to be known before the first step; nothing for the plain case."""
        if len(minibatches) > 1 or self._takes_whole:
            minibatches = [self._with_anchors(one) for one in minibatches]
        if self._reference is not None:
            # Other weights route otherwise: the reference chooses its own experts.
            rows = [replace(row, routed_experts=None) for one in minibatches for row in one.rows]
            scores = iter(self._reference.score(rows, temperature=self._temperature))
            minibatches = [
                with_given(one, reference_logprobs=[next(scores) for _ in one.rows])
                for one in minibatches
            ]
        return minibatches

    def _with_anchors(self, one: Minibatch) -> Minibatch:
        if self._replay != "trainer":
            return with_given(one, anchor_logprobs=self._score(one.rows))
        scores, routes = self._trainer.score_and_route(one.rows, temperature=self._temperature)
        rows = [replace(row, routed_experts=ids) for row, ids in zip(one.rows, routes, strict=True)]
        return with_given(replace(one, rows=rows), anchor_logprobs=scores)

    def _score(self, rows: Sequence[TrajectoryRow]) -> list[Tensor]:
        return self._trainer.score(rows, temperature=self._temperature)

    def _with_whole(self, one: Minibatch, *, is_first: bool) -> Minibatch:
        """What is taken from the whole minibatch, of the policy about to be updated."""
        if not self._takes_whole:
            return one
        own = [given.anchor_logprobs for given in one.given] if is_first else self._score(one.rows)
        scores = [logprobs for logprobs in own if logprobs is not None]
        if self._objective.needs_limit:
            one = self._with_limit(one, scores)
        return one if self._masked_in_denominator else self._with_kept(one, scores)

    def _with_kept(self, one: Minibatch, own: Sequence[Tensor]) -> Minibatch:
        """Only tokens that are not dropped are averaged over."""
        kept = [self._objective.kept(*each) for each in zip(one.rows, own, one.given, strict=True)]
        counts = BatchCounts(
            num_tokens=sum(int(mask.sum()) for mask in kept),
            # A trajectory lies in one row as a whole.
            num_sequences=sum(
                len(row.sequence_ids[mask.cpu()].unique())
                for row, mask in zip(one.rows, kept, strict=True)
            ),
        )
        if self._data_group is not None:
            counts = reduce_counts(counts, self._data_group, self._trainer.device.type)
        normalizer = replace(one.normalizer, counts=counts)
        return with_given(replace(one, normalizer=normalizer), counted=kept)

    def _with_limit(self, one: Minibatch, own: Sequence[Tensor]) -> Minibatch:
        squares = [
            self._objective.squares(*each) for each in zip(one.rows, own, one.given, strict=True)
        ]
        joined = torch.cat([torch.zeros(0), *squares])
        if self._data_group is not None:
            joined = gather_values([joined], self._data_group)[0]
        return with_given(one, limit=[self._objective.limit_of(joined)] * len(one.rows))

    def _forward_backward(self, one: Minibatch, sums: StepSums) -> Tensor:
        """Gradients of one step; returns the members' log-probs before the iteration, [N]."""
        before = [given.anchor_logprobs for given in one.given]

        def token_loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            row, given = one.rows[index], one.given[index]
            if given.anchor_logprobs is None:
                before[index] = logprobs.detach()
            result = self._objective.row_loss(row, logprobs, entropy, one.normalizer, given)
            sums.add_row(result)
            return result.loss

        loss = self._trainer.forward_backward(one.rows, token_loss, temperature=self._temperature)
        sums.add_loss(loss.item())
        values = [value for value in before if value is not None]
        return response_values(one.rows, values, one.members).float().cpu()
