"""Ends partial rollouts when too little of what is paused survives (Section 4.3).

Runs last at BEFORE_WEIGHT_SYNC. When to switch is decided in `algorithms/switching.py`, what
happens to paused groups in the rollouter.
"""

import logging
from typing import Protocol

import torch.distributed as dist

from rollverify.algorithms.switching import AcceptanceWindow, acceptance_rate
from rollverify.metrics.reduction import reduce_metrics
from rollverify.stages.ops_scoring import OpsScoring
from rollverify.state import StepState

logger = logging.getLogger(__name__)


class Rollouter(Protocol):
    """What is told to the rollouter."""

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Change the mode from the next phase on; True drops everything unfinished."""
        ...


class Switching:
    """Hook: feeds the acceptance window and carries out its decision."""

    def __init__(
        self,
        *,
        window: AcceptanceWindow,
        ops_scoring: OpsScoring,
        rollouter: Rollouter,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            window: decides; part of a checkpoint. On-policy steps are fed to a reversible one.
            ops_scoring: has counted U_k in this step.
            rollouter: is told of a change.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._window = window
        self._ops_scoring = ops_scoring
        self._rollouter = rollouter
        self._data_group = data_group

    def __call__(self, state: StepState) -> None:
        """Decide, the same on every rank. Collective: yes, over the data ranks."""
        was_on_policy = self._window.is_on_policy
        if not was_on_policy or self._window.is_reversible:
            rate = self._rate(state)
            is_on_policy = self._window.update(rate)
            state.metrics["switching/acceptance_rate"] = rate
            if is_on_policy != was_on_policy:
                self._switch(state, is_on_policy, rate)
        if self._window.average_rate is not None:
            state.metrics["switching/average_rate"] = self._window.average_rate
        state.metrics["switching/is_on_policy"] = float(self._window.is_on_policy)

    def _rate(self, state: StepState) -> float:
        held = sum(len(one["response_ids"]) for one in state.unfinished)
        sums = {"accepted": float(held), "checked": float(self._ops_scoring.num_checked_tokens)}
        if self._data_group is not None:
            sums, _ = reduce_metrics(sums, {}, self._data_group)
        return acceptance_rate(int(sums["accepted"]), int(sums["checked"]))

    def _switch(self, state: StepState, is_on_policy: bool, rate: float) -> None:
        self._rollouter.set_on_policy(is_on_policy)
        logger.info(
            "step %d: %s (acceptance rate of this step %.3f)",
            state.step,
            "rollouts are on-policy from now on; what is unfinished is dropped"
            if is_on_policy
            else "rollouts are partial again",
            rate,
        )
        if is_on_policy:
            state.unfinished = []
