"""Takes the anchor log-probs of what was sampled in this iteration and is not trained on yet.

Runs at AFTER_ROLLOUT, while the trainer still holds the version that sampled the new segments.
Decides nothing: the anchors are what verification compares against later.
"""

import torch

from rollverify.state import StepState
from rollverify.training.responses import flat
from rollverify.training.scoring import TrajectoryScorer, check_finite


class AnchorScoring:
    """Hook: fills `anchor_logprobs` of U_k where it is NaN."""

    def __init__(self, scorer: TrajectoryScorer) -> None:
        """Set up.

        Args:
            scorer: scores under the trainer's weights.
        """
        self._scorer = scorer

    def __call__(self, state: StepState) -> None:
        """Score and fill in place; a token that has its anchor keeps it.

        Collective: yes, over the world.

        Raises:
            RolloutError: naming the trajectory, if a score is not finite.
        """
        trajectories = [
            one for one in state.unfinished if bool(one["anchor_logprobs"].isnan().any())
        ]
        scores = self._scorer.score(trajectories)
        if not trajectories:
            return
        anchors = flat(trajectories, "anchor_logprobs")
        filled = torch.where(anchors.isnan(), torch.cat(scores), anchors)
        check_finite(filled, trajectories, "anchor_logprobs")
        lengths = [len(score) for score in scores]
        for trajectory, anchor in zip(trajectories, filled.split(lengths), strict=True):
            trajectory["anchor_logprobs"] = anchor.clone()  # A view would keep all of them alive.
