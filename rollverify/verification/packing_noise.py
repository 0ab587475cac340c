"""How far the trainer's own log-probs move when a response is only packed into another row.

On a GPU in bfloat16 kernels round otherwise for rows of other lengths. Verification compares two
passes of the trainer, so this is what it would see of a policy that has not moved.
"""

import logging
from dataclasses import dataclass

import torch

from rollverify.config.tables import VerificationConfig
from rollverify.hooks import StepState
from rollverify.ranks import Ranks
from rollverify.rollout.layout import response_layout
from rollverify.training.scoring import TrajectoryScorer
from rollverify.verification.ops import token_ops

NUM_RESPONSES = 8
"""Scored twice each time, on each rank."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PackingNoise:
    """Hook at AFTER_ROLLOUT: scores some responses together and one by one under equal weights."""

    scorer: TrajectoryScorer
    settings: VerificationConfig
    ranks: Ranks

    def __call__(self, state: StepState) -> None:
        """Fill `mismatch/packing_ops_*` in the steps that measure. Collective."""
        if (state.step - 1) % self.settings.packing_noise_every:
            return
        some = [t for t in state.finished if len(t["response_ids"])][:NUM_RESPONSES]
        together = self.scorer.score(some)
        # As many passes on every rank; those of a rank with fewer responses are empty.
        alone = [self.scorer.score(some[place : place + 1]) for place in range(NUM_RESPONSES)]
        ops = token_ops(torch.cat(alone), together, response_layout(some)).double()
        sums, maxima = self.ranks.reduce(
            {"ops": ops.sum().item(), "tokens": len(ops)},
            {"mismatch/packing_ops_max": ops.max().item() if len(ops) else 0.0},
        )
        mean = sums["ops"] / max(1.0, sums["tokens"])
        state.metrics |= maxima | {"mismatch/packing_ops_mean": mean}
        threshold = self.settings.segment_threshold
        if mean >= threshold:
            logger.warning(
                "step %d: the trainer's log-probs of one response differ by an OPS of %.2g between "
                "rows it is packed in, not below verification.segment_threshold = %g: sound "
                "segments are cut; raise the threshold or set training.dtype = 'float32'",
                state.step,
                mean,
                threshold,
            )
