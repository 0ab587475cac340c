"""Cost of decoding: a decode step takes t = c0 + c1 * active, and what follows from that.

c0 is what a step costs however few run (weights are read, kernels launched), c1 what one more
active sequence adds. Both are fitted to measured steps, or put in for another machine. Neither
training nor scoring is in here. Reads no files.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class PhaseWork(NamedTuple):
    """What the engine did in one rollout phase."""

    decode_steps: float
    slot_steps: float
    """Active sequences, summed over the decode steps."""
    seconds: float


class CostFit(NamedTuple):
    """Least-squares fit to measured phases."""

    c0_s: float
    """Seconds of a decode step without sequences."""
    c1_s: float
    """Seconds that one active sequence adds."""
    residual_s: float
    """Root mean square of measured less fitted seconds, per decode step."""
    residual_frac: float
    """The same over the mean seconds of a decode step."""
    num_phases: int

    @property
    def ratio(self) -> float | None:
        """c1 / c0; None where c0 is not positive, so that it means nothing."""
        return self.c1_s / self.c0_s if self.c0_s > 0 else None


def fit_cost(phases: Sequence[PhaseWork]) -> CostFit | None:
    """Fit seconds per decode step = c0 + c1 * mean active sequences, each phase by its steps.

    Args:
        phases: measured phases; those without a decode step do not count.

    Returns:
        The fit, or None with fewer than two phases or no difference in active sequences.
    """
    used = [one for one in phases if one.decode_steps > 0]
    weight = sum(one.decode_steps for one in used)
    if len(used) < 2:
        return None
    mean_active = sum(one.slot_steps for one in used) / weight
    mean_s = sum(one.seconds for one in used) / weight
    square = cross = 0.0
    for one in used:
        offset = one.slot_steps / one.decode_steps - mean_active
        square += one.decode_steps * offset**2
        cross += one.decode_steps * offset * (one.seconds / one.decode_steps - mean_s)
    if square <= 1e-12 * weight * max(1.0, mean_active**2):
        return None
    c1_s = cross / square
    c0_s = mean_s - c1_s * mean_active
    errors = [
        (one.seconds - c0_s * one.decode_steps - c1_s * one.slot_steps) ** 2 / one.decode_steps
        for one in used
    ]
    residual_s = math.sqrt(sum(errors) / weight)
    return CostFit(c0_s, c1_s, residual_s, residual_s / mean_s, len(used))


def cost(work: PhaseWork, ratio: float) -> float:
    """Cost of decoding in units of c0: decode steps plus c1 / c0 times slot-steps.

    Args:
        work: of a phase, or summed over phases.
        ratio: c1 / c0, >= 0; inf counts slot-steps alone.
    """
    if math.isinf(ratio):
        return work.slot_steps
    return work.decode_steps + ratio * work.slot_steps


def break_even(ours: PhaseWork, theirs: PhaseWork) -> float | None:
    """The c1 / c0 at which both cost the same.

    Args:
        ours: work of one arm.
        theirs: work of another one.

    Returns:
        The ratio; None where one of the two is cheaper at every ratio.
    """
    steps, slots = theirs.decode_steps - ours.decode_steps, ours.slot_steps - theirs.slot_steps
    if slots == 0 or steps / slots <= 0:
        return None
    return steps / slots


def total_work(phases: Sequence[PhaseWork]) -> PhaseWork:
    """Sum over phases."""
    return PhaseWork(
        sum(one.decode_steps for one in phases),
        sum(one.slot_steps for one in phases),
        sum(one.seconds for one in phases),
    )


def accuracy_at(points: Sequence[tuple[float, float]], budget: float) -> float | None:
    """Accuracy that a run has reached at a cost, linear between its evaluations.

    Args:
        points: (cost so far, accuracy) of each evaluation, ascending in cost.
        budget: the cost; beyond the last evaluation that one counts.

    Returns:
        The accuracy; None without evaluations or with a budget below the first.
    """
    if not points or budget < points[0][0]:
        return None
    for (cost_a, low), (cost_b, high) in itertools.pairwise(points):
        if budget < cost_b:
            return low + (high - low) * (budget - cost_a) / (cost_b - cost_a)
    return points[-1][1]
