"""Scores of U_k: anchors before the step, the off-policy shift after it (Algorithm 1)."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.hooks import StepState
from rollverify.ranks import Ranks
from rollverify.rollout.layout import PackedLayout, flat, response_layout
from rollverify.rollout.trajectory import join_routing
from rollverify.training.scoring import TrajectoryScorer, check_finite
from rollverify.verification.metrics import ops_metrics
from rollverify.verification.ops import token_ops

Against = Literal["anchor", "behavior"]
"""Log-probs at sampling that the updated ones are compared with: the trainer's or the engine's."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Trajectories of U_k on this rank, and how far the policy after the step has moved on them."""

    trajectories: list[TensorDict]
    layout: PackedLayout
    """Where their N response tokens lay when they were scored, end to end."""
    ops: Tensor
    """[N] float32; OPS of these tokens, NaN where nothing is scored."""

    def only(self, is_kept: Tensor) -> "Scored":
        """Those with True in [B] bool; the trajectories that stay must not have changed."""
        kept = [t for t, k in zip(self.trajectories, is_kept.tolist(), strict=True) if k]
        ops = self.ops[is_kept[self.layout.token_owners]]
        return replace(self, trajectories=kept, layout=response_layout(kept), ops=ops)


@dataclass(kw_only=True)
class OpsScoring:
    """Scores U_k under the policy after the step and fills `ops/unfinished_*`."""

    scorer: TrajectoryScorer | None
    """None scores nothing."""
    against: Against
    symmetric: bool
    ranks: Ranks

    def __call__(self, state: StepState) -> Scored:
        """Score, and change nothing. Collective over the world."""
        unfinished = list(state.unfinished)
        layout = response_layout(unfinished)
        if self.scorer is None:
            unknown = torch.full((layout.num_tokens,), float("nan"))
            return Scored(trajectories=unfinished, layout=layout, ops=unknown)
        updated = self.scorer.score(unfinished)
        check_finite(updated, unfinished, "updated_logprobs")
        sampled = self._sampled_logprobs(unfinished)
        check_finite(sampled, unfinished, f"{self.against}_logprobs")
        ops = token_ops(updated, sampled, layout, symmetric=self.symmetric)
        ages = state.policy_version - flat(unfinished, "policy_version")
        state.metrics |= ops_metrics("unfinished", ops, layout, ages, self.ranks)
        return Scored(trajectories=unfinished, layout=layout, ops=ops)

    def _sampled_logprobs(self, trajectories: list[TensorDict]) -> Tensor:
        """[N] float32; the engine's for a token without anchor (`against` changed on a resume)."""
        behavior = flat(trajectories, "behavior_logprobs")
        if self.against == "behavior":
            return behavior
        anchor = flat(trajectories, "anchor_logprobs")
        return torch.where(anchor.isnan(), behavior, anchor)


@dataclass(kw_only=True)
class AnchorScoring:
    """Hook: fills `anchor_logprobs` of what the policy now has sampled and is in U_k."""

    scorer: TrajectoryScorer
    records_routing: bool = False
    """Also keep the experts that the trainer's router chooses, for replay."""

    def __call__(self, state: StepState) -> None:
        """Score and fill in place; a token that has its anchor keeps it. Collective over the world.

        An older token without one, of a run that took none before, can get none any more.
        """
        trajectories = [t for t in state.unfinished if _lacks_anchor(t, state.policy_version)]
        new = self._scores(trajectories)
        if not trajectories:
            return
        anchors = flat(trajectories, "anchor_logprobs")
        is_new = anchors.isnan() & (flat(trajectories, "policy_version") == state.policy_version)
        check_finite(new, trajectories, "anchor_logprobs")
        filled = torch.where(is_new, new, anchors)
        lengths = [len(trajectory["response_ids"]) for trajectory in trajectories]
        for trajectory, anchor in zip(trajectories, filled.split(lengths), strict=True):
            trajectory["anchor_logprobs"] = anchor.clone()  # A view would keep all of them alive.

    def _scores(self, trajectories: list[TensorDict]) -> Tensor:
        if not self.records_routing:
            return self.scorer.score(trajectories)
        scores, routes = self.scorer.score_and_route(trajectories)
        for trajectory, routed_experts in zip(trajectories, routes, strict=True):
            assert routed_experts is not None, "what lacks an anchor has a response"
            join_routing(trajectory, routed_experts, replace=False)
        return scores


def _lacks_anchor(trajectory: TensorDict, policy_version: int) -> bool:
    is_new = trajectory["policy_version"] == policy_version
    return bool((trajectory["anchor_logprobs"].isnan() & is_new).any())
