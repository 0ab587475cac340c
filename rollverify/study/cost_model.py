"""Cost of decoding: a decode step takes t = c0 + c1 * active, and what follows from that.

c0 is what a step costs however few run (weights are read, kernels launched), c1 what one more
active sequence adds. Both are fitted to measured steps, or put in for another machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Work(NamedTuple):
    """What the engine did in one or more rollout phases."""

    decode_steps: float
    slot_steps: float
    """Active sequences, summed over the decode steps."""
    seconds: float


class CostFit(NamedTuple):
    """Least-squares fit to measured phases."""

    c0_s: float
    c1_s: float
    residual_s: float
    """Root mean square of measured less fitted seconds, per decode step."""
    residual_frac: float
    """The same over the mean seconds of a decode step."""
    num_phases: int

    @property
    def ratio(self) -> float | None:
        """c1 / c0; None where c0 is not positive, so that it means nothing."""
        return self.c1_s / self.c0_s if self.c0_s > 0 else None


def fit_cost(phases: pd.DataFrame) -> CostFit | None:
    """Fit seconds per decode step = c0 + c1 * mean active sequences, each phase by its steps.

    `phases` has a row per rollout phase and the columns of `Work`. None where it is not determined.
    """
    used = phases[phases["decode_steps"] > 0]
    if len(used) < 2:
        return None
    steps, slots, seconds = (used[name] for name in Work._fields)
    weight = sum(steps)
    mean_active, mean_s = sum(slots) / weight, sum(seconds) / weight
    offset = slots / steps - mean_active
    square = sum(steps * offset**2)
    if square <= 1e-12 * weight * max(1.0, mean_active**2):
        return None
    c1_s = sum(steps * offset * (seconds / steps - mean_s)) / square
    c0_s = mean_s - c1_s * mean_active
    residual_s = math.sqrt(sum((seconds - c0_s * steps - c1_s * slots) ** 2 / steps) / weight)
    return CostFit(c0_s, c1_s, residual_s, residual_s / mean_s, len(used))


def cost(work: Work, ratio: float) -> float:
    """Cost of decoding in units of c0, from ratio = c1 / c0; inf counts slot-steps alone."""
    return work.slot_steps if math.isinf(ratio) else work.decode_steps + ratio * work.slot_steps


def break_even(ours: Work, theirs: Work) -> float | None:
    """The c1 / c0 at which both cost the same; None where one is cheaper at every ratio."""
    steps, slots = theirs.decode_steps - ours.decode_steps, ours.slot_steps - theirs.slot_steps
    return steps / slots if slots and steps / slots > 0 else None


def accuracy_at(points: Sequence[tuple[float, float]], budget: float) -> float | None:
    """Accuracy that a run has reached at a cost, linear between (cost, accuracy), ascending.

    Beyond the last point that one counts; None below the first.
    """
    if not points or budget < points[0][0]:
        return None
    for (cost_a, low), (cost_b, high) in itertools.pairwise(points):
        if budget < cost_b:
            return low + (high - low) * (budget - cost_a) / (cost_b - cost_a)
    return points[-1][1]
