"""Scores U_k under the policy after the step: the off-policy shift of each response token.

Runs at BEFORE_WEIGHT_SYNC, before the filter and verification, which read what it found. Changes
no trajectory.
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.errors import RolloutError
from rollverify.hooks import StepState
from rollverify.rollout.layout import flat, response_layout
from rollverify.rollout.trajectory import join_routing
from rollverify.training.scoring import TrajectoryScorer, check_finite
from rollverify.verification.metrics import ops_metrics
from rollverify.verification.ops import token_ops

Reference = Literal["anchor", "behavior"]


class OpsScoring:
    """Hook: fills `ops/unfinished_*`, and its own attributes for the hooks after it."""

    def __init__(
        self,
        *,
        scorer: TrajectoryScorer | None,
        reference: Reference,
        symmetric: bool,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            scorer: scores under the trainer's weights; None counts tokens and scores nothing.
            reference: log-probs to compare with, the trainer's or the engine's at sampling time.
            symmetric: also count how far tokens have become less likely, see `token_ops`.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._scorer = scorer
        self._reference: Reference = reference
        self._symmetric = symmetric
        self._data_group = data_group
        self.trajectories: list[TensorDict] = []
        """U_k of this rank without what the filter has dropped."""
        self.layout = response_layout([])
        """Where their response tokens lie, end to end."""
        self.num_checked_tokens = 0
        """Response tokens of U_k on this rank when the hook ran."""
        self.num_checked_trajectories = 0
        """Trajectories of U_k on this rank when the hook ran."""
        self._ops: Tensor | None = None

    @property
    def ops(self) -> Tensor:
        """[N] float32; OPS of the response tokens of `trajectories`, end to end.

        Raises:
            RolloutError: if nothing is scored.
        """
        if self._ops is None:
            raise RolloutError("the unfinished trajectories are not scored")
        return self._ops

    @property
    def token_ops(self) -> list[Tensor]:
        """[R] float32 per trajectory; an empty list if nothing is scored."""
        if self._ops is None:
            return []
        return list(self._ops.split(self.layout.trajectory_lengths.tolist()))

    def __call__(self, state: StepState) -> None:
        """Score and reduce the metrics. Collective: yes, over the world.

        Raises:
            RolloutError: naming the trajectory, if a log-prob of a response token is not finite.
        """
        self.trajectories = list(state.unfinished)
        self.layout = response_layout(self.trajectories)
        self.num_checked_tokens = self.layout.num_positions
        self.num_checked_trajectories = len(self.trajectories)
        self._ops = None
        if self._scorer is None:
            return
        updated = self._scorer.score(self.trajectories)
        check_finite(updated, self.trajectories, "updated_logprobs")
        reference = self._reference_logprobs()
        check_finite(reference, self.trajectories, f"{self._reference}_logprobs")
        self._ops = token_ops(updated, reference, self.layout, symmetric=self._symmetric)
        ages = state.policy_version - flat(self.trajectories, "policy_version")
        state.metrics |= ops_metrics("unfinished", self._ops, self.layout, ages, self._data_group)

    def _reference_logprobs(self) -> Tensor:
        """[N] float32; the engine's where the trainer's was not taken when the token was sampled.

        That happens after a resume with `reference` changed from behavior to anchor.
        """
        behavior = flat(self.trajectories, "behavior_logprobs")
        if self._reference == "behavior":
            return behavior
        anchor = flat(self.trajectories, "anchor_logprobs")
        return torch.where(anchor.isnan(), behavior, anchor)

    def drop(self, indices: Iterable[int]) -> None:
        """Take trajectories that a filter discards out of the list and the OPS.

        Args:
            indices: places in `trajectories`; the others must not have changed since they were
                scored.
        """
        keep_B = torch.ones(len(self.trajectories), dtype=torch.bool)
        keep_B[list(indices)] = False
        if self._ops is not None:
            self._ops = self._ops[keep_B[self.layout.token_owners]]
        kept = keep_B.tolist()
        self.trajectories = [one for one, k in zip(self.trajectories, kept, strict=True) if k]
        self.layout = response_layout(self.trajectories)


class AnchorScoring:
    """Hook: fills `anchor_logprobs` of what the policy now has sampled and is in U_k."""

    def __init__(self, scorer: TrajectoryScorer, *, records_routing: bool = False) -> None:
        """Set up.

        Args:
            scorer: scores under the trainer's weights.
            records_routing: also keep the experts that the trainer's router chooses, for replay;
                tokens that have theirs keep them.
        """
        self._scorer = scorer
        self._records_routing = records_routing

    def __call__(self, state: StepState) -> None:
        """Score and fill in place; a token that has its anchor keeps it.

        An older token without one, of a run that took none before, can get none any more.

        Collective: yes, over the world.

        Raises:
            RolloutError: naming the trajectory, if a score is not finite.
        """
        trajectories = [one for one in state.unfinished if _lacks_anchor(one, state.policy_version)]
        new = self._scores(trajectories)
        if not trajectories:
            return
        anchors = flat(trajectories, "anchor_logprobs")
        is_new = anchors.isnan() & (flat(trajectories, "policy_version") == state.policy_version)
        check_finite(new, trajectories, "anchor_logprobs")
        filled = torch.where(is_new, new, anchors)
        lengths = [len(one["response_ids"]) for one in trajectories]
        for trajectory, anchor in zip(trajectories, filled.split(lengths), strict=True):
            trajectory["anchor_logprobs"] = anchor.clone()  # A view would keep all of them alive.

    def _scores(self, trajectories: list[TensorDict]) -> Tensor:
        if not self._records_routing:
            return self._scorer.score(trajectories)
        scores, routes = self._scorer.score_and_route(trajectories)
        for trajectory, routed_experts in zip(trajectories, routes, strict=True):
            assert routed_experts is not None, "what lacks an anchor has a response"
            join_routing(trajectory, routed_experts, replace=False)
        return scores


def _lacks_anchor(trajectory: TensorDict, policy_version: int) -> bool:
    is_new = trajectory["policy_version"] == policy_version
    return bool((trajectory["anchor_logprobs"].isnan() & is_new).any())
