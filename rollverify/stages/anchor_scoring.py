"""Takes the anchor log-probs of what was sampled in this iteration and is not trained on yet.

Runs at AFTER_ROLLOUT, while the trainer still holds the version that sampled the new segments.
Decides nothing: the anchors are what verification compares against later.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.rollout.routing import join_routing
from rollverify.state import StepState
from rollverify.training.responses import flat
from rollverify.training.scoring import TrajectoryScorer, check_finite


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
