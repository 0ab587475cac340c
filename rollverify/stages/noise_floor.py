"""Compares the segment threshold d_s with what engine and trainer alone are apart.

Runs at AFTER_TRAIN and only speaks: an engine that rounds to bfloat16 gives other log-probs than
the trainer for the same tokens under the same weights, and a d_s below that gap asks for more than
the numbers hold.
"""

import logging

from rollverify.stages.ops_scoring import Reference
from rollverify.state import StepState

logger = logging.getLogger(__name__)

_CONSEQUENCE = {
    "behavior": (
        "responses are cut for the engine's rounding; set verification.reference = 'anchor', raise "
        "segment_threshold or make engine.dtype finer"
    ),
    "anchor": (
        "reference = 'anchor' keeps this out of what is cut, but even fresh tokens are that far "
        "from the trainer's policy"
    ),
}


class NoiseFloor:
    """Hook: warns once in a run, in the first step whose noise reaches d_s."""

    def __init__(self, *, segment_threshold: float, reference: Reference) -> None:
        """Set up.

        Args:
            segment_threshold: d_s, dimensionless, > 0; inf never warns.
            reference: log-probs that verification compares with, which decides what noise does.
        """
        self._segment_threshold = segment_threshold
        self._reference: Reference = reference
        self._has_warned = False

    def __call__(self, state: StepState) -> None:
        """Read `mismatch/ops_mean` of the step."""
        noise = state.metrics["mismatch/ops_mean"]
        if self._has_warned or noise < self._segment_threshold:
            return
        self._has_warned = True
        logger.warning(
            "step %d: engine and trainer differ by an OPS of %.2g under the same weights, not "
            "below verification.segment_threshold = %g: %s",
            state.step,
            noise,
            self._segment_threshold,
            _CONSEQUENCE[self._reference],
        )
